"""The decisions of the run that drives a job: store and market in memory, commands that end at
once."""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from decimal import Decimal
from threading import Event
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from flows import backup, job, sync
from flows.procedures import unfinished
from flows.procedures.job import attempt, driver
from flows.procedures.job.attempt import Attending, JobSaves
from tasks.autosave import delete_autosaves
from tasks.guards import EndingMachine, check_guards
from tasks.job_listing import failure_of
from tasks.machines import fitting_offers
from tasks.machines import renting as renting_of
from tasks.plain_runner import PlainRunner
from tasks.retention import judge_snapshots
from tests.fixtures.driver import JOB, JOB_FLOW, Story, attempt_on, drive_job, left_job
from tests.fixtures.lab import DEMO, Lab
from tests.fixtures.machines import destroy_all
from tests.fixtures.plain_flows import hibernate_plainly, run_plainly
from tests.fixtures.records import put_record, read_record
from tests.fixtures.rentals import handed_over, standing
from tests.fixtures.small_saves import put_line, put_save, verified_save
from tests.fixtures.waiting import PATIENCE_S, until
from torpor.control.jobs import policy
from torpor.control.jobs.driven_job import Driven
from torpor.control.jobs.records import Job, Stop
from torpor.control.losses import Lost
from torpor.control.money.budgets import Budget, OpenBudget
from torpor.control.rental import ending, renting
from torpor.control.rental.records import Rental
from torpor.control.safety import never_handed_over
from torpor.control.store.manifests import snapshot_ids
from torpor.control.upkeep.retention import Retention
from torpor.shared.errors import (
    BudgetExceeded,
    CreateFailed,
    EndUnproven,
    HandedOver,
    JobFailed,
    MachineUnreachable,
    SnapshotDamaged,
    StoreDenied,
    StoreUnavailable,
    WorkspaceBusy,
)
from torpor.shared.values import (
    Machine,
    MachineId,
    ObjectKey,
    SnapshotId,
    StoredSnapshot,
    made_at,
)
from torpor.shared.wire.activity import Activity, ReadActivity
from torpor.shared.wire.job import JobLook, JobState, LookAtJob, OwnSave, StopJob

_ID = "3f2a9c81d04e"
_SOON = Stop("cancelled", "hibernate", "enough", 2.0)


