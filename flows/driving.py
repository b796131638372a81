"""Driving: a job from machine to machine, until its command has ended and its workspace sleeps."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Final

import msgspec

from flows.attending import Attending
from flows.hibernate import store_workspace
from flows.phases import Phases
from flows.wake import wake_workspace
from tasks.jobs import machine_in_use
from tasks.machines import open_session
from tasks.runner import runner
from tasks.standing_by import newest_save
from tasks.workspace import OpenWorkspace
from torpor.control.jobs.driven import Driven
from torpor.control.jobs.policy import is_hopeless, is_retried, spot_for, wait_s
from torpor.control.jobs.records import MOST_ATTEMPTS, Job, State
from torpor.control.rental.records import Rental
from torpor.control.safety import Verified
from torpor.shared.errors import (
    BudgetExceeded,
    CreateFailed,
    HandedOver,
    InvalidInput,
    NoOffer,
    TorporError,
    UnexpectedAnswer,
)
from torpor.shared.values import Machine

TURN_S: Final = 10.0
"""Between two looks at an older job of the workspace, which comes first."""
AGAIN_S: Final = 5.0
LONGEST_S: Final = 60.0
"""Between two tries where a machine, a provider or the store does not answer: the first wait, and
the longest. A machine is waited for as long as its provider shows it: it may hold work."""
STOPPED_S: Final = 60.0
"""Between two looks at a machine that its provider has stopped."""


class Driver:
    """Brings one job to its end. All that it knows stands in the record, so that another run can go
    on at any point."""

    def __init__(self, opened: OpenWorkspace, driven: Driven) -> None:
        self._opened = opened
        self._driven = driven
        self._refusals = self._troubles = 0

    @property
    def job(self) -> Job:
        return self._driven.job

    def run(self) -> Job:
        """Until the job has ended. Raises what another try cannot mend, HandedOver if another run
        drives the job."""
        self._wait_for_turn()
        while not self.job.ended:
            self._driven.check()
            try:
                self._once()
                self._troubles = 0
            except TorporError as error:
                if not (error.retryable or isinstance(error, UnexpectedAnswer)):
                    raise
                self._troubles += 1
                runner().log.warning("job %s tries again: %s", self.job.id, error)
                self._driven.nap(min(LONGEST_S, AGAIN_S * self._troubles))
        return self.job

    def _once(self) -> None:
        newest = self.job.attempts[-1].machine if self.job.attempts else None
        found = machine_in_use(self._opened, newest)
        if found is None:
            self._without_machine()
        elif found[0].state in ("stopped", "stopping"):
            self._see_stopped(*found)
        elif self._is_over_on(found[0]):
            self._finish(found[0])
        else:
            self._attend(*found)

    def _wait_for_turn(self) -> None:
        """Jobs of one workspace run one after the other, the oldest first."""
        me = (self.job.created_unix, self.job.id)
        while self._driven.stop is None:
            before = [j for j in self._opened.jobs.open() if (j.created_unix, j.id) < me]
            if not before:
                return
            self._say_waiting(f"job {before[0].id} of this workspace comes first")
            self._driven.nap(TURN_S)

    # -- no machine

    def _without_machine(self) -> None:
        """Its machine is gone or it never had one: end the job, or rent for the next attempt."""
        self._see_loss()
        stop = self._driven.stop
        if self.job.final is not None:
            self._end()
        elif stop is not None:
            self._driven.end(stop.state, stop.why)
        elif is_hopeless(self.job):
            self._driven.end(
                "preempted",
                "several machines were lost one after the other before a newer save; the newest "
                f"is {self.job.newest}. Save more often, or rent on demand",
            )
        elif len(self.job.attempts) >= MOST_ATTEMPTS:
            self._driven.end("failed", f"it was started {MOST_ATTEMPTS} times")
        else:
            self._rent()

    def _see_loss(self) -> None:
        """Record that the machine of the open attempt has gone, and what was lost with it."""
        attempt = self.job.attempt
        newest = newest_save(self._opened, self.job.newest)
        if newest is not None and newest.snapshot != self.job.newest:
            self._driven.saved(newest.snapshot, newest.modified_unix)
        if attempt is None:
            return
        saved_unix = max(attempt.began_unix, self.job.newest_unix or 0.0)
        self._driven.change_attempt(
            end="machine lost",
            ended_unix=time.time(),
            lost_s=max(0.0, attempt.seen_unix - saved_unix),
        )
        runner().log.warning(
            "machine %s of attempt %d is gone; the job goes on from snapshot %s",
            attempt.machine,
            attempt.number,
            self.job.newest,
        )

    def _rent(self) -> None:
        """Wake the newest save on a new machine, or wait where none is on sale."""
        spec = self._opened.spec
        want = msgspec.structs.replace(spec.want, spot=spot_for(self.job))
        opened = replace(self._opened, spec=msgspec.structs.replace(spec, want=want))
        try:
            report = wake_workspace(opened, Phases(), self.job.newest or "")
        except (NoOffer, CreateFailed) as error:
            self._refusals += 1
            seconds = wait_s(self._refusals)
            self._say_waiting(f"{error}. The next look is in {seconds:.0f} s")
            self._driven.nap(seconds)
            return
        except BudgetExceeded as error:
            self._driven.end("over budget", str(error))
            return
        except TorporError as error:  # nothing runs, and what it had saved is stored
            if error.retryable or isinstance(error, HandedOver):
                raise
            self._driven.end("failed", f"its workspace could not be woken: {error}")
            return
        self._refusals = 0
        if self.job.newest is None:
            self._driven.change(newest=report.snapshot)

    def _say_waiting(self, why: str) -> None:
        if self.job.why != why:
            runner().log.info("job %s waits: %s", self.job.id, why)
            self._driven.change(state="waiting", why=why)

    # -- on a machine

    def _attend(self, machine: Machine, rental: Rental) -> None:
        """Run the command there until it ends, or the machine is lost."""
        if self.job.attempt is not None and self.job.attempt.machine != machine.id:
            self._see_loss()
        with open_session(self._opened, machine) as session:
            Attending(self._opened, self._driven, machine, rental, session).run()
        if self._is_over_on(machine):
            self._finish(machine)

    def _is_over_on(self, machine: Machine) -> bool:
        """Whether nothing is to be started on the machine again: the workspace is to be stored."""
        job = self.job
        newest = job.attempts[-1] if job.attempts else None
        if newest is None or newest.machine != machine.id:
            return False
        if newest.end == "stopped":
            return True
        return newest.end == "command ended" and (newest.status == 0 or not is_retried(job))

    def _finish(self, machine: Machine) -> None:
        """Hibernate with proof, and end the job; or keep the machine if that was asked."""
        stop = self._driven.stop
        if stop is not None and stop.then == "keep":
            self._end()
            return
        self._driven.change(state="hibernating")
        run = f"{runner().run}-end-{len(self.job.attempts)}-{time.time_ns()}"
        try:
            store_workspace(
                self._opened,
                Phases(),
                destroy=True,
                machine=machine.id,
                run=run,
                proven=self._proven,
            )
        except InvalidInput:
            if machine_in_use(self._opened, machine.id) is not None:
                raise
            return  # it was lost meanwhile: the command runs again from the newest save
        self._end()

    def _proven(self, verified: Verified) -> None:
        """Record, right before the machine is destroyed, that this snapshot holds the end."""
        self._driven.saved(verified.snapshot, time.time())
        self._driven.change(final=verified.snapshot)

    def _end(self) -> None:
        stop, newest = self._driven.stop, self.job.attempts[-1]
        state: State
        if newest.end == "command ended":
            state = "succeeded" if newest.status == 0 else "failed"
            why = newest.error or f"the command ended with status {newest.status}"
        elif stop is not None:
            state, why = stop.state, stop.why
        else:
            state, why = "cancelled", "it was stopped"
        self._driven.end(state, why)

    def _see_stopped(self, machine: Machine, rental: Rental) -> None:
        self._say_waiting(
            f"{machine.provider} has stopped machine {machine.id}, which may hold work that is in "
            "no snapshot: the job goes on when the machine runs again or has ended"
        )
        self._driven.nap(STOPPED_S)
