"""The steps that look at jobs: their records, the queues, and their logs."""

from __future__ import annotations

import shlex
import time
from collections.abc import Callable, Sequence

import msgspec

from blocks import Workspace
from tasks.job_log import NOWHERE, JobLogReader
from tasks.jobs import cost_of, machines_of
from tasks.progress import following, now
from tasks.runner import runner
from tasks.runs import JobRun, RunState
from tasks.step import step
from tasks.workspace import OpenWorkspace
from tasks.workspace_blocks import open_workspace
from torpor.control.jobs.listing import JobAnswer, JobLog, QueuedJob, command_line, driver
from torpor.control.jobs.log_lines import MOST_CHARS
from torpor.control.jobs.records import NO_FAILURE, Job, job_id, log_path, new_job_id
from torpor.control.jobs.report import JobReport
from torpor.control.reports import moment
from torpor.control.store.records import Unread, named
from torpor.shared.errors import InvalidInput, JobFailed, TorporError

_BEGINS_S = 300.0
"""Seconds that a run may take from its begin to the record of its job: it loads its flow and reads
the store first."""
_POLL_S = 2.0  # between two looks at a job that waits in a queue
_SHOWN_LINES = 10
_MOST_LINE = 200  # characters of a command in an error
_MOST_CHARS = 256 * 1024
"""Most characters of a log on its page in the UI."""


class JobsOf(msgspec.Struct, frozen=True):
    """The jobs of one workspace, oldest first. ``unread``: which records cannot be trusted, and
    why. ``usd``: what the jobs with a limit of money have cost at most."""

    open: list[Job]
    ended: list[Job]
    unread: str
    usd: dict[str, float]


@step("read jobs")
def read_jobs(opened: OpenWorkspace, most_ended: int) -> JobsOf:
    """The workspace's open jobs, and those that ended last."""
    unread: Unread = {}
    jobs = opened.jobs.open(unread), opened.jobs.ended(most_ended, unread)
    limited = [job for of in jobs for job in of if job.max_usd]
    spent = {job.id: cost_of(opened, job).usd for job in limited}
    known = {job: usd for job, usd in spent.items() if usd is not None}
    return JobsOf(*jobs, named(unread), known)


def read_all_jobs(
    blocks: Sequence[str], most_ended: int
) -> tuple[list[Job], dict[str, str], dict[str, float]]:
    """The jobs of the workspaces of these blocks, oldest first; why other workspaces, or some jobs,
    could not be read; and what the jobs with a limit of money have cost."""
    found: dict[str, Job] = {}
    unread: dict[str, str] = {}
    usd: dict[str, float] = {}
    reads = {}
    for block in blocks:
        try:
            reads[block] = read_jobs.submit(open_workspace(block), most_ended)
        except TorporError as error:
            unread[block] = str(error)
    for block, read in reads.items():
        try:
            read_here = read.result()
        except TorporError as error:
            unread[block] = str(error)
        else:  # several blocks may name one workspace
            found |= {job.id: job for job in (*read_here.open, *read_here.ended)}
            usd |= read_here.usd
            if read_here.unread:
                unread[block] = read_here.unread
    jobs = sorted(found.values(), key=lambda job: (job.ended_unix or job.created_unix, job.id))
    return jobs, unread, usd


def job_of(run: JobRun) -> str:
    """The id of the job that a run drives, or will."""
    return _named_job(run) or new_job_id(run.id)


def record_of(opened: OpenWorkspace, run: JobRun) -> Job | None:
    """The record of the newest job that a run drives; None if the run has written none. A retry of
    the run begins a job with another id than the named one."""
    if begun := opened.jobs.started_by(run.id):
        return begun[-1]
    named = _named_job(run)
    return opened.jobs.of(named) if named else None


def _named_job(run: JobRun) -> str:
    return str(run.parameters.get("job") or "").strip()


def queued_jobs(queue: str = "", begun_s: float = 0.0) -> list[QueuedJob]:
    """The runs of jobs that have not begun, in the order of their submission; with ``queue``, only
    those of that queue. ``begun_s``: also those that began less than this many seconds ago."""
    states: tuple[RunState, ...] = ("waiting", "taken", *(("running",) if begun_s else ()))
    since_unix = time.time() - begun_s
    return [
        QueuedJob(
            job=job_of(one),
            workspace=str(one.parameters.get("workspace")),
            queue=one.queue,
            run=one.id,
            since_unix=one.created_unix,
            command=_argv(one.parameters.get("command") or []),
            # A run that was put back into its queue has waited since then, whatever its first due
            # time was.
            due_unix=max(one.due_unix, one.state_unix if one.state == "waiting" else 0.0),
        )
        for one in runner().job_runs(*states, queue=queue)
        if one.state != "running" or one.state_unix > since_unix
    ]


def is_queued(job: str) -> bool:
    """Whether a run of the job waits, or has begun and may write its record in a moment."""
    return any(one.job == job for one in queued_jobs(begun_s=_BEGINS_S))


def _argv(command: str | list[str]) -> list[str]:
    return [command] if isinstance(command, str) else command


