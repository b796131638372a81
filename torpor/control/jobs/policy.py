"""What happens to a job after an attempt has ended: pure functions of its record. A machine that is
lost after a newer save does not count, because the job made progress. Losses without progress are
counted from the last attempt that saved. A lost supervisor counts like a lost machine: otherwise a
program that uses up the memory of its machine would be started again and again."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, Literal, NamedTuple

from torpor.control.jobs.records import MOST_ATTEMPTS, Attempt, Job

MOST_LOSSES: Final = 3
"""Machines or supervisors that may be lost in a row without a newer save; then the job ends."""
MOST_FAILURES: Final = 10
"""Wakes that may fail in a row, each of which may have rented a machine; then the job ends."""
LOSSES_TO_ON_DEMAND: Final = 2
"""Losses after which ``allowed`` rents no spot machine for the next attempt."""
FIRST_SAVE_S: Final = 180.0
"""Seconds until the first save on a spot machine begins. Each later interval is twice as long, up
to the job's own: many spot machines are lost within the hour (docs/figures.md)."""
WAITS_S: Final = (60.0, 120.0, 300.0, 600.0)
"""The waits in seconds before the next look for a machine where none was on sale; the last one
repeats."""

Spot = Literal["never", "allowed", "only"]


class Spent(NamedTuple):
    """What a job has cost at most. ``usd_h``: what its machines cost now; ``unpriced``: a machine
    whose price is unknown."""

    usd: float
    usd_h: float = 0.0
    unpriced: str = ""


def losses(attempts: Sequence[Attempt]) -> int:
    """How many machines or supervisors were lost in a row, up to now, without a newer save."""
    count = 0
    for attempt in reversed(attempts):
        if attempt.end not in ("machine lost", "supervisor lost") or attempt.saved:
            break
        count += 1
    return count


def spot_for(job: Job) -> Spot:
    """Which machines the next attempt may rent."""
    if job.spot == "allowed" and losses(job.attempts) >= LOSSES_TO_ON_DEMAND:
        return "never"
    return job.spot


def is_hopeless(job: Job) -> bool:
    """Whether the job has lost too much without progress to be tried again."""
    return losses(job.attempts) >= MOST_LOSSES or len(job.attempts) >= MOST_ATTEMPTS


def is_retried(job: Job) -> bool:
    """Whether the command, which has failed, is started again."""
    failed = sum(attempt.end == "command ended" and attempt.status != 0 for attempt in job.attempts)
    return failed <= job.retries


def save_interval_s(job: Job, spot: bool, begun: int) -> float:
    """Seconds to the next save, from the beginning of the last of ``begun`` saves on a machine, or
    from the beginning of the attempt there. On a spot machine the first saves come sooner, and
    sooner still after losses without a save."""
    every_s = 60.0 * job.save_minutes
    if not spot:
        return every_s
    before = losses([attempt for attempt in job.attempts if attempt.end])
    return min(every_s, FIRST_SAVE_S * 2.0 ** (min(begun, 20) - before))


def why_over(job: Job, spent: Spent, reserve_s: float, now_unix: float) -> str:
    """Why the job is to end, because its time or its money is spent; empty if it may go on.
    ``reserve_s``: how long its machines are paid for after that, to store the workspace."""
    worked_s = job.worked_s(now_unix)
    if job.max_hours and worked_s >= job.max_hours * 3600:
        most = _time(job.max_hours * 3600)
        return f"its time is over: the command ran for {_time(worked_s)} of {most}"
    if not job.max_usd:
        return ""
    if spent.unpriced:
        return (
            f"the price of machine {spent.unpriced} is not known, and the job may cost "
            f"{job.max_usd:.2f} $"
        )
    kept_usd = spent.usd_h * reserve_s / 3600
    if spent.usd + kept_usd < job.max_usd:
        return ""
    kept = f", and {kept_usd:.2f} $ are kept to store its work" if kept_usd else ""
    return f"its money is spent: {spent.usd:.2f} $ of {job.max_usd:.2f} $ so far{kept}"


def wait_s(refusals: int) -> float:
    """Seconds before the next look, after this many looks in a row in which nothing was on sale."""
    return WAITS_S[min(refusals, len(WAITS_S)) - 1]


def _time(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"
