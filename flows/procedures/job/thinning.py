"""Deletes saves of a job that a newer verified save makes superfluous."""

from __future__ import annotations

from tasks.job_saves import delete_old_saves, made_by_machine, verify_last
from tasks.runner import runner
from tasks.workspace import StoredWorkspace
from torpor.control.jobs.driven_job import Driven
from torpor.control.jobs.records import Job
from torpor.control.safety import Verified
from torpor.shared.errors import TorporError
from torpor.shared.values import SnapshotId


def thin_saves(opened: StoredWorkspace, driven: Driven, verified: Verified | None) -> None:
    """Delete the saves of the job that are older than the ``verified`` one, except the newest
    ``keep_saves``. Without ``verified``, the snapshot that holds the end of the job's command takes
    its place. A save that cannot be deleted is left, and does not fail the job."""
    job = driven.job
    newest = job.final if verified is None else verified.snapshot
    if newest is None or not any(one < newest for one in job.kept_saves):
        return
    driven.change()  # raises HandedOver before saves of a successor are deleted
    try:
        verified = verified or verify_last(opened, newest)
        left = delete_old_saves(opened, job, verified)
    except TorporError as error:
        runner().log.warning("old saves of job %s were not deleted: %s", job.id, error)
    else:
        driven.change(kept_saves=left)


def is_of_machine(opened: StoredWorkspace, job: Job, snapshot: SnapshotId) -> bool:
    """Whether a machine of the job has made the snapshot by itself; False where that is not
    known."""
    try:
        return made_by_machine(opened, snapshot, job.attempts[0].began_unix)
    except TorporError as error:
        runner().log.warning("who made snapshot %s is not known: %s", snapshot, error)
        return False
