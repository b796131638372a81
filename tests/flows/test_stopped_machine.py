"""A job whose machine is stopped by its provider: store and market in memory."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from flows.procedures.job import driver, stopped_machine
from flows.procedures.job.attempt import Attending
from flows.procedures.job.stopped_machine import GONE_S, LEAVE_S, POLL_S, RESTART_S, Stopped
from tasks.plain_runner import PlainRunner
from tests.fixtures.driver import JOB, JOB_FLOW, Story, attempt_on, drive_job, left_job
from tests.fixtures.lab import DEMO, Lab
from tests.fixtures.rentals import handed_over
from torpor.control import safety
from torpor.control.jobs.driven_job import Driven
from torpor.control.jobs.records import Job, Stop
from torpor.control.rental.records import Rental
from torpor.control.store.workspace_records import WorkspaceRecords
from torpor.control.upkeep.lineage import NewestState
from torpor.shared.errors import NoCapacity, ProviderDenied, Recovered, SnapshotDamaged
from torpor.shared.values import Machine, SnapshotId, StoredSnapshot
from torpor.shared.wire.job import JobLook, JobState, LookAtJob

_SAVE = StoredSnapshot(DEMO, SnapshotId("20261120T234913Z-1f0c9ab2"), "", 0, 0.0)
_STOP = Stop("cancelled", "hibernate", "enough", 2.0)


@pytest.fixture
def now_s() -> list[float]:
    return [0.0]


@pytest.fixture
def world(
    lab: Lab, story: Story, now_s: list[float], monkeypatch: pytest.MonkeyPatch
) -> tuple[Lab, Story]:
    """A whole save is in the store; a wake gives a new machine; no wait takes time."""

    def nap(driven: Driven, seconds: float) -> None:
        driven.check()
        now_s[0] += seconds

    def wake(opened: Any, wanted: str, **_: Any) -> Any:
        story.did.append(f"wake {wanted}")
        machine, rental = handed_over(lab.opened)
        lab.opened.rentals.change(rental, job=opened.job)
        return SimpleNamespace(machine=machine.id, snapshot=wanted)

    def save(opened: Any, session: Any, machine: Machine, *_: Any, **__: Any) -> Any:
        story.did.append(f"save {machine.id}")
        return SimpleNamespace(lost=[]), SimpleNamespace(snapshot=_SAVE.snapshot)

    monkeypatch.setattr(JOB_FLOW, "wake_workspace", wake)
    monkeypatch.setattr(driver, "newest_save", lambda *_: NewestState(None, None, [], []))
    monkeypatch.setattr(stopped_machine, "find_sure_save", lambda *_: _SAVE)
    monkeypatch.setattr(stopped_machine, "take_snapshot", save)
    monkeypatch.setattr(safety, "verify_snapshot", lambda *_: None)
    monkeypatch.setattr(Driven, "nap", nap)
    monkeypatch.setattr(driver, "Stopped", partial(Stopped, clock_s=lambda: now_s[0]))
    for name, value in (("POLL_S", POLL_S), ("RESTART_S", RESTART_S), ("GONE_S", GONE_S)):
        monkeypatch.setattr(stopped_machine, name, value)  # those of the product
    return lab, story


def _stopped(lab: Lab, state: Any = "stopped", **rental: Any) -> tuple[Machine, Rental]:
    """A machine that was handed over, and that its provider does not run."""
    machine, of = handed_over(lab.opened)
    lab.market.alive[machine.id] = msgspec.structs.replace(machine, state=state)
    return machine, lab.opened.rentals.change(of, **rental)


def _market(lab: Lab, starts: bool, **abilities: Any) -> list[str]:
    """A market that starts machines again, or has no room for them; what it was asked to start."""
    asked = []

    def start(machine: Machine) -> None:
        asked.append(str(machine.id))
        if not starts:
            raise NoCapacity("the zone is full")
        live = lab.market.alive[machine.id]
        lab.market.alive[machine.id] = msgspec.structs.replace(live, state="running")

    able = {"restarts": True, **abilities}
    lab.market.abilities = msgspec.structs.replace(lab.market.abilities, **able)
    lab.market.start = start  # type: ignore[attr-defined]
    return asked


def _shows(lab: Lab, now_s: list[float], at: Callable[[float], Any]) -> None:
    """The market shows its one machine in the state that ``at`` says for the time."""
    listed = lab.market.list_own

    def list_own() -> list[Machine]:
        for name, one in list(lab.market.alive.items()):
            lab.market.alive[name] = msgspec.structs.replace(one, state=at(now_s[0]))
        return listed()

    lab.market.list_own = list_own  # type: ignore[method-assign]


def _open(lab: Lab, machine: Machine, rental: Rental, **attempt: Any) -> Job:
    """A job whose command ran on the machine."""
    return left_job(lab, newest=_SAVE.snapshot, attempts=[attempt_on(machine, rental, **attempt)])


@pytest.mark.rule(16)
@pytest.mark.parametrize("state", ["stopped", "stopping", "starting"])
@pytest.mark.parametrize("end", ["cancelled", "over budget"])
def test_a_job_on_a_machine_that_does_not_run_can_be_stopped(
    world: tuple[Lab, Story], state: Any, end: Any
) -> None:
    """The market keeps the disk, and torpor cannot start the machine there."""
    lab, story = world
    machine, rental = _stopped(lab, state, job=JOB)
    left = _open(lab, machine, rental)
    lab.opened.jobs.ask_stop(JOB, Stop(end, "hibernate", "enough", 2.0))
    ended = drive_job(lab, left)
    assert ended.state == end
    assert ended.why.startswith(f"enough. Machine {machine.id} at {machine.provider} was left")
    assert "may hold work that is in no snapshot" in ended.why
    assert (list(lab.market.alive), story.did) == ([machine.id], [])


def test_a_stop_is_seen_while_a_machine_is_waited_for(world: tuple[Lab, Story]) -> None:
    lab, _ = world
    machine, rental = _stopped(lab)
    left, looks, listed = _open(lab, machine, rental), iter(range(8)), lab.market.list_own

    def list_own() -> list[Machine]:
        if next(looks, None) is None:
            lab.opened.jobs.ask_stop(JOB, _STOP)
        return listed()

    lab.market.list_own = list_own  # type: ignore[method-assign]
    assert drive_job(lab, left).state == "cancelled"


@pytest.mark.rule(16)
def test_a_stopped_machine_is_started_and_saved_and_the_command_goes_on_there(
    world: tuple[Lab, Story],
) -> None:
    lab, story = world
    asked = _market(lab, starts=True)
    machine, rental = _stopped(lab, job=JOB)
    assert drive_job(lab, _open(lab, machine, rental)).state == "succeeded"
    assert asked == [machine.id]
    assert story.did == [f"save {machine.id}", f"hibernate {machine.id}"]


@pytest.mark.rule(24)
def test_a_stopped_machine_of_a_workspace_that_another_host_has_recovered_is_not_ended(
    world: tuple[Lab, Story], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Right before its end: the market has answered that it does not start it."""
    lab, story = world
    _market(lab, starts=False)
    machine, rental = _stopped(lab, job=JOB)

    def save(*_: Any) -> StoredSnapshot:
        WorkspaceRecords(lab.store, None).take(DEMO, "22222222", "newhost")
        return _SAVE

    monkeypatch.setattr(stopped_machine, "find_sure_save", save)
    with pytest.raises(Recovered, match="by newhost"):
        drive_job(lab, _open(lab, machine, rental))
    assert (list(lab.market.alive), story.did) == ([machine.id], [])
    assert not lab.opened.jobs.open()[0].ended


