"""Starts a job's command on one machine."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Final

from tasks.jobs import (
    look_at_command,
    secrets_of,
    start_command,
    stored_logs,
)
from tasks.programs import prove_freezing
from tasks.runner import runner
from tasks.workspace import OpenWorkspace
from torpor.control.jobs.driven_job import Driven
from torpor.control.jobs.records import Attempt, log_path
from torpor.control.remote.agent import Session
from torpor.control.rental.records import Rental
from torpor.control.variables import variables
from torpor.shared.errors import InvalidInput, TorporError
from torpor.shared.values import PROGRAMS, Machine
from torpor.shared.wire.job import JobState, StartJob

NOT_STARTED: Final = 126
"""The exit status that a shell gives for a command that it cannot start."""


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

    def begin(self) -> Attempt | None:
        """Record a new attempt. None where another job of the workspace comes first, or this one
        should stop."""
        price = self._machine.price_usd_h or self._rental.price_usd_h
        agent = self._session.hello.machine
        attempt = self._driven.begin_attempt(self._machine, self._rental.spot, price, agent)
        if attempt.number == 1 and not self._has_turn():
            return None
        if self._driven.stop is not None:
            self._driven.change_attempt(end="stopped", ended_unix=time.time())
            return None
        return attempt

    def request(self, attempt: Attempt, nodes: Sequence[str] = (), *, forgets: bool) -> StartJob:
        """The request that starts the attempt. ``forgets``: the machine first removes the logs of
        earlier jobs. InvalidInput for a command that can never be started."""
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
            nodes=list(nodes),
            images=f"{spec.paths[0]}/{PROGRAMS}/{job.id}" if self.freezes else "",
            criu=self._criu(attempt, may_freeze=bool(notices)),
            freezes=self.freezes,
            frozen=job.frozen,
            workspace=spec.name,
        )

    def start(self, request: StartJob) -> JobState:
        """Start the command, unless this attempt was started before."""
        return start_command(self._session, request)

    def failed(self, error: InvalidInput) -> None:
        """Record a failure that is the user's mistake: this command can never be started."""
        self._driven.change_attempt(
            end="command ended", status=NOT_STARTED, error=str(error), ended_unix=time.time()
        )

    def _criu(self, attempt: Attempt, *, may_freeze: bool) -> str:
        """CRIU's folder on a machine that has proven that it can freeze the command, or let it go
        on; asked once an attempt. Empty if it cannot."""
        job = self._driven.job
        if not self.freezes or not (may_freeze or job.frozen):
            return ""
        if look_at_command(self._session, job.id, 0, 0).state.attempt >= attempt.number:
            return ""  # the command was started, and has CRIU
        freezer = prove_freezing(self._opened, self._session, self._rental, strict=False)
        # otherwise a moment's fault would lose the frozen command
        if freezer.why_not and job.frozen is not None:
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
        """The command's environment variables. If a secret is missing by now, no command is
        started, and a running one goes on."""
        job = self._driven.job
        try:
            return {**variables(job.env), **secrets_of(job).variables}
        except InvalidInput:
            if look_at_command(self._session, job.id, 0, 0).state.attempt < attempt.number:
                raise
            return {}

    def _has_turn(self) -> bool:
        """Look again for jobs that have begun on this workspace, now that others can see this
        attempt. Of two jobs that begin at the same time, at least one sees the other, and does not
        start."""
        try:
            others = [one for one in self._opened.jobs.open() if one.id != self._driven.job.id]
        except TorporError:
            self._driven.withdraw_attempt()
            raise
        if any(one.attempts for one in others):
            self._driven.withdraw_attempt()
            return False
        return True
