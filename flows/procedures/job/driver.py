"""A driver: what the run that drives a job sees of the job, and how it carries out each move."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Final

import msgspec

from flows.procedures.job.attempt import Attending
from flows.procedures.job.nodes import bring_nodes, end_nodes
from flows.procedures.job.stopped_machine import Stopped
from flows.procedures.job.thinning import is_of_machine, thin_saves
from flows.procedures.unfinished import end_leftovers
from tasks.autosave import line_held
from tasks.cancellation import state_of, stop_if_cancelled
from tasks.guards import EndingMachine
from tasks.job_limits import Limits, most_usd_h
from tasks.job_saves import holds_frozen
from tasks.jobs import (
    check_no_other_job,
    look_at_command,
    machine_in_use,
    nodes_of,
    stop_command,
)
from tasks.lineage import lacks
from tasks.machines import end_abandoned, open_session, renting, session_with
from tasks.ownership import warn_or_recovered
from tasks.progress import doing, now
from tasks.runner import runner
from tasks.runs import GONE
from tasks.standing_by import goes_on_from, is_of_job, newest_save
from tasks.workspace import OpenWorkspace
from torpor.control.jobs.decide import EndJob, JobMachine, Situation, end_of, is_over, is_over_on
from torpor.control.jobs.driven_job import Driven
from torpor.control.jobs.listing import in_other_hands
from torpor.control.jobs.policy import MOST_FAILURES, spot_for, wait_s
from torpor.control.jobs.records import DRIVEN_S, Job, Stop
from torpor.control.jobs.report import allowed
from torpor.control.remote.agent import Session
from torpor.control.rental.records import Rental
from torpor.control.rental.renting import AT_ONCE_S
from torpor.control.reports import WakeReport
from torpor.control.safety import Verified
from torpor.control.store.manifests import snapshot_ids
from torpor.shared.errors import (
    BudgetExceeded,
    BudgetUnread,
    CreateFailed,
    EndUnproven,
    HandedOver,
    LacksWork,
    MachineError,
    MachineInUse,
    NoOffer,
    ProviderError,
    Recovered,
    SnapshotError,
    StoreError,
    StoreUnavailable,
    TorporError,
    UnexpectedAnswer,
    UnsavedWork,
    WorkspaceAwake,
    WorkspaceBusy,
)
from torpor.shared.format.names import manifest_key
from torpor.shared.values import Machine, MachineId, SnapshotId, WantChange

TURN_S: Final = 10.0
"""Seconds between two looks at the job of the workspace whose turn comes first."""
RETRY_S: Final = 5.0
LONGEST_S: Final = 60.0
"""The longest wait in seconds between two tries where a machine, a provider or the store does not
answer; RETRY_S is the first one. A machine is waited for as long as its provider shows it, because
it may hold work."""
UNPROVEN_S: Final = 120.0
"""Seconds that a machine may be missing in its provider's answers, without a proof of its end,
before it counts as lost; and seconds that a machine which is not the job's may not answer before
another one is rented beside it."""
SURE_S: Final = 2 * DRIVEN_S + 5.0
"""A run that drives a job writes the job's record within this many seconds."""


@contextmanager
def driving(
    opened: OpenWorkspace, record: Job, continue_job: Callable[[Job], str], driven_for: str = ""
) -> Iterator[Driver]:
    """Drive a job in this run. When the run is over, any run may continue the job. WorkspaceBusy if
    another run drives it. ``continue_job`` starts a run that continues the job, and returns that
    run's name. ``driven_for``: the job of this run, where it is another one that waits for this."""
    state = state_of(record.driver) if record.driver else "unknown"
    try:
        record = _silent(opened, record)
    except BaseException:
        own = msgspec.structs.replace(record, driven_for=driven_for)
        stop_if_cancelled(opened, own, state_of(runner().run))
        raise
    if record.ended:
        yield Driver(opened, Driven(opened.jobs, record, _warn))
        return
    stop_if_cancelled(opened, record, state)
    taken = opened.jobs.take(record, runner().run, driven_for, gone=state in GONE)

    limits, warned = Limits(opened), ""

    def look_at_own_run(job: Job) -> None:
        nonlocal warned
        warned = warn_or_recovered(opened, warned)  # its limits hold in any case
        stop_if_cancelled(opened, job, state_of(runner().run))
        _heed_approval(opened, driven)
        limits.look(driven.job)

    with Driven(opened.jobs, taken, _warn, look_at_own_run) as driven:
        _heed_approval(opened, driven)  # before the job is refused because of its cost
        driver = Driver(opened, driven)
        try:
            yield driver
        except HandedOver:
            raise
        except Exception as error:
            with suppress(TorporError):  # the first error is what the user can act on
                driven.leave(str(error))
            raise
        except BaseException:  # somebody ends this process; Prefect kills it 30 seconds later
            driver.leave(continue_job)
            raise