@pytest.mark.parametrize("starts", [True, False])
def test_a_stopped_machine_of_a_cancelled_job_is_hibernated_or_ended(
    world: tuple[Lab, Story], starts: bool
) -> None:
    lab, story = world
    _market(lab, starts=starts)
    machine, rental = _stopped(lab, job=JOB)
    left = _open(lab, machine, rental)
    lab.opened.jobs.ask_stop(JOB, _STOP)
    assert drive_job(lab, left).state == "cancelled"
    assert story.did[-1:] == ([f"hibernate {machine.id}"] if starts else [])
    assert lab.market.alive == {}


@pytest.mark.rule(16)
@pytest.mark.parametrize("keeps", ["disk", "nothing"])
def test_a_machine_that_does_not_start_again_is_ended_and_the_job_goes_on_from_its_save(
    world: tuple[Lab, Story], keeps: Any
) -> None:
    lab, story = world
    asked = _market(lab, starts=False, stop_keeps=keeps)
    machine, rental = _stopped(lab, job=JOB)
    ended = drive_job(lab, _open(lab, machine, rental))
    assert (ended.state, [one.end for one in ended.attempts]) == (
        "succeeded",
        ["machine lost", "command ended"],
    )
    assert story.did == [f"wake {_SAVE.snapshot}", "start on m2", "hibernate m2"]
    assert bool(asked) == (keeps == "disk")  # a start would find an empty disk
    assert lab.market.alive == {}
    over = lab.opened.rentals.ended(rental.label.rental)
    assert over is not None
    assert over.snapshot is None  # what it held to the last is nowhere


@pytest.mark.rule(16)
@pytest.mark.parametrize("between", ["starting", "queued", "stopping"])
def test_only_the_time_in_which_a_machine_is_stopped_counts(
    world: tuple[Lab, Story], now_s: list[float], between: str
) -> None:
    """The market says "stopped" for a moment after a long time in another state; then it runs."""
    lab, story = world
    asked = _market(lab, starts=False)
    machine, rental = _stopped(lab, job=JOB)
    long_s = 2 * RESTART_S

    def at(time_s: float) -> str:
        if time_s >= 2 * long_s:
            return "running"
        return "stopped" if long_s <= time_s <= long_s + POLL_S else between

    _shows(lab, now_s, at)
    assert drive_job(lab, _open(lab, machine, rental)).state == "succeeded"
    assert asked == [machine.id, machine.id]
    assert story.did == [f"save {machine.id}", f"hibernate {machine.id}"]


