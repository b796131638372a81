"""Attending: one attempt of a job on one machine, its log, its saves and its machine's loss."""

from __future__ import annotations

import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from contextvars import copy_context
from dataclasses import replace
from typing import Final

import msgspec

from flows.procedures.job.log import ShownLog
from flows.procedures.job.nodes import OtherNodes, SupervisorLost
from flows.procedures.job.start import Starting
from flows.procedures.job.thinning import is_of_machine, thin_saves
from flows.procedures.save import take_snapshot
from tasks.jobs import (
    secrets_to_hide,
    stop_command,
)
from tasks.progress import followed_by, now
from tasks.runner import runner
from tasks.standing_by import stand_by
from tasks.workspace import OpenWorkspace
from torpor.control.jobs.driven_job import Driven
from torpor.control.jobs.log_lines import LogLines, Text
from torpor.control.jobs.policy import save_interval_s
from torpor.control.jobs.records import FORGOTTEN, Attempt, AttemptEnd, log_path
from torpor.control.remote.agent import Session
from torpor.control.rental.records import Rental
from torpor.control.safety import Verified
from torpor.shared.errors import (
    AgentLost,
    HookFailed,
    InvalidInput,
    MachineError,
    TorporError,
    WorkspaceBusy,
)
from torpor.shared.format.manifest import Manifest
from torpor.shared.values import Machine, MachineId, SnapshotId
from torpor.shared.wire.job import JobState, Notice, OwnSave

POLL_S: Final = 2.0
WATCH_S: Final = 15.0
"""Between two looks at what the provider says of the machine; one that is not running in two of
them is lost. So a loss is seen within a minute."""
TAKEN_S: Final = 180.0
"""A command that fails so soon after its machine got notice may have been ended with the machine:
most notices are of 30 s or two minutes."""
SURE_S: Final = 60.0
"""A command of a job on several machines that fails may have lost another one. That shows within
this time."""
RETRY_S: Final = 60.0
"""After a save that failed."""
MOST_RETRY_S: Final = 1800.0
"""The longest pause between two books for a machine that says that it has none."""
LATE_S: Final = 60.0
"""A save of this run that is so late is made by the machine: nobody may drive the job."""


