"""Job: a command that runs to its end, whatever becomes of its machines."""

from __future__ import annotations

import time
from typing import Annotated, Literal

from pydantic import Field

from blocks import Workspace
from flows.procedures.job.driver import drive
from tasks.flow import flow
from tasks.jobs import cost_of
from tasks.opening import open_workspace, probe_store
from tasks.runner import runner
from tasks.workspace import OpenWorkspace
from torpor.control.jobs.records import Job, job_id, log_path, new_job_id
from torpor.control.jobs.report import JobReport
from torpor.shared.errors import InvalidInput, JobFailed


@flow("job")
def job(
    workspace: Workspace | str,
    command: list[str] = [],  # noqa: B006 - a form shows the default; it is never changed
    save: list[str] = [],  # noqa: B006
    save_minutes: Annotated[float, Field(gt=0, le=24 * 60)] = 30.0,
    spot: Literal["never", "allowed", "only"] = "never",
    retries: Annotated[int, Field(ge=0, le=100)] = 0,
    on_cancel: Literal["hibernate", "keep"] = "hibernate",
    job: str = "",
) -> JobReport:
    """Run a command on the workspace's machine until it ends, then hibernate.

    The job wakes the workspace on the cheapest machine that fits, or uses the running one. It saves
    at intervals. When its machine is lost, it continues from the newest save on another one. Fails
    with JobFailed if the command fails; its work is stored all the same.

    Args:
        workspace: The Workspace block to work on, or its name.
        command: The program and each argument as an item of its own. No shell runs it. It starts in
            the first directory of the workspace.
        save: A command that makes the program write its state, run before each save. May stay
            empty.
        save_minutes: Minutes between two saves. The first ones on a spot machine come sooner.
        spot: Whether to rent spot machines, which cost less and may be taken away at any time. This
            replaces the Workspace block's choice.
        retries: How often a command that fails is started again.
        on_cancel: What becomes of the machine when the job is cancelled.
        job: The id of a job to continue. Empty: begin a new one.
    """
    opened = open_workspace(workspace)
    probe_store(opened)
    record = _continued(opened, job) if job else None
    if record is None:
        record = opened.jobs.begun_by(runner().run)  # Prefect may start a run again
    if record is None:
        _check_command(command)
        name = workspace if isinstance(workspace, str) else workspace._block_document_name
        record = Job(
            id=new_job_id(runner().run),
            workspace=opened.spec.name,
            block=name or str(opened.spec.name),
            command=command,
            save=save,
            save_minutes=save_minutes,
            spot=spot,
            retries=retries,
            on_cancel=on_cancel,
            created_unix=time.time(),
        )
    if not record.ended:
        record = drive(opened, record)
    report = JobReport(record, cost_of(opened, record))
    runner().table(
        key=f"job-{record.id}",
        rows=report.rows(),
        description=f"Job {record.id} of workspace {record.workspace}: {record.state}",
    )
    if record.state not in ("succeeded", "cancelled"):
        raise JobFailed(
            f"job {record.id} of workspace {record.workspace} is {record.state}: {record.why}. Its "
            f"work is in snapshot {record.newest}, its log in {log_path(opened.spec, record.id)}"
        )
    return report


def _continued(opened: OpenWorkspace, wanted: str) -> Job:
    found = opened.jobs.of(job_id(wanted.strip()))
    if found is None:
        raise InvalidInput(
            f"workspace {opened.spec.name} has no job {wanted} in {opened.store.address}: list its "
            "jobs, or leave `job` empty to begin a new one"
        )
    return found


def _check_command(command: list[str]) -> None:
    if not command or not command[0]:
        raise InvalidInput(
            "the job has no command: give a program and its arguments, each as an item of its own"
        )
