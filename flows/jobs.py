"""Jobs: list those that run, that wait, and that ended last."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from tasks.flow import flow
from tasks.job_listing import queued_jobs, read_all_jobs
from tasks.runner import runner
from torpor.control.jobs.listing import JobList
from torpor.control.jobs.records import MOST_ENDED


@flow("jobs")
def jobs(
    workspaces: list[str] = [],  # noqa: B006 - a form shows the default; it is never changed
    ended: Annotated[int, Field(ge=0, le=MOST_ENDED)] = 20,
) -> JobList:
    """List jobs: those that run, those that wait in the queues, and those that ended last.

    Args:
        workspaces: The Workspace blocks whose jobs are listed. Empty: all of them.
        ended: How many ended jobs of each workspace to list, 0 to 200.

    Returns:
        The jobs in `open`, `queued` and `ended`. `unread` names workspaces whose jobs could not be
        read, with the reason: this flow raises no error for them.

    Example:
        All jobs of this installation:
        ```python
        from flows import jobs

        print(jobs().rows())
        ```
    """
    names = workspaces or runner().workspaces()
    found, unread, usd = read_all_jobs(names, ended)
    queued = [run for run in queued_jobs() if not workspaces or run.workspace in names]
    return JobList(
        [job for job in found if not job.ended],
        queued,
        [job for job in found if job.ended],
        unread,
        usd,
    )
