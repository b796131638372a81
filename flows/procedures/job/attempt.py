"""One attempt of a job on one machine: its command's log, its saves, and the loss of its
machine."""

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
"""Seconds between two looks at what the provider says of the machine. A machine that is not running
in two looks is lost, so a loss is seen within a minute."""
TAKEN_S: Final = 180.0
"""A command that fails within this many seconds after its machine got notice may have been ended
with the machine: most notices leave 30 s or two minutes."""
SURE_S: Final = 60.0
"""Seconds that a failed command of a job on several machines waits for the loss of another machine,
which may have caused the failure and shows within this time."""
RETRY_S: Final = 60.0
"""Seconds between a failed save and the next one."""
MOST_RETRY_S: Final = 1800.0
"""Most seconds between two books for a machine that says again and again that it has none."""
LATE_S: Final = 60.0
"""When a save of this run is this many seconds late, the machine saves by itself: no run may be
driving the job."""


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
        # since when the command of one of several machines is seen to have failed
        self._failed: float | None = None
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
                self._session.close()  # closed because a save would wait for the broken line
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
        if begins:  # this log lacks what an earlier machine wrote after its newest save
            offset = min(offset, state.log_from)
        self._driven.see(offset)
        self._driven.change()  # recorded at once, so that this attempt is not started again

    def _go_on(self, attempt: Attempt) -> None:
        """Stay with a command that was started before. If its machine has forgotten the command,
        because somebody removed torpor's folder there, the command is not started again within its
        attempt."""
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
        """Look at the command once; returns whether this attempt is over."""
        job = self._driven.job
        if job.attempt is None:
            return True
        state = self._show_log()
        self._hear(state)
        try:
            failure = self._others.look()
        except AgentLost:
            raise  # the line may be the cause: the next try logs in again, or finds the node gone
        except MachineError as error:
            self._lose_node(error)
            return True
        if failure and state.state == "running" and self._stays_failed():
            self._saves.settle()
            self._stop_command()
            self._ended(1, failure)
            return True
        if state.state == "running" and job.stopped is not None:
            # its provider was wrong, or has reached the machine again
            self._driven.change(stopped=None)
        if state.frozen is not None and state.state == "ended":
            return self._is_left_frozen(state.frozen)
        if state.state == "ended" and not self._may_be_taken(state):
            self._saves.settle()
            self._stop_command()  # ends what the command left in the background
            self._show_log()
            self._ended(state.status, state.error)
            return True
        if state.state in ("lost", "none"):
            why = FORGOTTEN if state.state == "none" else job.attempt.error
            runner().log.warning("job %s lost its supervisor. %s", job.id, why)
            self._saves.settle()
            self._stop_command()  # the command may still run
            taken = job.stopped == self._machine.id  # and was started again since
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
        """Whether the machine may be about to freeze the command. A save by this run would then
        lack the frozen command."""
        notice = state.notice
        if not self._starting.freezes or notice is None or notice.kind == "aws-rebalance":
            return False
        undecided = not state.save_error and not state.not_frozen
        return undecided and time.monotonic() - self._noticed < TAKEN_S

    def _is_left_frozen(self, snapshot: SnapshotId) -> bool:
        """Whether the attempt is over with a frozen command. A frozen command waits until its
        machine is taken, and goes on here if the market leaves the machine."""
        if self._driven.stop is not None:
            self._stop_command()  # ends what the command left in the background, too
            self._driven.change_attempt(end="stopped", ended_unix=time.time())
            return True
        taken = self._driven.job.stopped is not None  # and was started again since
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
        """Stop the command, unless a successor drives the job: this run may have slept, and must
        not end the successor's attempt."""
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
        """Whether the failed command may have been ended together with its machine, which is no
        failure of the command. The end of the machine shows within TAKEN_S."""
        notice = state.notice
        if state.status != 0 and not state.error and self._others and not self._stays_failed():
            return self._driven.stop is None
        if state.status == 0 or state.error or notice is None or notice.kind == "aws-rebalance":
            return False
        return self._driven.stop is None and time.monotonic() - self._noticed < TAKEN_S

    def _stays_failed(self) -> bool:
        """Whether the command of one of several machines has failed, and no machine was lost within
        SURE_S."""
        now = time.monotonic()
        self._failed = self._failed or now
        return now - self._failed >= (TAKEN_S if self._others.noticed else SURE_S)

    def _lose_node(self, error: MachineError) -> None:
        """End the attempt on all machines, because another machine of the job is lost. It is no
        loss if the command has succeeded here. AgentLost where this machine does not answer
        either."""
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
        """Close the session once the provider says that the machine does not run any more, because
        its calls would wait for the line."""
        missing: dict[MachineId, int] = {}

        def is_gone(machine: Machine) -> bool:
            try:
                found = self._opened.markets.of(machine.provider).find(machine.id)
            except TorporError:
                return False  # an unknown machine is not gone
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
        # counted from the last save or the attempt's begin, because a session may be shorter than
        # an interval
        began_unix = time.time() if job.attempt is None else job.attempt.began_unix
        since_save_s = max(0.0, time.time() - max(began_unix, job.newest_unix or 0.0))
        self._due = time.monotonic() + save_interval_s(job, spot, 0) - since_save_s
        self._running: Future[tuple[float, Verified]] | None = None
        self._book_due = time.monotonic()
        self._offered = -RETRY_S
        self._again_s = RETRY_S

    def go_on(self, threads: ThreadPoolExecutor, *, hurry: bool, until_unix: float) -> None:
        """Begin a save that is due; record the result of the last one. ``until_unix``: when the
        machine's own saves end; if they have ended, the machine has no book."""
        if self._running is not None and self._running.done():
            self.settle()
            return
        if hurry and self._running is None:  # first, because the machine lives for seconds only
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
        with followed_by(None):  # the follower of the run reads the output of the command instead
            context = copy_context()
        self._running = threads.submit(context.run, self._save)

    def _is_lost(self, until_unix: float) -> bool:
        """Whether the machine needs another book before the planned time. A machine that says so
        again and again gets few books: its disk may be full, so that it can say nothing else."""
        if until_unix > time.time():
            # the machine has kept that book for long
            if time.monotonic() >= self._offered + MOST_RETRY_S:
                self._again_s = RETRY_S
            return False
        if time.monotonic() < self._offered + self._again_s:
            return False
        self._again_s = min(2 * self._again_s, MOST_RETRY_S)
        return True

    def settle(self) -> None:
        """Wait for the running save, and record it. A failed save costs no work, because the next
        one comes soon."""
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
            # the machine refers to none of the deleted saves
            thin_saves(self._opened, self._driven, verified)
        runner().log.info("save %d is snapshot %s", self._count, verified.snapshot)

    def _save(self) -> tuple[float, Verified]:
        try:
            return self._store(self._opened)
        # the disk's content without the hook is worth more than no save
        except HookFailed as error:
            runner().log.warning("save %d is made without its command: %s", self._count, error)
            spec = msgspec.structs.replace(self._opened.spec, quiesce=[])
            return self._store(replace(self._opened, spec=spec))

    def _store(self, opened: OpenWorkspace) -> tuple[float, Verified]:
        """Store the workspace; returns when the save began to read, and the proof."""
        read_unix = time.time()
        report, verified = take_snapshot(opened, self._session, self._machine)
        for line in report.lost:
            runner().log.warning("save %d: %s", self._count, line)
        return read_unix, verified

    def _stand_by(self, basis: SnapshotId | None, manifest: Manifest | None = None) -> bool:
        """Hand the machine what it needs to save by itself; returns whether the machine has got
        that."""
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