def found_job(
    opened: OpenWorkspace, workspace: Workspace | str, wanted: str
) -> tuple[Job | None, QueuedJob | None]:
    """The record of a job of the workspace, and the run of it that waits; neither where its run has
    begun and has written no record yet. InvalidInput for a job that nobody knows."""
    wanted = job_id(wanted.strip())
    block = workspace if isinstance(workspace, str) else workspace._block_document_name
    names = {block, opened.spec.name}

    def run_of(runs: Sequence[QueuedJob]) -> QueuedJob | None:
        return next((one for one in runs if one.job == wanted and one.workspace in names), None)

    queued = run_of(queued_jobs())
    # read last: a run that has begun meanwhile has written its record
    record = opened.jobs.of(wanted)
    if record is not None or queued is not None:
        return record, queued
    begins = run_of(queued_jobs(begun_s=_BEGINS_S))
    record = opened.jobs.of(wanted)
    if record is None and begins is None:
        raise InvalidInput(
            f"workspace {opened.spec.name} has no job {wanted} in {opened.store.address}, and none "
            "waits in a queue: `torpor job list` shows all jobs"
        )
    return record, None


def wait_for_record(
    opened: OpenWorkspace,
    workspace: Workspace | str,
    wanted: str,
    nap: Callable[[float], None] = time.sleep,
) -> Job:
    """Wait for the record of a job until its run has written it; InvalidInput where no run will."""
    while True:
        record, _ = found_job(opened, workspace, wanted)
        if record is not None:
            return record
        now(f"job {wanted} waits for its turn, or begins")
        nap(_POLL_S)


def status_of(
    opened: OpenWorkspace, wanted: str, record: Job | None, queued: QueuedJob | None
) -> JobAnswer:
    """Everything about a job, in words."""
    said: dict[str, str] = {}
    if record is not None:
        report = JobReport(record, cost_of(opened, record))
        said = {row["what"]: row["value"] for row in report.rows()}
        if not record.ended:
            on = machines_of(opened, record) or "no machine"
            said |= {"runs on": on, "driven by": driver(record)}
            stop = opened.jobs.stop_asked(record.id)
            said |= {"asked to stop": f"{moment(stop.asked_unix)}: {stop.why}"} if stop else {}
        said["log"] = log_path(opened.spec, record.id)
    elif queued is not None:
        said = {"job": f"{queued.job}: {command_line(queued.command)}", "outcome": "not begun"}
    else:
        said = {"job": wanted.strip(), "outcome": "its run has just begun"}
    if queued is not None:
        since = moment(queued.since_unix)
        said["queue"] = f"run {queued.run} waits in {queued.queue} since {since}"
    return JobAnswer(record.id if record else wanted.strip(), opened.spec.name, said)


@step("read log")
def read_log(opened: OpenWorkspace, job: Job, lines: int) -> JobLog:
    """The newest lines of the job's log."""
    reader = JobLogReader(opened, job)
    text = "".join(reader.read(lines))[-_MOST_CHARS:].rstrip("\n")
    return JobLog(job.id, opened.spec.name, text, reader.source, log_path(opened.spec, job.id))


def failure_of(opened: OpenWorkspace, job: Job) -> JobFailed | None:
    """What a run of the job raises, with the end of its log, unless the command succeeded or the
    job was cancelled."""
    if job.state in NO_FAILURE:
        return None
    failed = f"job {job.id} of workspace {job.workspace} is {job.outcome}"
    again = "`Retry` on the page of the run that began the job runs it again"
    if job.state == "over budget":
        block, line = job.block, shlex.join(job.command)
        failed += f". Cost: {cost_of(opened, job)}"
        again = (
            f"To go on from what is stored, run it again: `torpor job run {block} -- "
            f"{line if len(line) <= _MOST_LINE else '...'}`"
        )
    if job.newest is None and not job.attempts:
        return JobFailed(f"{failed}. Its command was never started. {again}")
    # a person who follows the run has read these lines already
    said = _last_lines(opened, job) if following() is None else ""
    if job.newest is None:
        work = f"No snapshot has its work. {said}"
    else:
        work = (
            f"Its work is in snapshot {job.newest}. {said}`job-status` shows more; all of it is "
            f"{log_path(opened.spec, job.id)} in that snapshot: `restore-path` with "
            "`machine=here` brings it without a rental. "
        )
    return JobFailed(f"{failed}. {work}{again}")


def _last_lines(opened: OpenWorkspace, job: Job) -> str:
    try:
        log = read_log(opened, job, _SHOWN_LINES)
    except TorporError as error:
        return f"Its log could not be read: {error}. "
    if log.source == NOWHERE:
        return "Its log is lost with its machine. "
    shown = "\n".join(line[:MOST_CHARS] for line in log.text.splitlines())
    return f"The last lines of its log, from {log.source}:\n{shown or 'it is empty'}\n"


def workspace_of(job: str) -> str:
    """The Workspace block of the job with this id; InvalidInput where none is found."""
    wanted = job_id(job.strip())
    for queued in queued_jobs(begun_s=_BEGINS_S):
        if queued.job == wanted:
            return queued.workspace
    unread = []
    for block in runner().workspaces():
        try:
            if open_workspace(block).jobs.of(wanted) is not None:
                return block
        except TorporError as error:
            unread.append(f"{block} ({error})")
    looked = f"; not looked at: {', '.join(unread)}" if unread else ""
    raise InvalidInput(f"no workspace has a job {wanted}: `torpor job list` shows all{looked}")