class Attending:
    """Starts the command unless it runs already, and stays with it."""

    def __init__(
        self,
        opened: OpenWorkspace,
        driven: Driven,
        machine: Machine,
        rental: Rental,
        session: Session,
    ) -> None:
        self._opened = opened
        self._driven = driven
        self._machine = machine
        self._session = session
        self._starting = Starting(opened, driven, machine, rental, session)
        self._log = log_path(opened.spec, driven.job.id)
        secrets = secrets_to_hide(driven.job)
        self._shown = ShownLog(LogLines(self._log, secrets), Text(self._log, secrets))
        self._saves = JobSaves(opened, driven, machine, rental.spot, session)
        self._notice: Notice | None = None
        self._noticed = 0.0
        self._not_frozen = ""
        self._own_save: OwnSave | None = None
        self._others = OtherNodes(opened, driven.job)
        self._failed: float | None = None  # since when a command of several is seen to have failed
        self._left = threading.Event()

    def run(self) -> None:
        """Until the command has ended or was stopped, or its supervisor is lost; AgentLost once the
        machine does not answer any more."""
        with ThreadPoolExecutor(2, thread_name_prefix="job") as threads, self._others:
            threads.submit(self._watch_machines)
            try:
                self._start()
                while not self._look(threads):
                    self._driven.nap(POLL_S)
                self._saves.settle()
            except BaseException:
                self._session.close()  # a save would wait for the line
                raise
            finally:
                self._left.set()

    def _start(self) -> None:
        job = self._driven.job
        attempt = job.attempt or self._starting.begin()
        if attempt is None:
            return
        if attempt.was_seen:
            self._go_on(attempt)
            return
        try:
            self._others.log_in()
            nodes = self._others.addresses(self._session)
        except MachineError as error:
            self._lose_node(error)
            return
        begins = job.attempt is None
        try:
            request = self._starting.request(attempt, nodes, forgets=begins)
            try:
                self._others.start(request)
            except MachineError as error:
                self._lose_node(error)
                return
            state = self._starting.start(request)
        except InvalidInput as error:
            self._starting.failed(error)
            return
        now(
            f"attempt {state.attempt} of job {job.id} is {state.state} on machine "
            f"{self._machine.id}"
        )
        if job.frozen is not None:
            how = "goes on where it was frozen" if state.went_on else "begins from its files"
            runner().log.info("the command of job %s %s. %s", job.id, how, state.afresh)
            self._driven.thawed("" if state.went_on else state.afresh or "nobody knows why")
        offset = job.log_offset
        if begins:  # what an earlier machine wrote after its newest save is not in this log
            offset = min(offset, state.log_from)
        self._driven.see(offset)
        self._driven.change()  # at once: this attempt is not started again

    def _go_on(self, attempt: Attempt) -> None:
        """Stay with a command that was started before. What its machine has forgotten, because
        somebody removed torpor's folder there, is not started again within its attempt."""
        try:
            self._others.log_in()
            self._others.go_on()
        except MachineError as error:
            self._lose_node(error)
            return
        now(
            f"this run stays with attempt {attempt.number} of job {self._driven.job.id} on machine "
            f"{self._machine.id}"
        )

    def _look(self, threads: ThreadPoolExecutor) -> bool:
        """One look at the command; whether this attempt is over."""
        job = self._driven.job
        if job.attempt is None:
            return True
        state = self._show_log()
        self._hear(state)
        try:
            failure = self._others.look()
        except AgentLost:
            raise  # the line may be to blame: the next try logs in again, or finds the node gone
        except MachineError as error:
            self._lose_node(error)
            return True
        if failure and state.state == "running" and self._stays_failed():
            self._saves.settle()
            self._stop_command()
            self._ended(1, failure)
            return True
        if state.state == "running" and job.stopped is not None:
            self._driven.change(stopped=None)  # its provider was wrong, or reached it again
        if state.frozen is not None and state.state == "ended":
            return self._is_left_frozen(state.frozen)
        if state.state == "ended" and not self._may_be_taken(state):
            self._saves.settle()
            self._stop_command()  # and what it left in the background
            self._show_log()
            self._ended(state.status, state.error)
            return True
        if state.state in ("lost", "none"):
            why = FORGOTTEN if state.state == "none" else job.attempt.error
            runner().log.warning("job %s lost its supervisor. %s", job.id, why)
            self._saves.settle()
            self._stop_command()  # it may run on
            taken = job.stopped == self._machine.id  # and started again since
            end: AttemptEnd = "machine lost" if taken else "supervisor lost"
            self._driven.change_attempt(end=end, error=why, ended_unix=time.time())
            return True
        if self._driven.stop is not None:
            runner().log.info("job %s is stopped: %s", job.id, self._driven.stop.why)
            self._saves.settle()
            self._stop_command()
            self._driven.change_attempt(end="stopped", ended_unix=time.time())
            return True
        if not self._may_be_frozen(state):
            hurry = state.notice is not None and bool(state.save_error)
            self._saves.go_on(threads, hurry=hurry, until_unix=state.saves_until_unix)
        return False

    def _may_be_frozen(self, state: JobState) -> bool:
        """Whether the machine may be about to freeze the command. A save by this run would lack
        that."""
        notice = state.notice
        if not self._starting.freezes or notice is None or notice.kind == "aws-rebalance":
            return False
        undecided = not state.save_error and not state.not_frozen
        return undecided and time.monotonic() - self._noticed < TAKEN_S

    def _is_left_frozen(self, snapshot: SnapshotId) -> bool:
        """Whether the attempt is over with a frozen command. That waits for its machine to be
        taken, and goes on here where the market leaves it."""
        if self._driven.stop is not None:
            self._stop_command()  # what it left in the background, too
            self._driven.change_attempt(end="stopped", ended_unix=time.time())
            return True
        taken = self._driven.job.stopped is not None  # and started again since
        if not taken and time.monotonic() - self._noticed < TAKEN_S:
            return False
        self._driven.change(frozen=snapshot)
        self._driven.change_attempt(
            end="machine lost",
            saved=True,
            error="its command was frozen, and the machine stayed",
            ended_unix=time.time(),
        )
        return True

    def _stop_command(self) -> None:
        """A run that slept may have a successor, whose attempt this one must not end."""
        self._driven.change()
        self._others.stop()
        stop_command(self._session, self._driven.job.id)

    def _show_log(self) -> JobState:
        job = self._driven.job
        look = self._shown.show(self._session, job.id, job.log_offset)
        if look.state.state == "running" or look.text:
            self._driven.see(look.offset)
        return look.state

    def _ended(self, status: int | None, error: str) -> None:
        self._driven.change_attempt(
            end="command ended", status=status, error=error, ended_unix=time.time()
        )

    def _may_be_taken(self, state: JobState) -> bool:
        """Whether the command, which has failed, may have been ended with its machine. That shows
        within TAKEN_S: a preemption is no failure of the command."""
        notice = state.notice
        if state.status != 0 and not state.error and self._others and not self._stays_failed():
            return self._driven.stop is None
        if state.status == 0 or state.error or notice is None or notice.kind == "aws-rebalance":
            return False
        return self._driven.stop is None and time.monotonic() - self._noticed < TAKEN_S

    def _stays_failed(self) -> bool:
        """Whether a command of several has failed, and no machine was lost for long enough."""
        now = time.monotonic()
        self._failed = self._failed or now
        return now - self._failed >= (TAKEN_S if self._others.noticed else SURE_S)

    def _lose_node(self, error: MachineError) -> None:
        """End the attempt on all machines: one of the others is lost. That is no loss where the
        command has succeeded here. AgentLost where this machine does not answer either."""
        job, attempt = self._driven.job, self._driven.job.attempt
        state = self._show_log()
        runner().log.warning("job %s lost a node: %s", job.id, error)
        self._saves.settle()
        self._stop_command()
        if attempt and (state.attempt, state.state, state.status) == (attempt.number, "ended", 0):
            self._ended(0, "")
            return
        end: AttemptEnd = "supervisor lost" if isinstance(error, SupervisorLost) else "machine lost"
        self._driven.change_attempt(
            end=end, error=f"a node was lost: {error}", ended_unix=time.time()
        )

    def _hear(self, state: JobState) -> None:
        """Log a notice, and record what the machine did about it."""
        if state.notice is not None and state.notice != self._notice:
            self._notice = state.notice
            self._noticed = time.monotonic()
            runner().log.warning(
                "machine %s will be taken away: %s", self._machine.id, state.notice.words
            )
        if state.not_frozen and state.not_frozen != self._not_frozen:
            self._not_frozen = state.not_frozen
            runner().log.warning("the command is not frozen: %s", state.not_frozen)
            self._driven.change_attempt(error=f"its command was not frozen: {state.not_frozen}")
        if state.saved is not None and state.saved != self._own_save:
            self._own_save = state.saved
            if is_of_machine(self._opened, self._driven.job, state.saved.snapshot):
                self._driven.saved_itself(state.saved.snapshot)

    def _watch_machines(self) -> None:
        """Close the session once the provider says that the machine does not run any more: its
        calls would wait for the line."""
        missing: dict[MachineId, int] = {}

        def is_gone(machine: Machine) -> bool:
            try:
                found = self._opened.markets.of(machine.provider).find(machine.id)
            except TorporError:
                return False  # unknown is not gone
            there = isinstance(found, Machine) and found.state in ("running", "starting")
            missing[machine.id] = 0 if there else missing.get(machine.id, 0) + 1
            return missing[machine.id] >= 2

        while not self._left.wait(WATCH_S):
            self._others.close_if(is_gone)
            if is_gone(self._machine):
                self._session.close()
                return


