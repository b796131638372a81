"""Jobs in a list: open ones, those that wait in a queue, and those that ended last."""

from __future__ import annotations

import time

import msgspec

from torpor.control.jobs.records import Job, Stop
from torpor.control.jobs.report import limits_of
from torpor.control.reports import MOST_ROWS, Report, Row, moment
from torpor.shared.values import WorkspaceName

_MOST_COMMAND = 120  # characters


class QueuedJob(msgspec.Struct, frozen=True):
    """A flow run that waits in a queue for its turn."""

    job: str
    workspace: str  # the name of a block, as the run has it
    queue: str
    run: str
    since_unix: float
    command: list[str]
    due_unix: float = 0.0  # when the run may begin: a schedule or a retry may delay it


class JobList(Report, frozen=True):
    """``unread``: the workspaces of which jobs could not be read, with the reason. ``usd``: what
    jobs with a limit of money have cost at most."""

    open: list[Job]
    queued: list[QueuedJob]
    ended: list[Job]
    unread: dict[str, str]
    usd: dict[str, float] = msgspec.field(default_factory=dict)

    def rows(self) -> list[Row]:
        """The newest first: those that run, those that wait, those that have ended."""
        waiting = {queued.job: queued for queued in self.queued}
        rows = [self._row(job, waiting.get(job.id)) for job in reversed(self.open)]
        begun = {job.id for job in (*self.open, *self.ended)}
        rows += [_queued_row(queued) for queued in self.queued if queued.job not in begun]
        rows += [self._row(job, None) for job in reversed(self.ended)]
        left_out = len(rows) - MOST_ROWS
        rows = rows[:MOST_ROWS]
        if left_out > 0:
            rows.append({name: f"and {left_out} more" if name == "job" else "" for name in rows[0]})
        for name, why in self.unread.items():
            rows.append({"job": "unknown", "workspace": name, "state": why})
        return rows or [{"job": "none"}]

    def title(self) -> str:
        return (
            f"Open jobs: {len(self.open)}, runs in queues: {len(self.queued)}, "
            f"ended jobs listed: {len(self.ended)}"
        )

    def _row(self, job: Job, queued: QueuedJob | None) -> Row:
        state: str = job.state
        if not job.ended and not job.driven:
            state += f", its run waits in {queued.queue}" if queued else ", driven by nobody"
        return {
            "job": job.id,
            "workspace": job.workspace,
            "state": state,
            "used": limits_of(job, time.time(), self.usd.get(job.id)),
            "command": command_line(job.command),
            "began": moment(job.created_unix),
            "runs on": where(job),
            "attempts": str(len(job.attempts)),
            "saves": str(job.saves),
            "why": job.why,
        }


class JobLog(msgspec.Struct, frozen=True):
    """The newest lines of a job's log. ``source`` and ``path``: where they were read, and where
    all of it lies."""

    job: str
    workspace: WorkspaceName
    text: str
    source: str
    path: str

    def markdown(self) -> str:
        lines = "\n".join(f"    {line}" for line in self.text.splitlines())
        return f"From {self.source}. All of the log is in `{self.path}`.\n\n{lines}\n"


class JobAnswer(Report, frozen=True):
    """The current facts about one job, as rows of what and value. ``log``: None where no line of it
    was asked for."""

    job: str
    workspace: WorkspaceName
    answer: dict[str, str]
    log: JobLog | None = None

    @property
    def about(self) -> str:
        return self.job

    def title(self) -> str:
        return f"Job {self.job} of workspace {self.workspace}"

    def rows(self) -> list[Row]:
        return [{"what": what, "value": value} for what, value in self.answer.items()]


def where(job: Job) -> str:
    """The machine that the job works on, or worked on last; empty if it has none."""
    if job.ended:
        return ""
    attempt = job.attempts[-1] if job.attempts else None
    if job.rented and job.rented not in {attempt.machine for attempt in job.attempts}:
        return job.rented
    if attempt is None or attempt.end == "machine lost":
        return ""
    machine = f"{attempt.machine}, the first of {job.nodes}," if job.nodes > 1 else attempt.machine
    return f"{machine} at {attempt.provider}"


def driver(job: Job) -> str:
    """The run that drives a job that has not ended, in words."""
    if job.driven:
        return f"run {job.driver}"
    return "nobody: `watch` continues it, or a run of `job` with its id"


def what_runs_on(job: Job) -> str:
    """What goes on while no run drives the job, and what that costs."""
    attempt = job.attempt
    if attempt is None:
        on = f"machine {job.rented} may be left" if job.rented else "no machine of it runs"
        return f"job {job.id} waits, and {on}"
    price = f"${attempt.price_usd_h * job.nodes:.2f} an hour"
    costs = price if attempt.price_usd_h else "money, how much is not known"
    machines = f" and {job.nodes - 1} other" + "s" * (job.nodes > 2) if job.nodes > 1 else ""
    return (
        f"the command of job {job.id} runs on, on machine {attempt.machine}{machines} at "
        f"{attempt.provider}, which costs {costs}"
    )


def commands_for(job: str, workspace: str) -> dict[str, str]:
    """The commands by which a person follows a job and ends it."""
    return {
        "log": f"torpor job log {workspace} {job} -f",
        "cancel": f"torpor job cancel {workspace} {job}",
    }


def in_other_hands(job: Job, stop: Stop | None, by: str) -> str:
    """What happens to a job that this run does not drive any more. ``by``: the run that continues
    it."""
    if stop is None:
        commands = commands_for(job.id, job.block)
        return (
            f"{what_runs_on(job)}. {by or '`watch`, or a run of `job` with its id,'} continues it; "
            f"`{commands['cancel']}` ends it, `{commands['log']}` shows what it prints"
        )
    machine = "leaves the machine" if stop.then == "keep" else "hibernates the machine"
    who = by or "the next `watch`, or the next job of this workspace,"
    return (
        f"{who} stops job {job.id}: it ends the command and {machine}. Until then both go on and "
        "cost money. `job-status` shows it"
    )


def command_line(command: list[str]) -> str:
    text = " ".join(command)
    return text if len(text) <= _MOST_COMMAND else f"{text[:_MOST_COMMAND]} ..."


def _queued_row(queued: QueuedJob) -> Row:
    return {
        "job": queued.job,
        "workspace": queued.workspace,
        "state": f"queued in {queued.queue}",
        "used": "",
        "command": command_line(queued.command),
        "began": moment(queued.since_unix),
        "runs on": "",
        "attempts": "",
        "saves": "",
        "why": "",
    }
