"""A job's machine that its provider does not run (stopped): it is started again, ended, or left."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Final

import msgspec

from flows.procedures.save import take_snapshot
from tasks.jobs import check_no_other_job
from tasks.ownership import check_still_owner
from tasks.runner import runner
from tasks.stopped_machine import end_stopped, find_sure_save, start_machine
from tasks.workspace import OpenWorkspace
from torpor.control.jobs.driven_job import Driven
from torpor.control.jobs.records import Stop
from torpor.control.remote.agent import Session
from torpor.control.rental.records import Rental
from torpor.shared.errors import (
    AgentLost,
    HandedOver,
    MachineInUse,
    NoCapacity,
    ProviderError,
    Recovered,
    SnapshotError,
    TorporError,
    UnsafeDestroy,
)
from torpor.shared.values import Machine

POLL_S: Final = 30.0
"""Seconds between two looks at a machine that does not run, and between two requests to start
it."""
RESTART_S: Final = 600.0
"""Seconds for which a market is asked to start a machine again, and for which a job that is being
stopped waits for such a machine. This costs at most the price of the machine for this time, and the
save."""
LEAVE_S: Final = 1800.0
"""Seconds that a job which is to stop waits for a machine that changes its state again and again
and never runs."""
GONE_S: Final = 60.0
"""Seconds for which a provider must say that a machine is stopped whose disk is lost with the
stop."""


class Stopped:
    """What one job does about its machine while the machine does not run."""

    def __init__(
        self,
        opened: OpenWorkspace,
        driven: Driven,
        say: Callable[[str], None],
        clock_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self._opened = opened
        self._driven = driven
        self._say = say
        self._clock_s = clock_s
        self.forget()

    def forget(self) -> None:
        """Forget the earlier looks: the machine runs, or there is none."""
        self._since_s: float | None = None  # time of the first look at a machine that does not run
        self._seen = ("", "")  # the machine and its state in the last look
        self._seen_since_s = 0.0
        self._asked = False  # whether the market has answered a request to start it since then

    def see(self, machine: Machine, rental: Rental, *, ours: bool) -> None:
        """Look once. ``ours``: the job works on the machine, or it was rented for the job."""
        now_s = self._clock_s()
        if self._since_s is None:
            self._since_s = now_s
        if (seen := (machine.id, machine.state)) != self._seen:
            self._seen, self._seen_since_s, self._asked = seen, now_s, False
        stopped = machine.state == "stopped"
        if ours and stopped and self._driven.job.stopped != machine.id:
            self._driven.change(stopped=machine.id)
        able = self._opened.markets.of(machine.provider).abilities
        keeps = able.stop_keeps != "nothing"
        starts = ours and stopped and keeps and able.restarts
        most_s = RESTART_S if starts or not stopped else GONE_S
        if machine.state in ("starting", "queued"):
            most_s = max(most_s, able.ready_s + able.queue_s)
        over = now_s - self._seen_since_s >= most_s
        if not over and now_s - self._since_s < LEAVE_S:
            self._wait(machine, starts)
            return
        left = "it may hold work that is in no snapshot"
        ends = over and ours and stopped and (self._asked or not keeps)
        if ends and self._holds_no_others_work(machine, rental):
            left = self._end(machine, rental)
            if not left:
                return
        stop = self._driven.look_for_stop()
        if stop is not None:
            self._leave(machine, stop, left)
        else:
            self._wait(machine, starts, left)

    def save(self, machine: Machine, session: Session) -> None:
        """Store the disk of a machine that runs again at once, because the market may take it
        again. As for every save, a failure does not keep the command from going on."""
        runner().log.info("machine %s runs again: it is saved first", machine.id)
        opened = replace(
            self._opened, spec=msgspec.structs.replace(self._opened.spec, quiesce=[])
        )  # no program runs there that could be quiesced
        read_unix = time.time()
        try:
            report, verified = take_snapshot(opened, session, machine)
            for line in report.lost:
                runner().log.warning("the save lacks what was there before: %s", line)
        except AgentLost:
            raise
        except TorporError as error:
            runner().log.warning("the save failed, the command goes on: %s", error)
        else:
            self._driven.saved(verified.snapshot, read_unix)

    def _wait(self, machine: Machine, starts: bool, left: str = "") -> None:
        words = f"{machine.provider} does not run machine {machine.id}: it is {machine.state}"
        if machine.note:
            words += f" ({machine.note})"
        if left:
            words += f". The job goes on when it runs again or has ended: {left}"
        elif starts:
            words += f"; torpor asks for its start, and for {RESTART_S / 60:.0f} min at most"
        self._say(words)
        if starts:
            self._start(machine)
        self._driven.nap(POLL_S)

    def _start(self, machine: Machine) -> None:
        self._driven.change()  # raises HandedOver before the machine of a successor is started
        try:
            self._asked = start_machine(self._opened, machine) or self._asked
        except ProviderError as error:
            self._asked = self._asked or isinstance(error, NoCapacity)
            runner().log.warning("machine %s was not started: %s", machine.id, error)

    def _holds_no_others_work(self, machine: Machine, rental: Rental) -> bool:
        """Whether the disk held nothing but a snapshot when the job got the machine, or was saved
        by the job since. If not, a user may have worked there before, and nothing is ended."""
        job = self._driven.job
        if job.stopped != machine.id:
            return False
        saved = any(one.machine == machine.id and one.saved for one in job.attempts)
        return not rental.adopted and (saved or rental.job == job.id)

    def _end(self, machine: Machine, rental: Rental) -> str:
        """End the machine and go on from the newest save. Returns why not, if the machine must be
        left."""
        job = self._driven.job
        self._driven.change()  # raises HandedOver before the machine of a successor is ended
        try:
            save = find_sure_save(self._opened, job)
            if save is None:
                return "its workspace has no snapshot to go on from"
            runner().log.warning(
                "machine %s is stopped at %s and does not start: it is ended, and what it wrote "
                "after snapshot %s is lost",
                machine.id,
                machine.provider,
                save.snapshot,
            )
            end_stopped(self._opened, machine, rental, save, partial(self._check_unused, machine))
        except Recovered:
            raise
        # the machine has another owner, not the job: the next look shows which
        except HandedOver as error:
            return str(error)
        except UnsafeDestroy as error:  # the machine runs again: the next look shows it
            runner().log.warning("machine %s was not ended: %s", machine.id, error)
            self._driven.nap(POLL_S)
        except (ProviderError, SnapshotError, MachineInUse) as error:
            runner().log.warning("machine %s was not ended: %s", machine.id, error)
            return str(error)
        return ""

    def _check_unused(self, machine: Machine) -> None:
        check_still_owner(self._opened)
        check_no_other_job(self._opened, machine, self._driven.job.id)

    def _leave(self, machine: Machine, stop: Stop, why: str) -> None:
        """End the job without ending the machine."""
        if self._driven.job.attempt is not None:
            self._driven.change_attempt(end="machine lost", ended_unix=time.time())
        self._driven.end(
            stop.state,
            f"{stop.why}. Machine {machine.id} at {machine.provider} was left, which is "
            f"{machine.state} and costs money: {why}. Start it in the market's console and "
            "hibernate the workspace, or end it there",
        )