class JobSaves:
    """Incremental snapshots beside the command, one at a time."""

    def __init__(
        self,
        opened: OpenWorkspace,
        driven: Driven,
        machine: Machine,
        spot: bool,
        session: Session,
    ) -> None:
        job = driven.job
        spec = msgspec.structs.replace(opened.spec, quiesce=job.save, resume=[])
        self._opened = replace(opened, spec=spec)
        self._driven = driven
        self._machine = machine
        self._session = session
        self._spot = spot
        self._count = 0
        # from the last save, or the attempt's beginning: sessions may end sooner than an interval
        began_unix = time.time() if job.attempt is None else job.attempt.began_unix
        since_save_s = max(0.0, time.time() - max(began_unix, job.newest_unix or 0.0))
        self._due = time.monotonic() + save_interval_s(job, spot, 0) - since_save_s
        self._running: Future[tuple[float, Verified]] | None = None
        self._book_due = time.monotonic()
        self._offered = -RETRY_S
        self._again_s = RETRY_S

    def go_on(self, threads: ThreadPoolExecutor, *, hurry: bool, until_unix: float) -> None:
        """Begin a save that is due; see what became of the last one. ``until_unix``: when the
        machine's own saves end; it has lost its book where they have ended."""
        if self._running is not None and self._running.done():
            self.settle()
            return
        if hurry and self._running is None:  # first: the machine lives for seconds
            self._begin(threads)
        if self._is_lost(until_unix) or (
            self._running is None and time.monotonic() >= self._book_due
        ):
            self._stand_by(self._driven.job.newest)
        if self._running is None and time.monotonic() >= self._due:
            self._begin(threads)

    def _begin(self, threads: ThreadPoolExecutor) -> None:
        """Begin a save, which may take hours."""
        self._count += 1
        interval_s = save_interval_s(self._driven.job, self._spot, self._count)
        self._due = time.monotonic() + interval_s
        with followed_by(None):  # who follows the run reads what the command prints
            context = copy_context()
        self._running = threads.submit(context.run, self._save)

    def _is_lost(self, until_unix: float) -> bool:
        """Whether the machine needs another book before its time. One that says so again and again
        gets few: its disk may be full, so that it cannot say anything else."""
        if until_unix > time.time():
            if time.monotonic() >= self._offered + MOST_RETRY_S:  # it has kept that book for long
                self._again_s = RETRY_S
            return False
        if time.monotonic() < self._offered + self._again_s:
            return False
        self._again_s = min(2 * self._again_s, MOST_RETRY_S)
        return True

    def settle(self) -> None:
        """Wait for the save that runs, and record it. A save that fails costs no work: the next one
        comes soon."""
        running, self._running = self._running, None
        if running is None:
            return
        try:
            read_unix, verified = running.result()
        except TorporError as error:
            words = "another run holds the workspace" if isinstance(error, WorkspaceBusy) else error
            runner().log.warning("save %d failed, the command goes on: %s", self._count, words)
            self._due = min(self._due, time.monotonic() + RETRY_S)
            return
        self._driven.saved(verified.snapshot, read_unix)
        if self._stand_by(verified.snapshot, verified.manifest):
            thin_saves(self._opened, self._driven, verified)  # the machine refers to none of them
        runner().log.info("save %d is snapshot %s", self._count, verified.snapshot)

    def _save(self) -> tuple[float, Verified]:
        try:
            return self._store(self._opened)
        except HookFailed as error:  # what the disk holds is worth more than nothing
            runner().log.warning("save %d is made without its command: %s", self._count, error)
            spec = msgspec.structs.replace(self._opened.spec, quiesce=[])
            return self._store(replace(self._opened, spec=spec))

    def _store(self, opened: OpenWorkspace) -> tuple[float, Verified]:
        """When it began to read, and the proof."""
        read_unix = time.time()
        report, verified = take_snapshot(opened, self._session, self._machine)
        for line in report.lost:
            runner().log.warning("save %d: %s", self._count, line)
        return read_unix, verified

    def _stand_by(self, basis: SnapshotId | None, manifest: Manifest | None = None) -> bool:
        """Hand the machine what it needs to save by itself; whether it has got that."""
        job = self._driven.job
        every_s = save_interval_s(job, self._spot, self._count) + LATE_S
        self._offered = time.monotonic()
        try:
            again_s = stand_by(
                self._opened, self._session, self._machine, job.id, basis, manifest, every_s
            )
            self._book_due = time.monotonic() + again_s
        except AgentLost:
            raise
        except TorporError as error:
            self._book_due = time.monotonic() + RETRY_S
            runner().log.warning("the machine cannot save by itself for now: %s", error)
            return False
        return True
