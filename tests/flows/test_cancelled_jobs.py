"""A job whose run is cancelled in Prefect, or killed: it is stopped, and no other run goes on with
it. Store and market in memory, commands that end at once."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest

from flows.job import drive
from tasks.plain_runner import PlainRunner
from tasks.runs import RunState
from tests.fixtures.driver import JOB, Story, attempt_on, left_job
from tests.fixtures.lab import Lab
from tests.fixtures.rentals import handed_over
from tests.fixtures.waiting import until
from torpor.control.jobs import records
from torpor.control.jobs.records import Job

_FIRST, _SECOND = "0" * 12, "f" * 12
_CANCELLED = "its run was cancelled in Prefect"


class _Ended(BaseException):
    """Prefect, or Ctrl-C, ends the process."""


class _Prefect(PlainRunner):
    """Runs in these states; what is started is kept."""

    def __init__(self, lab: Lab, states: dict[str, RunState]) -> None:
        super().__init__(lab.opened, wait_factor=0.01)
        self.run = "mine"
        self.states = states
        self.started: list[tuple[str, str]] = []

    def state(self, run: str) -> RunState:
        return self.states.get(run, "running")

    def start(self, flow: Any, key: str, *, queue: str = "", **parameters: Any) -> str:
        self.started.append((queue, parameters["job"]))
        return "run again"


def _driven_by(lab: Lab, run: str, job: Job, driven_for: str = "") -> Job:
    """The job, whose record says that a run drives it."""
    return lab.opened.jobs.take(job, run, driven_for)


def _now(lab: Lab, job: str) -> Job:
    found = lab.opened.jobs.of(job)
    assert found is not None
    return found


def test_a_job_that_was_cancelled_is_not_run_by_the_next_job_of_its_workspace(
    lab: Lab, story: Story
) -> None:
    """Its run was killed before it could say so."""
    machine, _ = handed_over(lab.opened)
    _driven_by(lab, "killed", left_job(lab, _FIRST))
    with _Prefect(lab, {"killed": "cancelled"}):
        second = drive(lab.opened, left_job(lab, _SECOND, created_unix=9.0))
    first = _now(lab, _FIRST)
    assert (first.state, first.why, first.attempts) == ("cancelled", _CANCELLED, [])
    assert second.state == "succeeded"
    assert story.did == [f"start on {machine.id}", f"hibernate {machine.id}"]


def test_a_run_that_was_cancelled_for_its_own_job_has_not_cancelled_the_one_that_it_drove(
    lab: Lab, story: Story
) -> None:
    handed_over(lab.opened)
    left = _driven_by(lab, "killed", left_job(lab), "e" * 12)
    with _Prefect(lab, {"killed": "cancelled"}):
        assert drive(lab.opened, left).state == "succeeded"


def test_a_job_is_taken_over_from_a_run_that_ended_though_it_has_just_written(
    lab: Lab, story: Story
) -> None:
    machine, rental = handed_over(lab.opened)
    killed = _driven_by(lab, "killed", left_job(lab, attempts=[attempt_on(machine, rental)]))
    with patch.object(records, "LOST_S", 900.0), _Prefect(lab, {"killed": "ended"}):
        assert killed.driven
        assert drive(lab.opened, killed).state == "succeeded"


def _cancelled_while(lab: Lab, story: Story, prefect: _Prefect, job: Job) -> None:
    def cancelled() -> None:
        prefect.states["mine"] = "cancelled"
        raise _Ended

    story.during = cancelled
    with prefect, pytest.raises(_Ended):
        drive(lab.opened, job)


def test_a_cancel_of_a_running_job_is_carried_out_by_another_run_at_once(
    lab: Lab, story: Story, caplog: pytest.LogCaptureFixture
) -> None:
    machine, _ = handed_over(lab.opened)
    prefect = _Prefect(lab, {})
    _cancelled_while(lab, story, prefect, left_job(lab, on_cancel="hibernate"))
    left = _now(lab, JOB)
    assert (left.driven, left.process, left.failures) == (False, "", 0)
    stop = lab.opened.jobs.stop_asked(JOB)
    assert stop is not None
    assert (stop.state, stop.then, stop.why) == ("cancelled", "hibernate", _CANCELLED)
    assert prefect.started == [("critical", JOB)]
    assert f"run again stops job {JOB}: it ends the command and hibernates" in caplog.text
    story.during = lambda: None
    with _Prefect(lab, {"mine": "cancelled"}) as other:
        other.run = "run again"
        assert drive(lab.opened, left).state == "cancelled"
    assert story.did == [f"start on {machine.id}", f"hibernate {machine.id}"]


def test_a_cancel_where_no_run_can_be_started_stays_on_record_and_says_so(
    lab: Lab, story: Story, caplog: pytest.LogCaptureFixture
) -> None:
    class NoDeployment(_Prefect):
        def start(self, flow: Any, key: str, *, queue: str = "", **parameters: Any) -> str:
            raise LookupError("no deployment has this name")

    handed_over(lab.opened)
    _cancelled_while(lab, story, NoDeployment(lab, {}), left_job(lab))
    assert lab.opened.jobs.stop_asked(JOB) is not None
    assert f"the next `watch`, or the next job of this workspace, stops job {JOB}" in caplog.text
    assert "no deployment has this name" in caplog.text


def test_a_run_that_is_ended_without_a_cancel_leaves_its_job_to_any_run_at_once(
    lab: Lab, story: Story, caplog: pytest.LogCaptureFixture
) -> None:
    """A worker that stops, or Ctrl-C."""

    def ended() -> None:
        raise _Ended

    handed_over(lab.opened)
    story.during = ended
    with _Prefect(lab, {}) as prefect, pytest.raises(_Ended):
        drive(lab.opened, left_job(lab))
    assert not _now(lab, JOB).driven
    assert lab.opened.jobs.stop_asked(JOB) is None
    assert prefect.started == []
    assert f"the command of job {JOB} runs on, on machine" in caplog.text
    assert "`watch`, or a run of `job` with its id, continues it" in caplog.text


def test_a_run_that_is_cancelled_while_it_drives_another_job_hands_that_on_and_ends_its_own(
    lab: Lab, story: Story
) -> None:
    handed_over(lab.opened)
    left_job(lab, _FIRST)
    prefect = _Prefect(lab, {})
    _cancelled_while(lab, story, prefect, left_job(lab, _SECOND, created_unix=9.0))
    first, second = _now(lab, _FIRST), _now(lab, _SECOND)
    assert (first.state, first.driven, lab.opened.jobs.stop_asked(_FIRST)) == (
        "running", False, None
    )  # fmt: skip
    assert (second.state, second.why) == ("cancelled", _CANCELLED)
    assert prefect.started == [("critical", _FIRST)]


def test_a_cancel_that_reaches_no_process_stops_the_job_all_the_same(
    lab: Lab, story: Story
) -> None:
    """Its worker is lost, or the flow was called from Python."""
    machine, _ = handed_over(lab.opened)
    prefect = _Prefect(lab, {})

    def cancelled() -> None:
        prefect.states["mine"] = "cancelled"
        until(lambda: lab.opened.jobs.stop_asked(JOB), "the run sees that it is cancelled")

    story.during = cancelled
    with prefect:
        assert drive(lab.opened, left_job(lab)).state == "cancelled"
    assert story.did == [f"start on {machine.id}", f"hibernate {machine.id}"]


def test_a_run_that_is_cancelled_before_it_drives_its_job_stops_it(
    lab: Lab, story: Story, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It waits until the run before it is surely gone."""

    def ended(_: float) -> None:
        raise _Ended

    left = _driven_by(lab, "killed", left_job(lab), "e" * 12)
    clock = SimpleNamespace(sleep=ended, time=time.time, monotonic=time.monotonic)
    monkeypatch.setattr("flows.procedures.job.driver.time", clock)
    with _Prefect(lab, {"mine": "cancelled"}), pytest.raises(_Ended):
        drive(lab.opened, left)
    stop = lab.opened.jobs.stop_asked(JOB)
    assert stop is not None and stop.why == _CANCELLED
