"""Work that begins while a hibernation goes on: it is stored, or the machine is kept."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import datetime, timezone, tzinfo
from pathlib import Path

import pytest

from flows import hibernate
from tasks.machines import session_with
from tasks.plain_runner import PlainRunner
from tests.fixtures.lab import DEMO as WORKSPACE
from tests.fixtures.lab import Lab
from tests.fixtures.plain_flows import wake_plainly
from torpor.control import safety
from torpor.control.jobs.records import Job, Jobs
from torpor.control.safety import HOLDS_S
from torpor.shared.errors import MachineInUse
from torpor.shared.values import MachineId
from torpor.shared.wire.job import JobState, StartJob


@pytest.fixture
def place(lab: Lab) -> Path:
    place = lab.workspace(lab.rent().id)
    place.mkdir()
    (place / "early").write_text("before the hibernation")
    return place


def _hibernate(lab: Lab, at: str, do: Callable[[], object]) -> None:
    """Hibernate, and do that once, when the step ``at`` begins."""
    left = [do]

    def before(step: str) -> None:
        if step == at and left:
            left.pop()()

    with PlainRunner(lab.opened, before=before, wait_factor=0.1):
        hibernate.fn(WORKSPACE)
    assert not left, "the step did not come"


@pytest.mark.rule(1)
def test_what_was_written_while_the_provider_was_silent_is_stored(
    lab: Lab, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock, silent_s = safety.boot_clock_s, [0.0]
    monkeypatch.setattr(safety, "boot_clock_s", lambda: clock() + silent_s[0])

    class SameSecond(datetime):
        @classmethod
        def now(cls, tz: tzinfo | None = None) -> SameSecond:
            return began.astimezone(tz)  # type: ignore[return-value]

    began = SameSecond.fromtimestamp(time.time(), timezone.utc)
    monkeypatch.setattr("torpor.control.remote.snapshot.datetime", SameSecond)

    def write_late() -> None:
        (place / "late").write_text("after the last look at the disk")
        silent_s[0] += HOLDS_S + 1

    _hibernate(lab, "destroy machine", write_late)
    assert lab.machines() == []
    first, second = (one.snapshot for one in reversed(lab.snapshots()))
    assert first[:16] < second[:16]  # both were made in one second: the later one sorts later
    woken = lab.workspace(MachineId(wake_plainly(lab.opened).machine))
    assert (woken / "late").read_text() == "after the last look at the disk"
    assert (woken / "early").exists()


@pytest.mark.rule(1)
def test_a_job_that_is_asked_for_during_a_hibernation_keeps_the_machine(
    lab: Lab, place: Path
) -> None:
    made = Job(
        id="3f2a9c81d04e",
        workspace=WORKSPACE,
        block=WORKSPACE,
        command=["true"],
        created_unix=time.time(),
    )
    jobs = Jobs(lab.store, WORKSPACE)
    with pytest.raises(MachineInUse, match=f"job {made.id} .*cancel"):
        _hibernate(lab, "destroy machine", lambda: jobs.take(made, "another run"))
    (machine,) = lab.machines()
    assert (lab.workspace(machine.id) / "early").exists()
    assert len(lab.snapshots()) == 1  # the snapshot is whole all the same


@pytest.mark.rule(1)
@pytest.mark.usefixtures("needs_server")
@pytest.mark.parametrize("serves", [False, True], ids=["job", "server"])
def test_a_command_that_was_started_during_a_hibernation_keeps_the_machine(
    lab: Lab, place: Path, serves: bool
) -> None:
    (machine,) = lab.machines()
    asked = StartJob("3f2a9c81d04e", 1, ["sleep", "600"], "~/", "~/.log", [], serves=serves)

    def start() -> JobState:
        with session_with(lab.opened, machine) as session:
            return session.call(asked, request_id="late")

    what = "a server was started" if serves else "the command of a job was started"
    with pytest.raises(MachineInUse, match=what):
        _hibernate(lab, "see that nothing began", start)
    assert [one.id for one in lab.machines()] == [machine.id]
    _hibernate(lab, "see that nothing began", lambda: None)  # now it runs since before
    assert lab.machines() == []
