"""What a job did, for people."""

from __future__ import annotations

from datetime import datetime, timezone

from torpor.control.jobs.records import Attempt, Job
from torpor.control.reports import Report, Row


class JobReport(Report, frozen=True):
    """A job that has ended. ``cost``: of all its machines, from their rentals, in words."""

    job: Job
    cost: str

    @property
    def about(self) -> str:
        return self.job.id

    @property
    def lost_s(self) -> float:
        """Seconds of work that were done and lost, in all attempts."""
        return sum(attempt.lost_s for attempt in self.job.attempts)

    def title(self) -> str:
        return f"Job {self.job.id} of workspace {self.job.workspace}: {self.job.state}"

    def rows(self) -> list[Row]:
        """The report as a table of two columns."""
        job = self.job
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
            {"what": "cost", "value": self.cost},
            *([{"what": "limits", "value": limits}] if (limits := limits_of(job)) else []),
            {"what": "saves", "value": f"{job.saves}, newest {job.newest or 'none'}"},
            {"what": "work lost", "value": f"{self.lost_s:.0f} s"},
            *([{"what": "not used", "value": job.aside}] if job.aside else []),
        ]


def limits_of(job: Job) -> str:
    """The time and the money that the job may use, in words; empty for no limit."""
    hours = f"{job.most_hours:g} h" if job.most_hours else ""
    usd = f"{job.most_usd:.2f} $" if job.most_usd else ""
    return " and ".join(filter(None, (hours, usd)))


def _attempt(attempt: Attempt) -> str:
    began = datetime.fromtimestamp(attempt.began_unix, timezone.utc).strftime("%Y-%m-%d %H:%M")
    status = "" if attempt.status is None else f" with status {attempt.status}"
    kind = "spot" if attempt.spot else "on demand"
    is_lost = attempt.end in ("machine lost", "supervisor lost")
    lost = f", {attempt.error}" if is_lost and attempt.error else ""
    return f"{attempt.number} ({began} UTC, {kind}): {attempt.end or 'runs'}{status}{lost}"