def _heed_approval(opened: OpenWorkspace, driven: Driven) -> None:
    """Write into the job's record what a person has approved since. If the approval cannot be read,
    the recorded limits hold."""
    try:
        approval = opened.jobs.approved(driven.job.id)
    except TorporError as error:
        runner().log.warning("whether job %s may use more is not known: %s", driven.job.id, error)
        return
    changes = approval.changes(driven.job) if approval is not None else {}
    if changes:
        driven.change(**changes)
        runner().log.info("job %s may use more: %s", driven.job.id, allowed(driven.job))


def _silent(opened: OpenWorkspace, record: Job) -> Job:
    """The record of a job that no other run drives. A run that drives it would write the record
    again while this function waits."""
    if not record.process or record.driver == runner().run:
        return record
    time.sleep(SURE_S)
    now = opened.jobs.of(record.id) or record
    written = (now.version, now.process) != (record.version, record.process)
    if not now.ended and written:
        raise WorkspaceBusy(
            f"flow run {now.driver} works on job {record.id} of workspace {record.workspace}: wait "
            "until it has ended"
        )
    return now


def _warn(message: str) -> None:
    runner().log.warning(message)


class Driver:
    """The moves of one job. All that a driver knows is in the job's record, so that another run can
    go on at any point."""

    def __init__(self, opened: OpenWorkspace, driven: Driven) -> None:
        self.opened = opened
        self._driven = driven
        self._refusals = self._troubles = 0
        self._warned = ""
        self._missing_since: float | None = None
        self.end_of_job = EndOfJob(opened, driven)
        self._kept = ""  # why the machine was kept after the end of the job
        self._stopped = Stopped(opened, driven, self._say_waiting)
        self._left: tuple[set[str], float] = (set(), 0.0)
        self._beside: set[MachineId] = set()  # machines that lack the newest save of the job
        self._silent: dict[MachineId, float] = {}  # by machine: since when its snapshot is unknown
        self._looked_at: list[SnapshotId] | None = None  # the snapshots of the last choice

    @property
    def job(self) -> Job:
        return self._driven.job

    @property
    def stop(self) -> Stop | None:
        """The last request to stop the job, as far as this run knows."""
        return self._driven.stop

    def leave(self, continue_job: Callable[[Job], str]) -> None:
        """Let any run continue the job. If this run was cancelled, its own job is stopped: at once
        where nothing has begun, and otherwise by another run, which has the time for it."""
        stop, by = None, ""
        try:
            self._driven.leave(self.job.why, failed=False)
            state = state_of(runner().run)
            stop = stop_if_cancelled(self.opened, self.job, state)
            if stop is not None and self._is_untouched():
                self._driven.end(stop.state, stop.why)
                return
            if state == "cancelled":
                by = continue_job(self.job)
        except HandedOver:
            return
        except Exception as error:  # noqa: BLE001 - what ends this process is raised next
            runner().log.warning("job %s: %s", self.job.id, error)
        runner().log.warning("%s", in_other_hands(self.job, stop, by))

    @contextmanager
    def tried_again(self) -> Iterator[None]:
        """Wait after an error that another try may mend. HandedOver if another run drives the
        job."""
        self._driven.check()
        try:
            self._warned = warn_or_recovered(self.opened, self._warned)
            yield
            self._troubles = 0
        except TorporError as error:
            again = isinstance(error, UnexpectedAnswer | WorkspaceBusy | WorkspaceAwake | LacksWork)
            if not (error.retryable or again):
                raise
            self._troubles += 1
            runner().log.warning("job %s tries again: %s", self.job.id, error)
            self._driven.nap(min(LONGEST_S, RETRY_S * self._troubles))

    def look(self) -> Situation:
        """Ask what the next move depends on, and no more than that."""
        stop = self._driven.look_for_stop()
        if stop is not None and self._is_untouched():
            return Situation(untouched=True)
        if not self.job.attempts and self._first().id != self.job.id:
            return Situation(first=False)
        end_abandoned(renting(self.opened), AT_ONCE_S)
        found = machine_in_use(self.opened, self._newest_machine(), self._may_go_on_at)
        if found is None or found[0].state == "running":
            self._stopped.forget()
        if found is not None and (stop is None or self._is_ours(*found)):
            self._missing_since = None
            return Situation(JobMachine(*found, ours=self._is_ours(*found)))
        if found is None and self._may_show_again():
            return Situation(hidden=True)
        if self.job.newest and not (found or self._missing_since or self.job.attempts):
            self._driven.change(newest=None)  # others may have saved since: wake the newest state
        self._record_loss()
        asked = stop is not None or self.job.nodes > 1
        return Situation(left=asked and bool(self._left_rentals()))

    def _first(self) -> Job:
        """The job of the workspace whose turn comes first: jobs of one workspace run one after the
        other."""
        return next(iter(self.opened.jobs.open()), self.job)

    def look_again_later(self) -> None:
        self._driven.nap(RETRY_S)

    def wait_for_turn(self) -> Job | None:
        """Wait for the job that comes first. Returns that job if nobody drives it, for this run to
        drive. Otherwise this run would hold a slot while it waits for a run that finds no free
        slot."""
        first = self._first()
        if first.id == self.job.id:
            return None
        why = f"job {first.id} of this workspace comes first"
        if self.job.why != why:
            self.end_others()
        self._say_waiting(why)
        self._driven.nap(TURN_S)
        pause_s = wait_s(first.failures) if first.failures else 0.0
        if first.driven or time.time() - first.driven_unix <= pause_s:
            return None
        runner().log.warning("job %s comes first and has no run: this run takes it", first.id)
        return first

    @contextmanager
    def driving_for(self, first: Job) -> Iterator[None]:
        """Within this context, this run drives another job. A request to stop this job still ends
        it."""
        try:
            with self._driven.while_others_run(self._stop_untouched):
                yield
        except TorporError as error:  # the other job is tried again, by this run or another one
            if not self.job.ended:
                self._say_waiting(f"job {first.id} comes first and was not ended: {error}")
                self._driven.nap(LONGEST_S)

    def _stop_untouched(self, stop: Stop) -> None:
        """End this job while its run drives another one, which the run continues to do."""
        if self._is_untouched():
            self._driven.end(stop.state, stop.why)

    def _is_untouched(self) -> bool:
        """Whether nothing of the job has begun anywhere. False where a killed wake may have rented
        or handed over a machine that the job's record does not name."""
        if self.job.attempts or self.job.rented is not None:
            return False
        others = nodes_of(self.opened).rentals.open() if self.job.nodes > 1 else []
        return all(
            one.job != self.job.id or one.state == "abandoned"
            for one in (*self.opened.rentals.open(), *others)
        )

    def _newest_machine(self) -> MachineId | None:
        attempts, rented = self.job.attempts, self.job.rented
        if not attempts or (rented and rented not in {one.machine for one in attempts}):
            return rented  # no command was started there yet
        return attempts[-1].machine

    def _is_ours(self, machine: Machine, rental: Rental) -> bool:
        """Whether the job works on the machine, or the machine was rented for the job."""
        last = [one.machine for one in self.job.attempts[-1:]]
        return machine.id in (*last, self.job.rented) or rental.job == self.job.id

    def _may_go_on_at(self, machine: Machine, rental: Rental) -> bool:
        """Whether the command may go on on this machine. A machine that is not the job's, such as a
        replica, may hold an older state of the workspace than the one that the job goes on from."""
        job = self.job
        if not job.attempts or self._is_ours(machine, rental):
            return True
        if machine.id in self._beside:
            return False
        if machine.state != "running":
            return True  # the machine's state is unknown: wait for it
        newest = job.newest
        if not job.saves:
            found = newest_save(self.opened, job).snapshot
            newest = newest if found is None else found.snapshot
        try:
            with open_session(self.opened, machine) as session:
                if newest is None or self._holds(session, newest):
                    return True
        except MachineError as error:
            since_s = self._silent.setdefault(machine.id, time.monotonic())
            if error.retryable and time.monotonic() - since_s < UNPROVEN_S:
                raise  # whoever has just woken the machine waits for its SSH server, too
            runner().log.warning("what machine %s holds is not known: %s", machine.id, error)
        self._beside.add(machine.id)
        runner().log.warning(
            "machine %s is not known to have snapshot %s, which job %s goes on from: "
            "another one is rented beside it",
            machine.id,
            newest,
            job.id,
        )
        return False

    def _holds(self, session: Session, newest: SnapshotId) -> bool:
        """Whether a machine holds the snapshot that the job goes on from. Before the first save of
        the job, descendants of that snapshot do not count: they are the work of others."""
        if not self.job.saves:
            return line_held(self.opened, session) == newest
        return goes_on_from(self.opened, session, newest)

    # -- no machine

    def _left_rentals(self) -> set[str]:
        """The rentals of killed wakes of this job whose machines were never handed over."""
        mine = [one for one in self.opened.rentals.open() if one.job == self.job.id]
        return {one.label.rental for one in mine if one.unfinished}

    def clear(self) -> None:
        """End the machines that killed wakes of the job have left, if they answer in time."""
        self.end_others()
        opened, stop = replace(self.opened, job=self.job.id), self._driven.stop
        left = self._left_rentals()
        if left != self._left[0]:
            self._left = (left, time.monotonic())
        self._say_waiting("it ends the machine that a wake which was killed has left")
        faults = (MachineError, CreateFailed, *([] if stop is None else [SnapshotError]))
        try:
            whole, why = end_leftovers(opened, self.job.newest), "its provider does not show it"
        except (HandedOver, WorkspaceBusy) as error:  # the next look shows who has the machine
            raise WorkspaceAwake(str(error)) from error
        except faults as error:
            if stop is None:
                self.wait_after(error)
                return
            whole, why = None, str(error)
        if whole is not None:
            self._driven.change(rented=whole)  # it is hibernated like any other
        elif stop is None or time.monotonic() - self._left[1] < UNPROVEN_S:
            self._driven.nap(RETRY_S)
        else:
            self._driven.end(
                stop.state,
                f"{stop.why}. A wake of it was killed, and the end of what it rented is not "
                f"proven (rental {', '.join(sorted(left))}): {why}. It may cost money: reconcile "
                "lists it",
            )

    def _may_show_again(self) -> bool:
        """Whether the job's machine may only be missing in an answer: no provider has proven its
        end, and UNPROVEN_S are not over or the provider has not settled. Also after the end of the
        command, because the machine holds what no save has."""
        job = self.job
        last = job.attempts[-1].rental if job.attempts else None
        ours = [
            one
            for one in self.opened.rentals.open()
            if one.state == "handed over"
            and (
                one.label.rental == last
                or (one.machine and one.machine == job.rented)
                or one.job == job.id
            )
        ]
        if not ours:
            self._missing_since = None
            return False
        if self._missing_since is None:
            self._missing_since = time.monotonic()
        if time.monotonic() - self._missing_since < UNPROVEN_S:
            return True
        settling_s = {
            provider.identity: provider.abilities.settling_s
            for provider in self.opened.markets.concerned(ours)
        }
        now_unix = time.time()
        return any(now_unix < one.created_unix + settling_s.get(one.provider, 0.0) for one in ours)

    def _record_loss(self) -> None:
        """Record that the machine of the open attempt has gone, and what was lost with it; or that
        another run has stored the end of the command."""
        newer = self._find_newest_save()
        attempt = self.job.attempt
        last = self.job.attempts[-1] if self.job.attempts else None
        over = self.job.nodes == 1 or (last is not None and is_over(self.job))
        if over and last is not None and last.end in ("command ended", "stopped"):
            rental = self.opened.rentals.ended(last.rental)
            if rental is not None and rental.snapshot is not None and self.job.final is None:
                self._driven.change(final=rental.snapshot)
        if newer or attempt is not None:
            self._driven.change(frozen=self._frozen())
        if attempt is None:
            return
        saved_unix = max(attempt.began_unix, self.job.newest_unix or 0.0)
        lost_s, error = max(0.0, attempt.seen_unix - saved_unix), attempt.error
        if self.job.frozen is not None and saved_unix > attempt.began_unix:
            lost_s, error = 0.0, "its command was frozen in time"  # and did no work since then
        self._driven.change_attempt(
            end="machine lost", ended_unix=time.time(), lost_s=lost_s, error=error
        )
        runner().log.warning(
            "machine %s of attempt %d is gone; the job goes on from snapshot %s",
            attempt.machine,
            attempt.number,
            self.job.newest,
        )

    def _find_newest_save(self) -> bool:
        """Record the snapshot that the job goes on from, and the snapshots of other machines that
        it leaves aside. Returns whether the record named another one before."""
        job, there = self.job, snapshot_ids(self.opened.store, self.opened.spec.name)
        if job.attempt is None and there == self._looked_at:
            return False
        chosen = newest_save(self.opened, job)
        self._looked_at, newest = there, chosen.snapshot
        if newest is None:
            return False
        aside = " ".join(lacks(self.opened.spec.name, newest.snapshot, chosen.aside))
        if job.attempts and aside != job.aside:
            self._driven.change(aside=aside)
            if aside:
                runner().log.warning("job %s: %s", job.id, aside)
        if newest.snapshot == job.newest:
            return False
        if job.attempts:
            read_unix = newest.modified_unix - self.opened.store.clock_ahead_s()
            if any(one.snapshot == job.newest for one, _ in chosen.refused):
                self._driven.change(newest=newest.snapshot, newest_unix=read_unix)
            elif not is_of_job(job, chosen):
                error = (
                    "no work of the job is in the store: it goes on from snapshot "
                    f"{newest.snapshot} of another machine"
                )
                runner().log.warning("job %s: %s", job.id, error)
                self._driven.change(newest=newest.snapshot, newest_unix=None)
                if job.attempt is not None:
                    self._driven.change_attempt(error=error)
            else:
                own = is_of_machine(self.opened, job, newest.snapshot)
                self._driven.saved(newest.snapshot, read_unix, own=own)
        return True

    def _frozen(self) -> SnapshotId | None:
        """The newest save, if it holds the frozen command; None otherwise."""
        job = self.job
        if job.newest is None or job.nodes > 1 or not self.opened.spec.freezes_jobs:
            return None
        try:
            return job.newest if holds_frozen(self.opened, job.newest, job.id) else None
        except SnapshotError as error:
            runner().log.warning(
                "what is frozen in snapshot %s is not known: %s", job.newest, error
            )
            return None

    def renting(self) -> OpenWorkspace | None:
        """The workspace, as a machine is rented for the job, once no machine of an earlier attempt
        is left; None if the driver must look again first."""
        if not self.job.attempts:  # jobs that began at the same time have their records by now
            with doing("looking for other jobs of the workspace"):
                self._driven.nap(RETRY_S)
            if self._driven.stop is not None or self._first().id != self.job.id:
                return None
        self.end_others()
        job = self.job
        opened = self.opened.wanting(WantChange(gpu=job.gpu, image=job.image, spot=spot_for(job)))
        # no program of the workspace is started there
        spec = msgspec.structs.replace(opened.spec, programs=[])
        thaws = self.job.frozen is not None
        beside = frozenset(self._beside)
        return replace(
            opened,
            spec=spec,
            job=self.job.id,
            thaws=thaws,
            beside=beside,
            most_usd_h=most_usd_h(self.opened, job),
            past_budgets=job.past_budgets,
        )

    @contextmanager
    def beside_others(self, opened: OpenWorkspace) -> Iterator[tuple[OpenWorkspace, str]]:
        """Within this context, all other machines of the job stand ready; yields the workspace to
        wake and the snapshot. After an error the machines are ended."""
        if self.job.nodes == 1:
            yield opened, self.job.newest or ""
            return
        try:
            yield bring_nodes(opened, self.job, lambda others: self._driven.change(others=others))
        except BaseException:
            with suppress(EndUnproven):  # the next try and the end of the job end them
                self.end_others()
            raise

    def end_others(self) -> None:
        """End all machines of the job but its workspace's own. They hold no work. A machine whose
        end its market has accepted, but not proven, delays nothing."""
        if self.job.nodes == 1:
            return
        self._driven.change(others=[])  # HandedOver before a successor's machines are ended
        try:
            end_nodes(self.opened, self.job.id)
        except EndUnproven as error:
            if not error.accepted:
                raise
            runner().log.warning("job %s goes on: %s", self.job.id, error)

    def rented(self, report: WakeReport) -> None:
        self._refusals = 0
        self._driven.change(rented=report.machine, newest=self.job.newest or report.snapshot)

    def wait_after(self, error: TorporError) -> None:
        """Wait after a wake that failed, or end the job."""
        if isinstance(error, Recovered):
            raise error  # its owner goes on with the job
        if isinstance(error, WorkspaceAwake | WorkspaceBusy | HandedOver):
            self._say_waiting(f"another run wakes this workspace or has woken it: {error}")
            raise WorkspaceAwake(str(error)) from error  # the next look finds its machine
        waits = isinstance(error, NoOffer | CreateFailed | EndUnproven)  # each look tries to end it
        if waits or isinstance(error, BudgetUnread):  # a person mends the budget
            self._refusals += 1
            seconds = wait_s(self._refusals)
            self._say_waiting(f"{error}. The next look is in {seconds:.0f} s")
            self._driven.nap(seconds)
        elif isinstance(error, BudgetExceeded):
            self.end(EndJob("over budget", str(error)))
        else:
            self._wait_after_failed_wake(error)

    def _wait_after_failed_wake(self, error: TorporError) -> None:
        """Wait before another wake. Nothing runs, and what was saved is stored. Waits grow, because
        each try may rent a machine. A store that is away or full ends this run and not the job: a
        later run continues the job."""
        early = isinstance(error, StoreError | ProviderError) and error.retryable
        early = early or isinstance(error, StoreUnavailable)
        if early or isinstance(error, UnexpectedAnswer | LacksWork):
            raise error
        failures = self.job.failures + 1
        if not isinstance(error, MachineError) or failures >= MOST_FAILURES:
            self.end(EndJob("failed", f"its workspace could not be woken: {error}"))
            return
        self._driven.change(failures=failures)
        seconds = wait_s(failures)
        self._say_waiting(f"a wake failed: {error}. The next one begins in {seconds:.0f} s")
        self._driven.nap(seconds)

    def _say_waiting(self, why: str) -> None:
        if self.job.why != why:
            now(f"job {self.job.id} waits: {why}")
            self._driven.change(state="waiting", why=why)

    # -- on a machine

    def revive(self, on: JobMachine) -> None:
        """Start the machine again, wait for it, or end it. Called when its provider does not run
        it."""
        if self.job.nodes > 1 and self.job.attempt is not None:
            self._driven.change_attempt(end="machine lost", ended_unix=time.time())
        self.end_others()
        self._stopped.see(on.machine, on.rental, ours=on.ours)

    def attend(self, on: JobMachine) -> None:
        """Run the command on the machine until it ends or the machine is lost."""
        if self.job.attempt is not None and self.job.attempt.machine != on.machine.id:
            self._record_loss()
        # whoever woke the machine may have changed files
        if self.job.frozen is not None and not on.ours:
            self._driven.change(frozen=None)
        with open_session(self.opened, on.machine) as session:
            if self.job.newest is None or not on.ours:
                self._record_basis(session)
            if self.job.stopped == on.machine.id and not self._is_frozen_there(session):
                self._stopped.save(on.machine, session)
            Attending(self.opened, self._driven, on.machine, on.rental, session).run()

    def _record_basis(self, session: Session) -> None:
        """Record the snapshot from which the command begins on a machine that was not rented for
        the job. Without the record, a loss before the first save could take another machine's work
        for the job's."""
        if self.job.saves:
            return
        held = line_held(self.opened, session)
        if held == self.job.newest:
            return
        of = self.opened.spec.name
        if held is not None and self.opened.store.head(manifest_key(of, held)) is None:
            held = None  # the snapshot was deleted, or its manifest was never stored
        self._driven.change(newest=held)

    def _is_frozen_there(self, session: Session) -> bool:
        """Whether the machine holds the frozen command. A save would lack it and remove its
        images."""
        if self.job.attempt is None or not self.opened.spec.freezes_jobs:
            return False
        return look_at_command(session, self.job.id, 0, 0).state.frozen is not None

    def begin_to_hibernate(self, on: JobMachine) -> None:
        """Record that the hibernation begins, and that the machine of an attempt which has not
        ended is lost."""
        if self.job.attempt is not None:
            self._record_loss()
        self.end_others()
        check_no_other_job(self.opened, on.machine, self.job.id)
        self._driven.change(state="hibernating")

    def is_over_despite(self, error: TorporError) -> bool:
        """Whether the job is over although its machine was not destroyed. Raises the error if it is
        to be tried again; False if the machine is to be kept for its user."""
        if isinstance(error, MachineInUse) and keeps_machine(self._driven):
            return False
        ending = isinstance(error, EndUnproven) and error.accepted
        kept = isinstance(error, UnsavedWork)  # data beside the workspace
        if self.job.final is None or not (ending or kept):
            raise error
        runner().log.warning("job %s has ended: %s", self.job.id, error)
        if kept:
            self._kept = f". {error}"
        return True

    def renewed_despite(self, error: TorporError) -> bool:
        """Whether the next attempt may begin although the machine was not destroyed, because its
        end is on the way. Raises the error if it is to be tried again. Ends the job where the
        machine is kept, because it holds what no snapshot has."""
        if isinstance(error, MachineInUse) and keeps_machine(self._driven):
            return False
        if isinstance(error, UnsavedWork):
            self.end(EndJob("failed", f"its nodes are to be rented again, and {error}"))
            return False
        if not (isinstance(error, EndUnproven) and error.accepted):
            raise error
        return True

    def keep(self, machine: Machine) -> None:
        """End the job and leave the machine to its user, whether or not the machine answers."""
        attempt, stop = self.job.attempt, self._driven.stop
        why = "it was stopped" if stop is None else stop.why
        if attempt is not None:
            try:
                with session_with(self.opened, machine) as session:
                    self._driven.change()  # HandedOver before a successor's attempt is ended
                    stop_command(session, self.job.id)
            except MachineError as error:
                why += f". Its command may still run on machine {machine.id}: {error}"
            self._driven.change_attempt(end="stopped", ended_unix=time.time())
        self.end_others()
        self._driven.end("cancelled" if stop is None else stop.state, why)

    def end(self, end: EndJob | None = None) -> None:
        """End the job, by default with the outcome of its last attempt."""
        end = end or end_of(self.job, self._driven.stop)
        self.end_others()
        if self.job.final is not None and not self._kept:  # otherwise older saves may hold more
            verified = self.end_of_job.verified
            own = verified is not None and verified.snapshot == self.job.final
            thin_saves(self.opened, self._driven, verified if own else None)
        self._driven.end(end.state, end.why + self._kept)


class EndOfJob:
    """Keeps the machine while another job works on it, or if the user who cancelled the job wants
    it. Records, before the machine can be destroyed, which snapshot holds the end of the job."""

    needs_machine = False

    def __init__(self, opened: OpenWorkspace, driven: Driven) -> None:
        self._opened = opened
        self._driven = driven
        self.verified: Verified | None = None

    def check(self, ending: EndingMachine) -> None:
        check_no_other_job(self._opened, ending.machine, self._driven.job.id)
        if ending.verified is None:
            return
        snapshot = ending.verified.snapshot
        if ending.verified is not self.verified:
            self._driven.saved(snapshot, time.time(), machine=ending.machine.id)
            self.verified = ending.verified
        self._driven.look_for_stop()
        if keeps_machine(self._driven):
            job = self._driven.job.id
            raise MachineInUse(f"job {job} is cancelled, and its machine is to be kept")
        if is_over_on(self._driven.job, ending.machine):
            self._driven.change(final=snapshot)


def keeps_machine(driven: Driven) -> bool:
    """Whether the machine is to be kept for its user."""
    return driven.stop is not None and driven.stop.then == "keep"