@pytest.mark.rule(16)
def test_a_machine_that_starts_is_not_ended_however_long_that_takes(
    world: tuple[Lab, Story], now_s: list[float]
) -> None:
    """The job is to stop, so it leaves the machine once its market's time to start it is over."""
    lab, story = world
    _market(lab, starts=False, ready_s=1200.0)
    machine, rental = _stopped(lab, job=JOB)
    _shows(lab, now_s, lambda time_s: "stopped" if time_s < POLL_S else "starting")
    left = _open(lab, machine, rental)
    lab.opened.jobs.ask_stop(JOB, _STOP)
    ended = drive_job(lab, left)
    assert (ended.state, list(lab.market.alive), story.did) == ("cancelled", [machine.id], [])
    assert "which is starting and costs money" in ended.why
    assert now_s[0] == POLL_S + 1200.0


def test_a_cancelled_job_leaves_a_machine_that_never_stays_in_one_state(
    world: tuple[Lab, Story], now_s: list[float]
) -> None:
    lab, _ = world
    _market(lab, starts=False)
    machine, rental = _stopped(lab, job=JOB)
    _shows(lab, now_s, lambda time_s: ("stopped", "starting")[int(time_s / POLL_S) % 2])
    left = _open(lab, machine, rental)
    lab.opened.jobs.ask_stop(JOB, _STOP)
    assert drive_job(lab, left).state == "cancelled"
    assert list(lab.market.alive) == [machine.id]
    assert now_s[0] == LEAVE_S


@pytest.mark.rule(16)
def test_a_machine_whose_market_was_never_asked_for_its_start_is_not_ended(
    world: tuple[Lab, Story],
) -> None:
    lab, _ = world
    _market(lab, starts=False)

    def denied(machine: Machine) -> None:
        raise ProviderDenied("the login may not start machines")

    lab.market.start = denied  # type: ignore[attr-defined]
    machine, rental = _stopped(lab, job=JOB)
    left = _open(lab, machine, rental)
    lab.opened.jobs.ask_stop(JOB, _STOP)
    ended = drive_job(lab, left)
    assert (ended.state, list(lab.market.alive)) == ("cancelled", [machine.id])
    assert f"Machine {machine.id} at {machine.provider} was left" in ended.why


@pytest.mark.rule(16)
@pytest.mark.parametrize(
    "why", ["a user worked there", "no whole save", "a newer save is not whole"]
)
def test_a_stopped_machine_whose_work_is_nowhere_else_is_not_ended(
    world: tuple[Lab, Story], monkeypatch: pytest.MonkeyPatch, why: str
) -> None:
    lab, _ = world
    _market(lab, starts=False)
    machine, rental = _stopped(lab, job="" if why == "a user worked there" else JOB)

    def damaged(*_: Any) -> None:
        raise SnapshotDamaged("a pack is missing")

    if why == "no whole save":
        monkeypatch.setattr(safety, "verify_snapshot", damaged)
    elif why == "a newer save is not whole":
        monkeypatch.setattr(stopped_machine, "find_sure_save", damaged)
    left = _open(lab, machine, rental)
    lab.opened.jobs.ask_stop(JOB, _STOP)
    assert drive_job(lab, left).state == "cancelled"
    assert list(lab.market.alive) == [machine.id]


@pytest.mark.rule(16)
def test_a_machine_that_runs_again_while_it_is_ended_is_used(world: tuple[Lab, Story]) -> None:
    """Its disk can be reached after all."""
    lab, story = world
    _market(lab, starts=False)
    machine, rental = _stopped(lab, job=JOB)
    destroy = lab.market.destroy

    def late(machine: Machine, warrant: Any) -> None:
        live = lab.market.alive[machine.id]
        lab.market.alive[machine.id] = msgspec.structs.replace(live, state="running")
        destroy(machine, warrant)

    lab.market.destroy = late  # type: ignore[method-assign]
    assert drive_job(lab, _open(lab, machine, rental)).state == "succeeded"
    assert story.did == [f"save {machine.id}", f"hibernate {machine.id}"]


def test_a_command_that_died_with_its_machine_has_lost_its_machine(lab: Lab) -> None:
    """Its supervisor was not lost to the command's own use of memory."""

    class Line:
        def call(self, request: Any, **_: Any) -> Any:
            state = JobState(JOB, 1, "lost")
            return JobLook(state, "", 0) if isinstance(request, LookAtJob) else state

        def close(self) -> None:
            """Nothing waits."""

    machine, rental = handed_over(lab.opened)
    jobs = lab.opened.jobs
    left = left_job(lab, stopped=machine.id, attempts=[attempt_on(machine, rental)])
    driven = Driven(jobs, jobs.take(left, "mine"), lambda message: None)
    with PlainRunner(lab.opened):
        Attending(lab.opened, driven, machine, rental, Line()).run()  # type: ignore[arg-type]
    assert driven.job.attempts[-1].end == "machine lost"
