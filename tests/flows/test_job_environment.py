"""What a job gives its command: variables and secrets, and a log without those of earlier jobs."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from prefect.blocks.system import Secret

from flows import job
from flows.procedures.job.attempt import Attending
from tasks.plain_runner import PlainRunner
from tests.fixtures.driver import JOB, Story, attempt_on, left_job
from tests.fixtures.lab import DEMO, Lab
from tests.fixtures.rentals import handed_over
from tests.fixtures.small_saves import put_save
from torpor.control.jobs.driven_job import Driven
from torpor.shared.errors import InvalidInput
from torpor.shared.values import SnapshotId
from torpor.shared.wire.job import JobLook, JobState, LookAtJob, StartJob

_TOKEN = "hf_AbCdEf"
_NEVER = JobState(JOB, 0, "none")
_ENDED = JobState(JOB, 1, "ended", 0)


class _Line:
    """A session to a machine on which the command stands as ``state``, and ends when started."""

    hello = SimpleNamespace(machine="near")

    def __init__(self, state: JobState = _NEVER, log: str = "") -> None:
        self._state, self._log = state, log
        self.started: list[StartJob] = []

    def call(self, request: Any, *, request_id: str, within_s: float) -> Any:
        if isinstance(request, StartJob):
            self.started.append(request)
            self._state = _ENDED
        if isinstance(request, LookAtJob):
            text, self._log = self._log, ""
            return JobLook(self._state, text, len(text))
        return self._state

    def close(self) -> None:
        """Nothing waits."""


@pytest.fixture
def secret(monkeypatch: pytest.MonkeyPatch) -> dict[str, Secret]:
    """The Secret blocks that there are."""
    blocks = {"hugging-face": Secret(value=_TOKEN)}

    def load(kind: Any, name: str, *, of: str) -> Secret:
        if name not in blocks:
            raise InvalidInput(f"{of} names the block {name}, which does not exist")
        return blocks[name]

    monkeypatch.setattr("blocks.secret_variables.load_named", load)
    return blocks


def _attend(lab: Lab, line: _Line, *, begun: bool = False, **facts: Any) -> Driven:
    machine, rental = handed_over(lab.opened)
    if begun:
        facts["attempts"] = [attempt_on(machine, rental)]
    jobs = lab.opened.jobs
    given = {"env": ["MODE=fast=er"], "secrets": ["HF_TOKEN=hugging-face"]}
    driven = Driven(jobs, jobs.take(left_job(lab, **given | facts), "mine"), lambda message: None)
    with PlainRunner(lab.opened):
        Attending(lab.opened, driven, machine, rental, line).run()  # type: ignore[arg-type]
    return driven


def test_a_command_gets_its_variables_and_no_record_or_log_holds_a_secret(
    lab: Lab, secret: dict[str, Secret], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    line = _Line(log=f"logs in with {_TOKEN}\0\n")
    driven = _attend(lab, line)
    (request,) = line.started
    assert request.environment == {"MODE": "fast=er", "HF_TOKEN": _TOKEN}
    assert _TOKEN not in f"{request.argv}"
    assert _TOKEN.encode() not in msgspec.json.encode(driven.job)
    assert "logs in with ***" in caplog.messages
    assert _TOKEN not in caplog.text


def test_a_command_is_not_started_without_a_secret_that_is_missing(
    lab: Lab, secret: dict[str, Secret]
) -> None:
    secret.clear()
    line = _Line()
    (attempt,) = _attend(lab, line).job.attempts
    assert (line.started, attempt.end, attempt.status) == ([], "command ended", 126)
    assert "HF_TOKEN" in attempt.error and "does not exist" in attempt.error


def test_a_command_that_runs_goes_on_without_its_secrets_block(
    lab: Lab, secret: dict[str, Secret]
) -> None:
    secret.clear()
    (attempt,) = _attend(lab, _Line(_ENDED), begun=True).job.attempts
    assert (attempt.end, attempt.status, attempt.error) == ("command ended", 0, "")


def test_a_log_goes_once_its_job_is_stored_unless_it_is_wanted(
    lab: Lab, secret: dict[str, Secret]
) -> None:
    snapshot = put_save(lab.store, 0)
    jobs = lab.opened.jobs
    for id, final in (("a" * 12, snapshot), ("b" * 12, SnapshotId("gone")), ("c" * 12, None)):
        ended = jobs.take(left_job(lab, id), "mine")
        jobs.end(msgspec.structs.replace(ended, state="succeeded", final=final))
    line = _Line()
    _attend(lab, line)
    assert line.started[0].forget == ["a" * 12]


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"env": ["MODE"]}, "write NAME=VALUE"),
        ({"env": ["TORPOR_JOB=a"]}, "write NAME=VALUE"),
        ({"env": ["A=1", "A=2"]}, "A is set twice"),
        ({"secrets": [f"HF_TOKEN={_TOKEN}"]}, "each secret is NAME=BLOCK"),
        ({"secrets": ["HF_TOKEN=elsewhere"]}, "elsewhere, which does not exist"),
        ({"secrets": ["A=hugging-face"], "env": ["A=1"]}, "A is among both"),
    ],
)
def test_what_no_command_can_get_is_refused_before_anything_is_rented(
    lab: Lab, story: Story, secret: dict[str, Secret], given: dict[str, Any], words: str
) -> None:
    with PlainRunner(lab.opened), pytest.raises(InvalidInput, match=words) as refused:
        job.fn(DEMO, "true", **given)
    assert _TOKEN not in str(refused.value)
    assert lab.opened.jobs.open() == []
