"""Job log: the newest lines of the log of one job."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from blocks import Workspace
from tasks.flow import flow
from tasks.job_listing import found_job, read_log
from tasks.opening import open_workspace
from tasks.runner import runner
from torpor.control.jobs.listing import JobLog
from torpor.shared.errors import InvalidInput


@flow("job-log")
def job_log(
    workspace: Workspace | str, job: str, lines: Annotated[int, Field(ge=1, le=1000)] = 200
) -> JobLog:
    """Show the newest lines of a job's log: from its machine, or from its newest snapshot.

    Args:
        workspace: The Workspace block that the job works on, or its name.
        job: The id of the job, as `jobs` shows it.
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