@pytest.mark.rule(16)
@pytest.mark.parametrize("begun", [True, False], ids=["command ended", "rented only"])
def test_a_machine_that_is_missing_in_an_answer_is_waited_for_when_no_command_runs(
    lab: Lab, story: Story, begun: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may hold the only copy of what the command wrote."""
    monkeypatch.setattr(driver, "UNPROVEN_S", 900.0)
    machine, rental = handed_over(lab.opened)
    ended = [attempt_on(machine, rental, end="command ended", status=0)]
    lab.market.proofs, lab.market.hidden = False, 3
    left = left_job(lab, attempts=ended) if begun else left_job(lab, rented=machine.id)
    assert drive_job(lab, left).state == "succeeded"
    started = [] if begun else [f"start on {machine.id}"]
    assert story.did == [*started, f"hibernate {machine.id}"]


def test_a_job_of_an_older_version_goes_on_without_its_gate(
    lab: Lab, story: Story, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its record says that its command starts before its workspace is restored."""
    machine, rental = handed_over(lab.opened)
    left = left_job(lab, attempts=[attempt_on(machine, rental)])
    del lab.market.alive[machine.id]
    key = ObjectKey(f"workspaces/{DEMO}/jobs/open/{left.id}")
    record = read_record(lab.store, key)
    record |= {"gate": True, "gated": "the command started before its files were there"}
    record["attempts"][0]["gated"] = True
    put_record(lab.store, key, record)
    (read,) = lab.opened.jobs.open()

    def wake(*_: Any) -> Any:
        return SimpleNamespace(machine=handed_over(lab.opened)[0].id, snapshot="s-1")

    monkeypatch.setattr(JOB_FLOW, "wake_workspace", wake)
    ended = drive_job(lab, read)
    assert [attempt.end for attempt in ended.attempts] == ["machine lost", "command ended"]
    assert (ended.state, ended.attempts[0].machine) == ("succeeded", machine.id)
    assert lab.opened.jobs.of(left.id) == ended


def test_a_machine_on_which_a_command_runs_is_waited_for(
    lab: Lab, story: Story, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(driver, "UNPROVEN_S", 900.0)
    machine, rental = handed_over(lab.opened)
    lab.market.proofs, lab.market.hidden = False, 3
    ended = drive_job(lab, left_job(lab, attempts=[attempt_on(machine, rental)]))
    assert (ended.state, len(ended.attempts)) == ("succeeded", 1)
    assert story.did == [f"hibernate {machine.id}"]


@pytest.mark.rule(16)
def test_a_machine_that_its_market_may_show_late_is_waited_for_until_that_has_settled(
    lab: Lab, story: Story, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a run that was killed right after its wake. Another machine would cost a whole attempt."""
    monkeypatch.setattr(driver, "UNPROVEN_S", 0.0)
    machine, _ = handed_over(lab.opened)
    lab.market.abilities = msgspec.structs.replace(lab.market.abilities, settling_s=900.0)
    lab.market.proofs, lab.market.hidden = False, 3
    assert drive_job(lab, left_job(lab, rented=machine.id)).state == "succeeded"
    assert story.did == [f"start on {machine.id}", f"hibernate {machine.id}"]


@pytest.mark.rule(16)
def test_each_gap_in_the_answers_is_waited_for_as_long(
    lab: Lab, story: Story, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine, _ = handed_over(lab.opened)
    lab.market.proofs, lab.market.hidden = False, 2
    now_s = 0.0
    clock = SimpleNamespace(monotonic=lambda: now_s, time=time.time, sleep=time.sleep)
    monkeypatch.setattr(driver, "time", clock)

    def gap() -> None:
        nonlocal now_s
        now_s += driver.UNPROVEN_S  # the first gap is long ago
        lab.market.hidden = 1

    story.during = gap
    assert drive_job(lab, left_job(lab, rented=machine.id)).state == "succeeded"
    assert story.did == [f"start on {machine.id}", f"hibernate {machine.id}"]


@pytest.mark.rule(16)
def test_of_two_runs_that_a_schedule_makes_at_once_each_runs_its_command(
    lab: Lab, story: Story
) -> None:
    """Their ids begin with the same milliseconds."""
    done = []
    for run in ("019aab3c-5d2e-7c41-9f00-3b1d2a7c9e55", "019aab3c-5d2e-7c41-9f00-3b1d2a7c9e56"):
        handed_over(lab.opened)
        with PlainRunner(lab.opened, wait_factor=0.01) as runner:
            runner.run = run
            done.append(job.fn(DEMO, ["true"]).job)
    assert [len(state.attempts) for state in done] == [1, 1]
    assert done[0].id != done[1].id
    assert [what.split()[0] for what in story.did] == ["start", "hibernate"] * 2


def test_a_retry_runs_a_command_that_failed_again_and_none_that_succeeded(
    lab: Lab, story: Story
) -> None:
    with PlainRunner(lab.opened, wait_factor=0.01) as runner:
        runner.run = "retried"
        handed_over(lab.opened)
        story.status = 3
        with pytest.raises(JobFailed, match=r"ended with status 3[\s\S]*`Retry` on the page"):
            job.fn(DEMO, "python train.py")
        handed_over(lab.opened)
        story.status = 0
        again = job.fn(DEMO, "python train.py").job
        assert job.fn(DEMO, "python train.py").job == again
    assert again.command == ["bash", "-lc", "python train.py"]
    assert [ended.state for ended in lab.opened.jobs.ended()] == ["failed", "succeeded"]
    assert [what.split()[0] for what in story.did] == ["start", "hibernate"] * 2


class _Line:
    """A session to a machine on which the command stands as ``state``."""

    hello = SimpleNamespace(machine="near")

    def __init__(self, state: JobState) -> None:
        self._state = state
        self.asked: list[Any] = []

    def call(self, request: Any, *, request_id: str, within_s: float) -> Any:
        if isinstance(request, ReadActivity):
            return Activity(0.0, "", False, [])
        if not isinstance(request, LookAtJob):
            self.asked.append(request)
        return JobLook(self._state, "", 0) if isinstance(request, LookAtJob) else self._state

    def close(self) -> None:
        """Nothing waits."""


@pytest.mark.rule(16)
@pytest.mark.parametrize(
    ("state", "stop"),
    [
        (JobState(_ID, 1, "ended", 3), None),
        (JobState(_ID, 1, "lost"), None),
        (JobState(_ID, 1, "running"), _SOON),
    ],
)
def test_a_run_that_slept_does_not_end_its_successors_attempt(
    lab: Lab, state: JobState, stop: Stop | None
) -> None:
    machine, rental = handed_over(lab.opened)
    jobs = lab.opened.jobs
    mine = jobs.take(left_job(lab, attempts=[attempt_on(machine, rental)]), "slept")
    driven = Driven(jobs, mine, lambda message: None)  # its thread sleeps, too
    if stop is not None:
        jobs.ask_stop(_ID, stop)
        driven.look_for_stop()
    jobs.take(msgspec.structs.replace(mine, driven_unix=0.0), "awake")
    line = _Line(state)
    with PlainRunner(lab.opened), pytest.raises(HandedOver, match="driven by flow run awake"):
        Attending(lab.opened, driven, machine, rental, line).run()  # type: ignore[arg-type]
    assert not any(isinstance(request, StopJob) for request in line.asked)


_EARLY, _LATE = "0" * 12, "f" * 12


@pytest.mark.rule(16)
def test_a_job_that_has_begun_goes_on_whatever_the_clocks_say(lab: Lab, story: Story) -> None:
    machine, rental = handed_over(lab.opened)
    begun = left_job(lab, _LATE, created_unix=9.0, attempts=[attempt_on(machine, rental)])
    story.during = lambda: lab.opened.jobs.ask_stop(_EARLY, _SOON)
    assert drive_job(lab, left_job(lab, _EARLY)).state == "cancelled"
    assert story.did == [f"hibernate {machine.id}"]  # after the command that ran already
    other = lab.opened.jobs.of(begun.id)
    assert other is not None and other.state == "succeeded"


@pytest.mark.rule(16)
def test_a_waiting_job_is_cancelled_while_its_run_drives_the_one_before_it(
    lab: Lab, story: Story
) -> None:
    """The other job may run for days."""
    machine, rental = handed_over(lab.opened)
    begun = left_job(lab, _LATE, created_unix=9.0, attempts=[attempt_on(machine, rental)])
    ended: list[Job] = []

    def during() -> None:
        waits = lab.opened.jobs.of(_EARLY)
        assert waits is not None and "comes first" in waits.why
        lab.opened.jobs.ask_stop(_EARLY, _SOON)
        ended.append(until(lambda: lab.opened.jobs.ended(1), "the waiting job has ended")[0])

    story.during = during
    assert drive_job(lab, left_job(lab, _EARLY)).state == "cancelled"
    assert [(state.id, state.state) for state in ended] == [(_EARLY, "cancelled")]
    other = lab.opened.jobs.of(begun.id)
    assert other is not None
    assert other.state == "succeeded"  # its machine was not left without a run
    assert story.did == [f"hibernate {machine.id}"]


@pytest.mark.rule(16)
def test_of_two_jobs_that_begin_at_once_one_is_started_at_most(lab: Lab) -> None:
    """The other one began after this one's last look."""
    machine, rental = handed_over(lab.opened)
    jobs = lab.opened.jobs
    driven = Driven(jobs, jobs.take(left_job(lab, _EARLY), "mine"), lambda message: None)
    jobs.take(left_job(lab, _LATE, attempts=[attempt_on(machine, rental)]), "theirs")
    line = _Line(JobState(_EARLY, 1, "running"))
    with PlainRunner(lab.opened):
        Attending(lab.opened, driven, machine, rental, line).run()  # type: ignore[arg-type]
    assert line.asked == []
    assert [(state.id, len(state.attempts)) for state in jobs.open()] == [(_LATE, 1), (_EARLY, 0)]


@pytest.mark.rule(16)
def test_a_job_looks_again_before_it_rents(
    lab: Lab, story: Story, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An older job is recorded after the first look, and its machine is there."""
    look = driver.machine_in_use

    def late(*given: Any) -> None:
        monkeypatch.setattr(driver, "machine_in_use", look)
        left_job(lab, _EARLY)
        handed_over(lab.opened)

    monkeypatch.setattr(driver, "machine_in_use", late)
    late_job = left_job(lab, _LATE, created_unix=9.0)
    story.during = lambda: lab.opened.jobs.ask_stop(_LATE, _SOON)
    assert drive_job(lab, late_job).state == "cancelled"
    first = lab.opened.jobs.of(_EARLY)
    assert first is not None
    assert first.state == "succeeded"


def test_a_job_keeps_its_snapshot_while_a_rental_of_it_is_open(
    lab: Lab, story: Story, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its machine, which no market shows and no proof ends, may hold what nobody has saved."""
    machine, _ = handed_over(lab.opened)
    lab.market.proofs, lab.market.hidden = False, 1000
    woken: list[str] = []

    def wake(_: Any, snapshot: str, **__: Any) -> Any:
        woken.append(snapshot)
        lab.market.hidden = 0
        return SimpleNamespace(machine=machine.id, snapshot=snapshot)

    monkeypatch.setattr(driver, "UNPROVEN_S", 0.0)
    monkeypatch.setattr(JOB_FLOW, "wake_workspace", wake)
    drive_job(lab, left_job(lab, rented=machine.id, newest=SnapshotId("s-1")))
    assert woken == ["s-1"]


@pytest.mark.rule(16)
@pytest.mark.parametrize("mine", [True, False])
def test_a_stopped_job_hibernates_what_its_wake_handed_over_and_nothing_else(
    lab: Lab, story: Story, mine: bool
) -> None:
    """Its run was killed before the record named the machine."""
    machine, rental = handed_over(lab.opened)
    if mine:
        lab.opened.rentals.change(rental, job=_ID)
    left = left_job(lab)
    lab.opened.jobs.ask_stop(_ID, _SOON)
    assert drive_job(lab, left).state == "cancelled"
    assert list(lab.market.alive) == ([] if mine else [machine.id])
    assert (f"hibernate {machine.id}" in story.did) == mine


@pytest.mark.rule(16)
@pytest.mark.parametrize("proofs", [True, False])
def test_a_stopped_job_leaves_the_machine_that_a_user_woke_since(
    lab: Lab, story: Story, monkeypatch: pytest.MonkeyPatch, proofs: bool
) -> None:
    monkeypatch.setattr(driver, "UNPROVEN_S", 1.0)
    lab.market.proofs = proofs
    gone, of_gone = handed_over(lab.opened)
    del lab.market.alive[gone.id]
    machine, _ = handed_over(lab.opened)
    left = left_job(lab, rented=gone.id, attempts=[attempt_on(gone, of_gone)])
    lab.opened.jobs.ask_stop(_ID, _SOON)
    assert drive_job(lab, left).state == "cancelled"
    assert story.did == []
    assert list(lab.market.alive) == [machine.id]


def _stopped(lab: Lab) -> Job:
    """A job that was stopped when its run had been killed in a wake."""
    left = left_job(lab)
    lab.opened.jobs.ask_stop(_ID, _SOON)
    return drive_job(lab, left)


def test_a_stopped_job_ends_without_a_proof_of_what_its_killed_wake_rented(
    lab: Lab, story: Story, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Jobs that come later in its workspace wait for it."""
    monkeypatch.setattr(driver, "UNPROVEN_S", 1.0)
    machine, rental = standing(lab.opened)
    lab.opened.rentals.change(rental, job=_ID)
    del lab.market.alive[machine.id]
    lab.market.proofs = False
    ended = _stopped(lab)
    assert ended.state == "cancelled"
    assert rental.label.rental in ended.why
    assert lab.states() == ["standing"]


@pytest.mark.parametrize("error", [MachineUnreachable, CreateFailed, SnapshotDamaged])
def test_a_stopped_job_waits_once_for_a_machine_that_never_answers(
    lab: Lab, story: Story, monkeypatch: pytest.MonkeyPatch, error: type[Exception]
) -> None:
    """Or whose snapshot nobody can read."""

    def silent(*_: Any, **__: Any) -> Machine:
        raise error("no banner")

    monkeypatch.setattr(driver, "UNPROVEN_S", 1.0)
    damaged = error is SnapshotDamaged
    monkeypatch.setattr(renting, "wait_until_reachable", silent)
    monkeypatch.setattr(unfinished, "pick_snapshot", silent if damaged else lambda *_: None)
    machine, rental = standing(lab.opened)
    lab.opened.rentals.change(rental, job=_ID)
    ended = _stopped(lab)
    assert ended.state == "cancelled"
    assert rental.label.rental in ended.why
    assert "no banner" in ended.why
    assert list(lab.market.alive) == [machine.id]


@pytest.mark.parametrize("over", [True, False], ids=["handed over", "taken up"])
def test_a_stopped_job_leaves_a_machine_that_a_user_takes_up_while_it_waits(
    lab: Lab, story: Story, monkeypatch: pytest.MonkeyPatch, over: bool
) -> None:
    def user_is_first(*_: Any, **__: Any) -> Machine:
        lab.opened.rentals.change(rental, state="handed over" if over else "standing", job="")
        return machine

    monkeypatch.setattr(renting, "wait_until_reachable", user_is_first)
    monkeypatch.setattr(unfinished, "pick_snapshot", lambda *_: None)
    machine, rental = standing(lab.opened)
    lab.opened.rentals.change(rental, job=_ID)
    assert _stopped(lab).state == "cancelled"
    assert list(lab.market.alive) == [machine.id]
    (now,) = lab.opened.rentals.open()
    assert (now.job, now.state) == ("", "handed over" if over else "standing")


def _end_slowly(lab: Lab, rental: Rental, machine: Machine) -> None:
    """The provider accepts the end of a stored machine, and takes hours."""
    warrant = never_handed_over(machine, rental.label)
    object.__setattr__(warrant, "snapshot", SnapshotId("s-1"))
    renting_of(lab.opened).end(rental, warrant)


def verify(given: Sequence[Any], verified: Any) -> None:
    """Tell the guards of a hibernation that the snapshot of the machine is whole in the store."""
    _, _, machine, guards = given
    for guard in guards:
        if isinstance(guard, driver.EndOfJob):
            guard.check(EndingMachine(machine, verified=verified))


@pytest.fixture
def slow(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> Lab:
    monkeypatch.setattr(ending, "SLOW_S", 0.0)
    lab.market.slow = True
    lab.market.abilities = msgspec.structs.replace(lab.market.abilities, ending_s=12 * 3600.0)
    return lab


def test_a_job_ends_when_the_end_of_its_machine_is_accepted(
    slow: Lab, story: Story, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine, rental = handed_over(slow.opened)

    def hibernate(*given: Any, **_: Any) -> None:
        verify(given, StoredSnapshot(DEMO, SnapshotId("s-1"), "", 0, 0.0))
        _end_slowly(slow, rental, machine)

    monkeypatch.setattr(JOB_FLOW, "hibernate_machine", hibernate)
    ended = drive_job(slow, left_job(slow, rented=machine.id))
    assert (ended.state, ended.final) == ("succeeded", "s-1")
    assert slow.market.alive[machine.id].state == "stopping"


@pytest.mark.rule(22)
def test_a_job_whose_machine_is_kept_for_data_beside_its_workspace_ends_and_says_so(
    lab: Lab, story: Story, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine, _ = handed_over(lab.opened)

    def hibernate(*given: Any, **_: Any) -> None:
        verified: Any = StoredSnapshot(DEMO, SnapshotId("s-1"), "", 0, 0.0)
        lost = Lost(keep=["it holds /data"])
        check_guards(given[-1], EndingMachine(machine, lost, verified), only_store=True)

    monkeypatch.setattr(JOB_FLOW, "hibernate_machine", hibernate)
    ended = drive_job(lab, left_job(lab, rented=machine.id))
    assert (ended.state, ended.final) == ("succeeded", "s-1")
    assert f"machine {machine.id} was not destroyed" in ended.why
    assert "it holds /data" in ended.why
    assert machine.id in lab.market.alive


@pytest.mark.parametrize("then", ["", "hibernate", "keep"])
def test_a_job_whose_machine_is_being_ended_does_not_wait_for_that(
    slow: Lab, story: Story, then: Any
) -> None:
    """Its run was killed after the end was accepted."""
    machine, rental = handed_over(slow.opened)
    with pytest.raises(EndUnproven):
        _end_slowly(slow, rental, machine)
    ended = [attempt_on(machine, rental, end="command ended", status=0)]
    left = left_job(slow, attempts=ended, final=SnapshotId("s-1"))
    if then:
        slow.opened.jobs.ask_stop(_ID, msgspec.structs.replace(_SOON, then=then))
    assert drive_job(slow, left).state == "succeeded"
    assert story.did == []


@pytest.mark.parametrize(("ago_s", "due"), [(3600.0, True), (60.0, False)])
def test_a_save_is_due_by_the_last_one_also_in_a_new_session(
    lab: Lab, monkeypatch: pytest.MonkeyPatch, ago_s: float, due: bool
) -> None:
    """Sessions that end sooner than the interval between two saves starve none."""

    class Threads:
        begun = 0

        def submit(self, *_: Any) -> None:
            self.begun += 1

    machine, rental = handed_over(lab.opened)
    monkeypatch.setattr(attempt, "stand_by", lambda *_: 60.0)
    began = [attempt_on(machine, rental, began_unix=time.time() - 7200.0)]
    jobs = lab.opened.jobs
    left = left_job(lab, attempts=began, newest_unix=time.time() - ago_s)
    driven = Driven(jobs, jobs.take(left, "mine"), lambda message: None)
    threads: Any = Threads()
    with PlainRunner(lab.opened):
        saves = JobSaves(lab.opened, driven, machine, False, None)  # type: ignore[arg-type]
        saves.go_on(threads, hurry=False, until_unix=2e9)
    assert threads.begun == int(due)


def test_a_machine_that_has_lost_its_book_gets_another_one(
    lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its autosave process was killed."""
    handed: list[Any] = []

    def stand_by(*given: Any) -> float:
        handed.append(given)
        return 3600.0

    monkeypatch.setattr(attempt, "stand_by", stand_by)
    machine, rental = handed_over(lab.opened)
    left = left_job(lab, attempts=[attempt_on(machine, rental)], newest_unix=time.time())
    driven = Driven(lab.opened.jobs, lab.opened.jobs.take(left, "mine"), lambda message: None)
    with PlainRunner(lab.opened), ThreadPoolExecutor(1) as threads:
        saves = JobSaves(lab.opened, driven, machine, False, None)  # type: ignore[arg-type]
        for until_unix, count in ((0.0, 1), (0.0, 1), (2e9, 1)):
            saves.go_on(threads, hurry=False, until_unix=until_unix)
            assert len(handed) == count
        for pause in ("RETRY_S", "MOST_RETRY_S"):
            monkeypatch.setattr(attempt, pause, 0.0)
        for until_unix, count in ((2e9, 1), (0.0, 2)):
            saves.go_on(threads, hurry=False, until_unix=until_unix)
            assert len(handed) == count


def test_a_machine_that_loses_its_book_during_a_long_save_gets_another_one(
    lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A first save may take hours, and until it has ended the machine saves all work by itself."""
    handed: list[Any] = []
    ends = Event()

    def stand_by(*given: Any) -> float:
        handed.append(given)
        return 3600.0

    def save(*_: Any, **__: Any) -> Any:
        assert ends.wait(PATIENCE_S)
        raise StoreUnavailable("the store is away")

    monkeypatch.setattr(attempt, "stand_by", stand_by)
    monkeypatch.setattr(attempt, "take_snapshot", save)
    monkeypatch.setattr(attempt, "RETRY_S", 0.0)
    machine, rental = handed_over(lab.opened)
    left = left_job(lab, attempts=[attempt_on(machine, rental)], newest_unix=time.time())
    driven = Driven(lab.opened.jobs, lab.opened.jobs.take(left, "mine"), lambda message: None)
    with PlainRunner(lab.opened), ThreadPoolExecutor(1) as threads:
        saves = JobSaves(lab.opened, driven, machine, False, None)  # type: ignore[arg-type]
        try:
            for until_unix, count in ((2e9, 0), (2e9, 0), (0.0, 1)):
                saves.go_on(threads, hurry=True, until_unix=until_unix)
                assert len(handed) == count
        finally:
            ends.set()
        saves.settle()


def test_after_a_notice_the_save_begins_before_the_machine_gets_another_book(
    lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The machine lives for seconds, and signing a book takes some."""
    begun = Event()

    def stand_by(*_: Any) -> float:
        assert begun.wait(PATIENCE_S)
        return 3600.0

    def save(*_: Any, **__: Any) -> Any:
        begun.set()
        raise StoreUnavailable("the store is away")

    monkeypatch.setattr(attempt, "stand_by", stand_by)
    monkeypatch.setattr(attempt, "take_snapshot", save)
    machine, rental = handed_over(lab.opened)
    left = left_job(lab, attempts=[attempt_on(machine, rental)], newest_unix=time.time())
    driven = Driven(lab.opened.jobs, lab.opened.jobs.take(left, "mine"), lambda message: None)
    with PlainRunner(lab.opened), ThreadPoolExecutor(1) as threads:
        saves = JobSaves(lab.opened, driven, machine, False, None)  # type: ignore[arg-type]
        saves.go_on(threads, hurry=True, until_unix=0.0)
        saves.settle()


@pytest.mark.parametrize("at_times", [False, True], ids=["every book", "each book after a look"])
def test_a_machine_that_loses_every_book_gets_few(
    lab: Lab, monkeypatch: pytest.MonkeyPatch, at_times: bool
) -> None:
    """Its disk may be full, so that it cannot say that it has one; or it lies, to get grants."""
    handed: list[Any] = []

    def stand_by(*given: Any) -> float:
        handed.append(given)
        return 3600.0

    clock_s = [1000.0]
    clock = SimpleNamespace(time=time.time, monotonic=lambda: clock_s[0])
    monkeypatch.setattr(attempt, "stand_by", stand_by)
    monkeypatch.setattr(attempt, "time", clock)
    machine, rental = handed_over(lab.opened)
    left = left_job(lab, attempts=[attempt_on(machine, rental)], newest_unix=time.time())
    driven = Driven(lab.opened.jobs, lab.opened.jobs.take(left, "mine"), lambda message: None)
    threads: Any = SimpleNamespace(submit=lambda *_: None)
    with PlainRunner(lab.opened):
        saves = JobSaves(lab.opened, driven, machine, False, None)  # type: ignore[arg-type]
        for number in range(12 * 60):
            says_unix = 9e9 if at_times and number % 2 else 0.0
            saves.go_on(threads, hurry=False, until_unix=says_unix)
            clock_s[0] += 60.0
    assert 12 <= len(handed) <= 36


@pytest.mark.rule(11)
@pytest.mark.parametrize("handed_over_book", [True, False])
def test_old_saves_are_deleted_once_the_machine_refers_to_the_new_one(
    lab: Lab, monkeypatch: pytest.MonkeyPatch, handed_over_book: bool
) -> None:
    """What the machine would save by itself is based on the save before, until it is told."""

    def stand_by(*_: Any) -> float:
        if not handed_over_book:
            raise StoreUnavailable("the store is away")
        return 60.0

    def save(*_: Any, **__: Any) -> Any:
        report = SimpleNamespace(lost=[])
        return report, verified_save(lab.store, new)

    monkeypatch.setattr(attempt, "stand_by", stand_by)
    monkeypatch.setattr(attempt, "take_snapshot", save)
    machine, rental = handed_over(lab.opened)
    began_with, old, new = put_line(lab.store, 0, 30, 60)
    attempts = [attempt_on(machine, rental)]
    left = left_job(lab, attempts=attempts, kept_saves=[old], newest=old, keep_saves=1)
    driven = Driven(lab.opened.jobs, lab.opened.jobs.take(left, "mine"), lambda message: None)
    with PlainRunner(lab.opened), ThreadPoolExecutor(1) as threads:
        saves = JobSaves(lab.opened, driven, machine, False, None)  # type: ignore[arg-type]
        saves.go_on(threads, hurry=True, until_unix=2e9)
        saves.settle()
    kept = [new] if handed_over_book else [old, new]
    assert snapshot_ids(lab.store, DEMO) == [began_with, *kept]
    assert (driven.job.kept_saves, driven.job.newest) == (kept, new)


@pytest.mark.rule(11)
def test_a_backup_leaves_the_saves_of_an_open_job_to_it(lab: Lab) -> None:
    save, between, newest = put_line(lab.store, 0, 30, 60)
    left = left_job(lab, kept_saves=[save])
    with PlainRunner(lab.opened):
        verdicts = judge_snapshots(lab.opened, Retention(last=1), False)
        lab.opened.jobs.end(msgspec.structs.replace(left, state="preempted"))
        after = judge_snapshots(lab.opened, Retention(last=1), False)
    assert [verdict.snapshot for verdict in verdicts if verdict.kept] == [newest, save]
    assert [verdict.snapshot for verdict in verdicts if not verdict.kept] == [between]
    assert [one.snapshot for one in after if not one.kept] == [between, save]  # it has ended


@pytest.mark.rule(11)
@pytest.mark.parametrize("killed", [False, True], ids=["lives", "killed before"])
def test_a_job_whose_end_is_stored_deletes_its_saves(
    lab: Lab, story: Story, monkeypatch: pytest.MonkeyPatch, killed: bool
) -> None:
    machine, rental = handed_over(lab.opened)
    began_with, old = put_line(lab.store, 0, 30)
    hibernate_as_told = JOB_FLOW.hibernate_machine

    def hibernate(*given: Any, **options: Any) -> None:
        verify(given, verified_save(lab.store, put_save(lab.store, 60, [old, began_with])))
        hibernate_as_told(*given, **options)
        if killed:
            raise StoreDenied("the run is killed here")

    monkeypatch.setattr(JOB_FLOW, "hibernate_machine", hibernate)
    attempts = [attempt_on(machine, rental, end="command ended", status=0)]
    left = left_job(lab, kept_saves=[old], keep_saves=1, attempts=attempts)
    if killed:
        with pytest.raises(StoreDenied):
            drive_job(lab, left)
        (left,) = lab.opened.jobs.open()
    ended = drive_job(lab, left)
    assert ended.state == "succeeded"
    assert snapshot_ids(lab.store, DEMO) == [began_with, ended.final]


@pytest.mark.parametrize("flow", [backup, sync], ids=["backup", "sync"])
def test_nothing_is_done_to_a_machine_on_which_a_frozen_command_is_to_go_on(
    lab: Lab, flow: Any
) -> None:
    machine = lab.rent()
    place = lab.workspace(machine.id)
    place.mkdir()
    (place / "notes").write_text("some work")
    saved = hibernate_plainly(lab.opened, destroy=False).snapshot
    left_job(lab, frozen=saved, rented=MachineId("another"))
    run_plainly(lab.opened, flow)  # somebody has woken it: the command begins from the files
    (job_,) = lab.opened.jobs.open()
    lab.opened.jobs.leave(
        msgspec.structs.replace(lab.opened.jobs.take(job_, "mine"), rented=machine.id)
    )
    with pytest.raises(WorkspaceBusy, match=f"job {JOB} was frozen, and goes on on machine"):
        run_plainly(lab.opened, flow)


def test_a_job_goes_on_from_a_backup_where_that_deleted_the_autosave_it_was_woken_from(
    lab: Lab, story: Story, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine, rental = handed_over(lab.opened)
    verified_save(lab.store, (first := put_save(lab.store, 0, [])))
    woken_from = put_save(lab.store, 10, [first], own_save=1, autosave=1)
    left = left_job(lab, attempts=[attempt_on(machine, rental)], newest=woken_from)
    newer = put_save(lab.store, 20, [woken_from, first])
    with PlainRunner(lab.opened):
        delete_autosaves(lab.opened, verified_save(lab.store, newer))
    assert snapshot_ids(lab.store, DEMO) == [first, newer]
    woken: list[str] = []

    def wake(opened: Any, snapshot: str, **_: Any) -> None:
        woken.append(snapshot)
        raise BudgetExceeded("enough")

    monkeypatch.setattr(JOB_FLOW, "wake_workspace", wake)
    destroy_all(lab.market)
    assert drive_job(lab, left).state == "over budget"
    assert woken == [newer]


@pytest.mark.rule(24)
def test_a_job_waits_for_a_budget_that_names_a_workspace_which_is_not_here(
    lab: Lab, story: Story, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As after a recovery that was cut short: a person mends the budget, and the job goes on."""
    asked: list[str] = []

    def wake(opened: Any, snapshot: str, **_: Any) -> None:
        spent = Budget(name="lab", usd_month=Decimal("0.01"), workspaces=(DEMO,))
        trouble = "budget lab names workspace other, which is not here" if len(asked) < 2 else ""
        found = replace(opened, budgets=lambda: [OpenBudget(spent, list, trouble)])
        asked.append(lab.opened.jobs.open()[0].state)
        fitting_offers(found)

    monkeypatch.setattr(JOB_FLOW, "wake_workspace", wake)
    monkeypatch.setattr(policy, "WAITS_S", (0.01,))
    put_save(lab.store, 10)
    ended = drive_job(lab, left_job(lab))
    assert (ended.state, len(asked), asked[1:]) == ("over budget", 3, ["waiting", "waiting"])


def _woken_next(lab: Lab, monkeypatch: pytest.MonkeyPatch, left: Job) -> tuple[Job, list[str]]:
    """The job, and what it has woken: its budget ends with the first machine that it rents."""
    woken: list[str] = []

    def wake(opened: Any, snapshot: str, **_: Any) -> None:
        woken.append(snapshot)
        raise BudgetExceeded("enough")

    monkeypatch.setattr(JOB_FLOW, "wake_workspace", wake)
    ended = drive_job(lab, left)
    assert ended.state == "over budget"
    return ended, woken


@pytest.mark.rule(12)
@pytest.mark.parametrize("replica", [True, False], ids=["a replica", "a workstation"])
@pytest.mark.parametrize("itself", [True, False], ids=["saved itself", "never saved"])
def test_a_job_that_began_on_an_awake_machine_goes_on_from_what_that_machine_held(
    lab: Lab, story: Story, monkeypatch: pytest.MonkeyPatch, replica: bool, itself: bool
) -> None:
    """Another machine of the workspace is backed up before the first save of the job."""
    machine, _ = handed_over(lab.opened)
    began = put_save(lab.store, 0, [])
    story.held[machine.id] = began
    saves = []

    def lost() -> None:
        if itself:
            saves.append(put_save(lab.store, 5, [began], own_save=1))
        other = put_save(lab.store, 10, [began])
        if replica:
            story.held[handed_over(lab.opened)[0].id] = other
        del lab.market.alive[machine.id]
        raise MachineUnreachable("it does not answer")

    story.during = lost
    ended, woken = _woken_next(lab, monkeypatch, left_job(lab))
    assert story.did == [f"start on {machine.id}"]
    assert woken == (saves or [began])
    assert "lacks the work in" in ended.aside


def test_a_machine_that_a_user_has_just_woken_is_asked_again_before_another_one_is_rented(
    lab: Lab, story: Story, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its SSH server is not up in the first look."""
    gone, of_gone = handed_over(lab.opened)
    del lab.market.alive[gone.id]
    began = put_save(lab.store, 0, [])
    woken, _ = handed_over(lab.opened)
    story.held[woken.id] = began
    answers = [MachineUnreachable("no banner")]

    def session(*given: Any) -> Any:
        if answers:
            raise answers.pop()
        return story.session(*given)

    monkeypatch.setattr(driver, "open_session", session)
    lost = attempt_on(gone, of_gone, end="machine lost")
    assert drive_job(lab, left_job(lab, attempts=[lost], newest=began)).state == "succeeded"
    assert story.did == [f"start on {woken.id}", f"hibernate {woken.id}"]


@pytest.mark.rule(12)
def test_the_backup_of_another_machine_is_no_save_of_a_job_that_has_none(
    lab: Lab, story: Story, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing of its machine was ever stored, or its record does not say what it began with."""
    machine, rental = handed_over(lab.opened)
    attempts = [attempt_on(machine, rental, seen_unix=100.0, agent="lost")]
    left = left_job(lab, attempts=attempts)
    other = put_save(lab.store, 10, [], own_save=1)
    del lab.market.alive[machine.id]
    ended, woken = _woken_next(lab, monkeypatch, left)
    (attempt,) = ended.attempts
    assert woken == [other]
    assert (attempt.saved, attempt.lost_s, ended.saves, ended.kept_saves) == (False, 99.0, 0, [])
    assert f"it goes on from snapshot {other} of another machine" in attempt.error


def test_the_report_says_where_a_frozen_command_did_not_go_on(lab: Lab) -> None:
    machine, rental = handed_over(lab.opened)
    frozen = put_save(lab.store, 0, own_save=1)
    lost = attempt_on(machine, rental, end="machine lost", error="its command was frozen in time")
    attempts = [lost, attempt_on(machine, rental, number=2)]
    left = left_job(lab, attempts=attempts, frozen=frozen)
    driven = Driven(lab.opened.jobs, lab.opened.jobs.take(left, "mine"), lambda message: None)
    state = JobState(left.id, 2, "ended", 0, afresh="what was frozen is of another snapshot")
    with PlainRunner(lab.opened):
        line: Any = _Line(state)
        Attending(lab.opened, driven, machine, rental, line).run()
    assert driven.job.frozen is None
    assert [one.error for one in driven.job.attempts] == [
        "its command was frozen, and did not go on: what was frozen is of another snapshot",
        "",
    ]


@pytest.mark.rule(11)
def test_a_save_that_the_machine_reports_is_the_jobs_only_if_it_made_it(lab: Lab) -> None:
    """A machine that lies could have the user's own snapshots deleted."""
    machine, rental = handed_over(lab.opened)
    earlier, users = put_save(lab.store, 0, own_save=1), put_save(lab.store, 10)
    own = put_save(lab.store, 30, own_save=1)
    attempt = attempt_on(machine, rental, began_unix=made_at(own).timestamp())
    left = left_job(lab, attempts=[attempt])
    for named, kept in ((earlier, []), (users, []), (own, [own])):
        jobs = lab.opened.jobs
        taken = jobs.take(jobs.of(left.id) or left, "mine")
        driven = Driven(jobs, taken, lambda message: None)
        reported = JobState(left.id, 1, "ended", 0, saved=OwnSave(named, "", 0, 0.0))
        line = _Line(reported)
        with PlainRunner(lab.opened):
            Attending(lab.opened, driven, machine, rental, line).run()  # type: ignore[arg-type]
        assert driven.job.kept_saves == kept
        driven.change(attempts=[attempt])


def test_a_job_that_never_began_names_no_snapshot_and_no_log(lab: Lab) -> None:
    why = "its workspace could not be woken: there is no snapshot"
    left = left_job(lab)
    never = failure_of(lab.opened, msgspec.structs.replace(left, state="failed", why=why))
    assert str(never).startswith(f"job {JOB} of workspace demo is failed: {why}. Its command was")
    machine, rental = handed_over(lab.opened)
    lost = [attempt_on(machine, rental, end="machine lost")]
    del lab.market.alive[machine.id]
    with PlainRunner(lab.opened):
        ended = msgspec.structs.replace(left, state="preempted", attempts=lost)
        failed = failure_of(lab.opened, ended)
    assert "No snapshot has its work. Its log is lost with its machine. `Retry`" in str(failed)
    for said in (str(never), str(failed)):
        assert "None" not in said and "nowhere" not in said
