"""Job status: everything about one job."""

from __future__ import annotations

from blocks import Workspace
from tasks.flow import flow
from tasks.job_listing import found_job, status_of
from tasks.opening import open_workspace
from torpor.control.jobs.listing import JobAnswer


@flow("job-status")
def job_status(workspace: Workspace | str, job: str) -> JobAnswer:
    """Show everything about one job: attempts, machines, cost, saves, lost work, and why it stands
    as it does.

    Args:
        workspace: The Workspace block that the job works on, or its name.
        job: The id of the job, as `jobs` shows it.
    """
    opened = open_workspace(workspace)
    record, queued = found_job(opened, workspace, job)
    return status_of(opened, job, record, queued)
