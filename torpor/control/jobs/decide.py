"""What a job does next: a pure function of its record, its machine and the request to stop it.

A driver looks, asks ``next_move``, carries the move out, and looks again, until the job has ended.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal, TypeAlias

from torpor.control.jobs.policy import is_hopeless, is_retried
from torpor.control.jobs.records import FORGOTTEN, MOST_ATTEMPTS, Job, Outcome, Stop
from torpor.control.rental.records import Rental
from torpor.shared.values import Machine


@dataclass(frozen=True)
class JobMachine:
    """The machine that the workspace is on. ``ours``: the job works on it, or it was rented for the
    job."""

    machine: Machine
    rental: Rental
    ours: bool


@dataclass(frozen=True)
class Situation:
    """What a look shows. ``first``: no other job of the workspace comes before this one.
    ``untouched``: nothing of the job has begun anywhere. ``hidden``: the job's machine is missing
    in its provider's answer, and its end is not proven. ``left``: machines that killed wakes of the
    job rented are not proven to have ended; looked at only for a job that should stop, or that runs
    on several machines."""

    machine: JobMachine | None = None
    first: bool = True
    untouched: bool = False
    hidden: bool = False
    left: bool = False


@dataclass(frozen=True)
class EndJob:
    """End the job."""

    state: Outcome
    why: str


_MEMORY: Final = "see whether the command uses up the memory of its machine"

Action = Literal[
    "wait for turn",  # another job of the workspace comes first
    "look again",  # its machine may show again
    "clear",  # end what killed wakes have left
    "rent",  # wake the newest save on a new machine
    "keep",  # leave the machine to its user
    "revive",  # start its machine again, wait for it, or end it: its provider does not run it
    "run",  # start the command, or go on with it
    "renew",  # store the workspace, and end its machine: all nodes are to be rented again
    "hibernate",  # store the workspace, and end its machine
]
Move: TypeAlias = Action | EndJob


def next_move(job: Job, seen: Situation, stop: Stop | None) -> Move:
    """The next move of a job that has not ended."""
    if stop is not None and seen.untouched:
        return EndJob(stop.state, stop.why)
    if not job.attempts and not seen.first:
        return "wait for turn"
    on = seen.machine
    # the machine is the user's, or another job's
    if on is None or (stop is not None and not on.ours):
        return _without_machine(job, seen, stop)
    if job.final is not None and on.rental.is_ending(on.machine):  # ending it may take hours
        return end_of(job, stop)
    if stop is not None and stop.then == "keep":
        return end_of(job, stop) if is_over_on(job, on.machine) else "keep"
    if job.nodes > 1 and not on.ours:
        return EndJob(
            "failed",
            f"the workspace is on machine {on.machine.id}, and a job on {job.nodes} nodes begins "
            "with all of them from one snapshot: hibernate the workspace, then run the job again",
        )
    if job.nodes > 1 and on.rental.is_ending(on.machine):
        return _without_machine(job, seen, stop)
    if on.machine.state != "running":
        return "revive"
    if is_over_on(job, on.machine):
        return "hibernate"
    return "run" if job.has_nodes_for(on.machine.id) else "renew"


def _without_machine(job: Job, seen: Situation, stop: Stop | None) -> Move:
    if seen.hidden:
        return "look again"
    if job.final is not None:
        return end_of(job, stop)
    if seen.left:
        return "clear"
    if stop is not None:
        return EndJob(stop.state, stop.why)
    return hopeless_end(job) if is_hopeless(job) else "rent"


def is_over_on(job: Job, machine: Machine) -> bool:
    """Whether nothing should be started on the machine any more, so that the workspace is
    stored."""
    newest = job.attempts[-1] if job.attempts else None
    return newest is not None and newest.machine == machine.id and is_over(job)


def is_over(job: Job) -> bool:
    """Whether the command should not be started again after its newest attempt."""
    newest = job.attempts[-1]
    lost = newest.end in ("supervisor lost", "machine lost")
    if newest.end == "stopped" or (lost and is_hopeless(job)):
        return True
    return newest.end == "command ended" and (newest.status == 0 or not is_retried(job))


def end_of(job: Job, stop: Stop | None) -> EndJob:
    """How a job that has begun ends after its last attempt."""
    newest = job.attempts[-1]
    if newest.end in ("supervisor lost", "machine lost"):
        return hopeless_end(job)
    if newest.end == "command ended":
        state: Outcome = "succeeded" if newest.status == 0 else "failed"
        return EndJob(state, newest.error or f"the command ended with status {newest.status}")
    if stop is not None:
        return EndJob(stop.state, stop.why)
    return EndJob("cancelled", "it was stopped")


def hopeless_end(job: Job) -> EndJob:
    """How a job ends that has lost too many machines without progress."""
    if len(job.attempts) >= MOST_ATTEMPTS:
        return EndJob("failed", f"it was started {MOST_ATTEMPTS} times")
    newest = job.attempts[-1]
    if newest.end == "supervisor lost":
        why = newest.error if newest.error == FORGOTTEN else _MEMORY
        return EndJob("failed", f"its supervisor was lost several times before a newer save: {why}")
    return EndJob(
        "preempted",
        "several machines were lost one after the other before a newer save; the newest is "
        f"{job.newest}. Save more often, or rent on demand",
    )
