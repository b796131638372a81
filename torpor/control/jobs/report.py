"""What a job did, for people."""

from __future__ import annotations

import time
from datetime import datetime, timezone

import msgspec

from torpor.control.jobs.records import Attempt, Job
from torpor.control.reports import Report, Row


class JobCost(msgspec.Struct, frozen=True):
    """What the machines of a job cost, in words. ``usd``: at most, where all prices are known; None
    otherwise. ``saved``: what its spot machines cost less than the same ones on demand."""

    words: str
    usd: float | None = None
    saved: str = ""

    def __str__(self) -> str:
        return self.words


class JobReport(Report, frozen=True):
    """A job that has ended."""

    job: Job
    cost: JobCost

    @property
    def about(self) -> str:
        return self.job.id

    @property
    def lost_s(self) -> float:
        """Seconds of work that were lost, in all attempts."""
        return sum(attempt.lost_s for attempt in self.job.attempts)

    def title(self) -> str:
        return f"Job {self.job.id} of workspace {self.job.workspace}: {self.job.state}"

    def rows(self) -> list[Row]:
        """The report as a table of two columns."""
        job, limits = self.job, limits_of(self.job, time.time(), self.cost.usd)
        machines = list(dict.fromkeys(attempt.machine for attempt in job.attempts))
        return [
            {"what": "job", "value": f"{job.id}: {' '.join(job.command)[:200]}"},
            {"what": "outcome", "value": job.outcome},
            {
                "what": "attempts",
                "value": "; ".join(_attempt(attempt) for attempt in job.attempts[-20:]),
            },
            {"what": "machines", "value": f"{len(machines)}: {', '.join(machines[-20:])}"},
            *([{"what": "nodes", "value": f"{job.nodes} at the same time"}] * (job.nodes > 1)),
            {"what": "cost", "value": self.cost.words},
            *([{"what": "saved by spot", "value": saved}] if (saved := self.cost.saved) else []),
            *([{"what": "limits", "value": limits}] if limits else []),
            {"what": "saves", "value": f"{job.saves}, newest {job.newest or 'none'}"},
            {"what": "work lost", "value": f"{self.lost_s:.0f} s"},
            *([{"what": "not used", "value": job.aside}] if job.aside else []),
        ]


def limits_of(job: Job, now_unix: float, usd: float | None) -> str:
    """What the job has used of its time and of its money, in words; empty for no limit. ``usd``:
    what it has cost; None where that is not known."""
    hours = usd_words = ""
    if job.max_hours:
        hours = f"{job.worked_s(now_unix) / 3600:.3g} of {job.max_hours:g} h"
    if job.max_usd:
        usd_words = f"{'?' if usd is None else f'{usd:.2f}'} of {job.max_usd:.2f} $"
    return ", ".join(filter(None, (hours, usd_words)))


def allowed(job: Job) -> str:
    """What the job may use, in words."""
    hours = f"{job.max_hours:g} h" if job.max_hours else ""
    usd = f"{job.max_usd:.2f} $" if job.max_usd else ""
    past = "whatever the budgets say" if job.past_budgets else ""
    return ", ".join(filter(None, (hours, usd, past))) or "no limit of its own"


def _attempt(attempt: Attempt) -> str:
    began = datetime.fromtimestamp(attempt.began_unix, timezone.utc).strftime("%Y-%m-%d %H:%M")
    status = "" if attempt.status is None else f" with status {attempt.status}"
    kind = "spot" if attempt.spot else "on demand"
    is_lost = attempt.end in ("machine lost", "supervisor lost")
    lost = f", {attempt.error}" if is_lost and attempt.error else ""
    return f"{attempt.number} ({began} UTC, {kind}): {attempt.end or 'runs'}{status}{lost}"
