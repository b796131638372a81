"""Cancel a job."""

from __future__ import annotations

import time
from typing import Literal

from blocks import Workspace
from flows.job import continue_job
from tasks.cancellation import state_of
from tasks.flow import flow
from tasks.job_listing import found_job
from tasks.runner import runner
from tasks.runs import GONE
from tasks.workspace import OpenWorkspace
from tasks.workspace_blocks import open_workspace
from torpor.control.jobs.listing import JobAnswer
from torpor.control.jobs.records import Job, Stop
from torpor.shared.errors import InvalidInput


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
        job: The id of the job, as `jobs` shows it.
        machine: What becomes of its machine. "as submitted" is what the job's on_cancel says.
            "keep" stores nothing; the machine costs money until you hibernate it.

    Returns:
        The job's id, and in `answer` which run stops it, or that it was taken out of its queue.

    Raises:
        InvalidInput: There is no such job, or it has ended already.

    Example:
        Cancel a job and hibernate its machine:
        ```python
        from flows import cancel_job

        cancel_job("mywork", "3f2a9c81d04e", machine="hibernate")
        ```
    """
    opened = open_workspace(workspace)
    record, queued = found_job(opened, workspace, job)
    if queued is not None and (record is None or record.ended):  # the job waits for a retry
        runner().cancel(queued.run)
        return JobAnswer(
            queued.job, opened.spec.name, {"job": queued.job, "now": "taken out of its queue"}
        )
    if record is None:
        raise InvalidInput(
            f"job {job.strip()} of workspace {opened.spec.name} has just begun, and has written no "
            "record yet: cancel it again in a minute"
        )
    if record.ended:
        raise _over(opened, record)
    then = record.on_cancel if machine == "as submitted" else machine
    opened.jobs.ask_stop(record.id, Stop("cancelled", then, "a person cancelled it", time.time()))
    now = opened.jobs.of(record.id)
    if now is None or now.ended:  # the job has ended meanwhile: nobody will read the request again
        opened.jobs.withdraw_stop(record.id)
        if now is None or now.state != "cancelled":
            raise _over(opened, now or record)
        does = "it was stopped"
    elif now.driven and state_of(now.driver) not in GONE:
        does = f"run {now.driver} stops it"
    elif queued is not None:
        does = f"run {queued.run} in queue {queued.queue} stops it"
    else:
        does = f"{continue_job(now, 'stop') or 'nothing'} stops it"
    return JobAnswer(record.id, opened.spec.name, {"job": record.id, "now": does})


def _over(opened: OpenWorkspace, record: Job) -> InvalidInput:
    words = f"job {record.id} of workspace {opened.spec.name} is {record.state} already"
    return InvalidInput(words)
