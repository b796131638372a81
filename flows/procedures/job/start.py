"""Start: how a job's command is started on one machine, after the restore or behind its gate."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import copy_context
from functools import partial
from typing import Final

from flows.procedures.job.log import MOST_LOG_BYTES
from flows.procedures.restore import EarlyStart, gate_words
from tasks.jobs import (
    look_at_command,
    secrets_of,
    secrets_to_hide,
    start_command,
    stop_command,
    stored_logs,
)
from tasks.programs import prove_freezing
from tasks.runner import runner
from tasks.workspace import OpenWorkspace
from torpor.control.jobs.driven_job import Driven
from torpor.control.jobs.log_lines import Lines
from torpor.control.jobs.policy import why_no_gate
from torpor.control.jobs.records import Attempt, log_path
from torpor.control.remote.restore import RemoteRestore
from torpor.control.remote.seam import Session
from torpor.control.rental.records import Rental
from torpor.control.rental.renting import Tenancy
from torpor.control.variables import variables
from torpor.shared.errors import InvalidInput, TorporError
from torpor.shared.values import PROGRAMS, Machine, SnapshotId
from torpor.shared.wire.job import JobState, StartJob

NOT_STARTED: Final = 126
"""What a shell gives as the status of a command that it cannot start."""
LOOK_S: Final = 2.0
END_S: Final = 10.0
"""How long the end of a restore waits for a look at the log."""


class Starting:
    """The attempts of one job on one machine."""

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
        self._rental = rental
        self._session = session
        self.freezes = opened.spec.freezes_jobs and driven.job.nodes == 1

    def begin(self, *, gated: bool = False) -> Attempt | None:
        """A new attempt, on record. None where another job of the workspace comes first, or this
        one is to stop."""
        price = self._machine.price_usd_h or self._rental.price_usd_h
        attempt = self._driven.begin_attempt(self._machine, self._rental.spot, price, gated=gated)
        if attempt.number == 1 and not self._has_turn():
            return None
        if self._driven.stop is not None:
            self._driven.change_attempt(end="stopped", ended_unix=time.time())
            return None
        return attempt

    def end_left(self) -> None:
        """End a command whose restore another run than its own went on with: it may have got an
        error for a file that is there by now."""
        job = self._driven.job
        last = job.attempts[-1] if job.attempts else None
        if last is None or not last.gated or not last.machine == self._machine.id != job.rented:
            return
        self._driven.change()  # HandedOver before a successor's command is ended
        stop_command(self._session, job.id)
        if not last.end:
            self._driven.change_attempt(
                end="machine lost",
                ended_unix=time.time(),
                lost_s=max(0.0, last.seen_unix - last.began_unix),
                error="another run went on with its restore",
            )

    def request(
        self, attempt: Attempt, nodes: Sequence[str] = (), *, forgets: bool, gated: bool = False
    ) -> StartJob:
        """What starts the attempt. ``forgets``: it removes the logs of earlier jobs first.
        ``gated``: the workspace is still restored. InvalidInput for a command that can never be
        started."""
        job, spec = self._driven.job, self._opened.spec
        notices = self._opened.markets.of(self._machine.provider).abilities.notices
        return StartJob(
            job.id,
            attempt.number,
            job.command,
            spec.paths[0],
            log_path(spec, job.id),
            list(notices),
            environment=self._environment(attempt),
            forget=stored_logs(self._opened) if forgets and not job.keep_logs else [],
            gate=spec.name if gated else "",
            nodes=list(nodes),
            images=f"{spec.paths[0]}/{PROGRAMS}/{job.id}" if self.freezes else "",
            criu=self._criu(attempt, may_freeze=bool(notices)),
            freezes=self.freezes,
            frozen=job.frozen,
        )

    def start(self, request: StartJob) -> JobState:
        """Start the command, unless this attempt was started before."""
        return start_command(self._session, request)

    def failed(self, error: InvalidInput) -> None:
        """The user's mistake: this command can never be started."""
        self._driven.change_attempt(
            end="command ended", status=NOT_STARTED, error=str(error), ended_unix=time.time()
        )

    def _criu(self, attempt: Attempt, *, may_freeze: bool) -> str:
        """CRIU's folder on a machine that has proven that it can freeze the command, or let it go
        on; asked once an attempt. Empty for none."""
        job = self._driven.job
        if not self.freezes or not (may_freeze or job.frozen):
            return ""
        if look_at_command(self._session, job.id, 0, 0).state.attempt >= attempt.number:
            return ""  # it was started, and has it
        freezer = prove_freezing(self._opened, self._session, self._rental, strict=False)
        if freezer.why_not and job.frozen is not None:  # else a moment's fault would lose it
            freezer = prove_freezing(self._opened, self._session, self._rental, strict=False)
        if freezer.why_not:
            runner().log.warning(
                "the command of job %s is not frozen on machine %s: %s",
                job.id,
                self._machine.id,
                freezer.why_not,
            )
        return freezer.criu

    def _environment(self, attempt: Attempt) -> dict[str, str]:
        """What the command gets. Without a secret that is missing by now no command is started, and
        one that runs goes on."""
        job = self._driven.job
        try:
            return {**variables(job.env), **secrets_of(job).variables}
        except InvalidInput:
            if look_at_command(self._session, job.id, 0, 0).state.attempt < attempt.number:
                raise
            return {}

    def _has_turn(self) -> bool:
        """Look again for jobs that have begun on this workspace, now that others can see this
        attempt. Of two that begin at once, one sees the other at least, and is not started."""
        try:
            others = [one for one in self._opened.jobs.open() if one.id != self._driven.job.id]
        except TorporError:
            self._driven.withdraw_attempt()
            raise
        if any(one.attempts for one in others):
            self._driven.withdraw_attempt()
            return False
        return True


