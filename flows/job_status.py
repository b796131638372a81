"""Job status: everything about one job, and the newest lines of its log."""

from __future__ import annotations

from typing import Annotated

import msgspec
from pydantic import Field

from blocks import Workspace
from tasks.flow import flow
from tasks.job_listing import found_job, read_log, status_of
from tasks.run_table import shown
from tasks.runner import runner
from tasks.workspace_blocks import open_workspace
from torpor.control.jobs.listing import JobAnswer, JobLog
from torpor.shared.errors import TorporError


@flow("job-status")
def job_status(
    workspace: Workspace | str, job: str, lines: Annotated[int, Field(ge=0, le=1000)] = 20
) -> JobAnswer:
    """Show everything about one job: attempts, machines, cost, saves, lost work, why it stands as
    it does, and the newest lines of its log, from its machine, or from its newest snapshot.

    Args:
        workspace: The Workspace block that the job works on, or its name.
        job: The id of the job, as `jobs` shows it.
        lines: How many lines of the log, 0 to 1000.

    Returns:
        In `answer`, the job's facts, which `rows()` has as a table; in `log`, its newest lines.

    Raises:
        InvalidInput: There is no such job.
        MachineError: The log is on the machine and could not be read there.

    Example:
        The facts and the last 50 lines:
        ```python
        from flows import job_status

        print(job_status("mywork", "3f2a9c81d04e", lines=50).rows())
        ```
    """
    opened = open_workspace(workspace)
    record, queued = found_job(opened, workspace, job)
    status = status_of(opened, job, record, queued)
    if not lines:
        return status
    if record is None:
        log = JobLog(status.job, status.workspace, "", "nowhere: the job has not begun", "")
        return msgspec.structs.replace(status, log=log)
    try:
        log = read_log(opened, record, lines)
    except TorporError as error:
        raise shown(status, error) from None
    runner().page(
        key=f"job-log-{record.id}",
        markdown=log.markdown(),
        description=f"The log of job {record.id} of workspace {record.workspace}",
    )
    return msgspec.structs.replace(status, log=log)
