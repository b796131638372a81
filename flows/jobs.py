"""List jobs, show one and its log, and cancel one."""

from __future__ import annotations

import time
from typing import Annotated, Literal

from pydantic import Field

from blocks import Workspace
from flows.job import continue_job
from tasks.cancelling import state_of
from tasks.flow import flow
from tasks.job_listing import found_job, queued_jobs, read_jobs, read_log
from tasks.jobs import cost_of, machines_of
from tasks.opening import open_workspace
from tasks.runner import runner
from tasks.workspace import OpenWorkspace
from torpor.control.jobs.listing import (
    JobAnswer,
    JobList,
    JobLog,
    command_line,
    driver,
    moment,
)
from torpor.control.jobs.records import MOST_ENDED, Job, Stop, log_path
from torpor.control.jobs.report import JobReport
from torpor.control.upkeep.reports import MOST_ROWS
from torpor.shared.errors import InvalidInput, TorporError


@flow("list-jobs")
def list_jobs(
    workspaces: list[str] = [],  # noqa: B006 - a form shows the default; it is never changed
    ended: Annotated[int, Field(ge=0, le=MOST_ENDED)] = 20,
) -> JobList:
    """List jobs: those that run, those that wait in the queues, and those that ended last.

    Args:
        workspaces: The Workspace blocks whose jobs are listed. Empty: all of them.
        ended: How many ended jobs of each workspace to list, 0 to 200.
    """
    found: dict[str, Job] = {}
    unread: dict[str, str] = {}
    names = workspaces or runner().workspaces()
    reads = {}
    for name in names:
        try:
            reads[name] = read_jobs.submit(open_workspace(name), ended)
        except TorporError as error:
            unread[name] = str(error)
    for name, read in reads.items():
        try:
            of_one = read.result()
        except TorporError as error:
            unread[name] = str(error)
        else:  # several blocks may be for one workspace
            found |= {one.id: one for one in (*of_one.open, *of_one.ended)}
    queued = [one for one in queued_jobs() if not workspaces or one.workspace in names]
    jobs = sorted(found.values(), key=lambda one: (one.ended_unix or one.created_unix, one.id))
    listed = JobList(
        [one for one in jobs if not one.ended],
        queued,
        [one for one in jobs if one.ended],
        unread,
    )
    runner().table(key="list-jobs", rows=listed.rows(MOST_ROWS), description=listed.message())
    return listed


@flow("job-status")
def job_status(workspace: Workspace | str, job: str) -> JobAnswer:
    """Show everything about one job: attempts, machines, cost, saves, lost work, and why it stands
    as it does.

    Args:
        workspace: The Workspace block that the job works on, or its name.
        job: The id of the job, as list-jobs shows it.
    """
    opened = open_workspace(workspace)
    record, queued = found_job(opened, workspace, job)
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
    if queued is not None:
        said["queue"] = (
            f"run {queued.run} waits in {queued.queue} since {moment(queued.since_unix)}"
        )
    answer = JobAnswer(record.id if record else job.strip(), opened.spec.name, said)
    return _shown(answer, "job-status", f"Job {answer.job} of workspace {answer.workspace}")


@flow("job-log")
def job_log(
    workspace: Workspace | str, job: str, lines: Annotated[int, Field(ge=1, le=1000)] = 200
) -> JobLog:
    """Show the newest lines of a job's log: from its machine, or from its newest snapshot.

    Args:
        workspace: The Workspace block that the job works on, or its name.
        job: The id of the job, as list-jobs shows it.
        lines: How many lines, 1 to 1000.
    """
    opened = open_workspace(workspace)
    record, queued = found_job(opened, workspace, job)
    if record is None:
        raise InvalidInput(
            f"job {job.strip()} has no log yet: its run waits in queue {queued and queued.queue}"
        )
    log = read_log(opened, record, lines)
    runner().page(
        key=f"job-log-{record.id}",
        markdown=log.markdown(),
        description=f"The log of job {record.id} of workspace {record.workspace}",
    )
    return log


@flow("cancel-job")
def cancel_job(
    workspace: Workspace | str,
    job: str,
    machine: Literal["as submitted", "hibernate", "keep"] = "as submitted",
) -> JobAnswer:
    """Cancel a job: end its command, store the workspace, and destroy the machine.

    A job that waits in a queue is taken out of it.

    Args:
        workspace: The Workspace block that the job works on, or its name.
        job: The id of the job, as list-jobs shows it.
        machine: What becomes of its machine. "as submitted" is what the job's on_cancel says.
            "keep" stores nothing; the machine costs money until you hibernate it.
    """
    opened = open_workspace(workspace)
    record, queued = found_job(opened, workspace, job)
    if queued is not None and (record is None or record.ended):  # it waits for a retry
        runner().cancel(queued.run)
        answer = JobAnswer(
            queued.job, opened.spec.name, {"job": queued.job, "now": "taken out of its queue"}
        )
        return _shown(answer, "cancel-job", f"Job {queued.job} never began")
    if record is None or record.ended:
        raise _over(opened, job, record)
    then = record.on_cancel if machine == "as submitted" else machine
    opened.jobs.ask_stop(record.id, Stop("cancelled", then, "a person cancelled it", time.time()))
    now = opened.jobs.of(record.id)
    if now is None or now.ended:  # in the meantime: nobody will read the request again
        opened.jobs.withdraw_stop(record.id)
        if now is None or now.state != "cancelled":
            raise _over(opened, job, now)
        does = "it was stopped"
    elif now.driven and state_of(now.driver) not in ("cancelled", "ended"):
        does = f"run {now.driver} stops it"
    elif queued is not None:
        does = f"run {queued.run} in queue {queued.queue} stops it"
    else:
        does = f"{continue_job(now, 'stop') or 'nothing'} stops it"
    answer = JobAnswer(record.id, opened.spec.name, {"job": record.id, "now": does})
    return _shown(answer, "cancel-job", f"Job {record.id} is being cancelled")


def _over(opened: OpenWorkspace, job: str, record: Job | None) -> InvalidInput:
    state = record.state if record else "unknown"
    return InvalidInput(f"job {job.strip()} of workspace {opened.spec.name} is {state} already")


def _shown(answer: JobAnswer, what: str, title: str) -> JobAnswer:
    runner().table(key=f"{what}-{answer.job}", rows=answer.rows(), description=title)
    return answer