class GatedStart(EarlyStart):
    """Starts the command while a wake restores its workspace, where the job asks for that.
    ``words``: how that went; empty where it was not asked for.

    The command is only started here. It is attended, and saved, once its machine was handed over:
    until then the machine is the wake's, which ends it after an error.
    """

    def __init__(self, opened: OpenWorkspace, driven: Driven) -> None:
        self._opened = opened
        self._driven = driven
        self._why_not = why_no_gate(driven.job, freezes=opened.spec.freezes_jobs)
        self._starting: Starting | None = None
        self._session: Session | None = None
        self._gated = False
        self._basis: SnapshotId | None = None
        self.words = ""

    def may_start(self, session: Session, tenancy: Tenancy) -> bool:
        """Ends what an attempt whose run was killed left there: its gate may have ended."""
        job, machine, rental = self._driven.job, tenancy.machine, tenancy.rental
        if job.gate and not tenancy.fresh:
            self._driven.change()  # HandedOver before a successor's command is ended
            stop_command(session, job.id)
        self._session = session
        if job.gate and not self._why_not and rental is not None:
            self._starting = Starting(self._opened, self._driven, machine, rental, session)
        return self._starting is not None

    def planned(self, restore: RemoteRestore) -> None:
        job = self._driven.job
        if job.gate:
            self._gated = restore.plan.gated
            self._basis = restore.wanted.snapshot
            self.words = gate_words(restore.plan, "command", self._why_not)
            runner().log.info("the gate of job %s: %s", job.id, self.words)

    def start(self) -> None:
        """A fault that leaves the command unstarted ends no restore: it is started after that."""
        starting = self._starting
        if not self._gated or starting is None:
            return
        try:
            # Whoever finds the attempt lost must not take what it began with for its own save.
            newest = self._driven.job.newest or self._basis
            self._driven.change(newest=newest, gated=self.words)
            attempt = starting.begin(gated=True)
            if attempt is None:
                return
            self.started = True
            try:
                state = starting.start(starting.request(attempt, forgets=False, gated=True))
            except InvalidInput as error:
                starting.failed(error)
            else:
                self._driven.see(min(self._driven.job.log_offset, state.log_from))
        except TorporError as error:
            job = self._driven.job.id
            runner().log.warning("job %s: its command was not started at once: %s", job, error)

    @contextmanager
    def attended(self) -> Iterator[None]:
        """Show its log, and record that it runs."""
        if not self._gated:
            yield
            return
        job, ended = self._driven.job, threading.Event()
        lines = Lines(log_path(self._opened.spec, job.id), secrets_to_hide(job))
        show = partial(copy_context().run, self._show_log, lines, ended)
        thread = threading.Thread(target=show, name="gated", daemon=True)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join(END_S)

    def _show_log(self, lines: Lines, ended: threading.Event) -> None:
        while not ended.wait(LOOK_S):
            job = self._driven.job
            if self._session is None or not self.started or job.attempt is None:
                continue
            try:
                look = look_at_command(self._session, job.id, job.log_offset, MOST_LOG_BYTES)
            except TorporError:  # the restore hears it too
                continue
            whole, line_end, rest = look.text.rpartition("\n")
            if rest and look.offset - job.log_offset != len(look.text.encode()):
                continue  # not all is text: where the rest begins is not known
            # The rest, which may be half of a secret, is read again by whoever attends it next.
            for line in lines.feed(whole + line_end):
                runner().log.info("%s", line)
            if look.state.state == "running" or line_end:
                self._driven.see(max(0, look.offset - len(rest.encode())))
