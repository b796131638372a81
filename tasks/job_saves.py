"""The steps that delete saves of a job that are not needed any more."""

from __future__ import annotations

from tasks.retention import tell_of_deletion
from tasks.step import step
from tasks.workspace import StoredWorkspace
from torpor.control.jobs.records import Job
from torpor.control.jobs.standby import is_own_save
from torpor.control.safety import Verified, verify_snapshot
from torpor.control.store.manifests import find_snapshot, open_manifest
from torpor.control.upkeep.job_saves import delete_superfluous
from torpor.shared.values import PROGRAMS, SnapshotId
from torpor.shared.wire.snapshot import IMAGE_FILES


@step("delete old saves")
def delete_old_saves(opened: StoredWorkspace, job: Job, verified: Verified) -> list[SnapshotId]:
    """Delete the job's saves that are older than the verified one, except the newest
    ``keep_saves``; returns the saves that are left."""
    deleted, left = delete_superfluous(
        opened.store, job.kept_saves, verified, job.keep_saves, opened.seal
    )
    for snapshot in deleted:
        tell_of_deletion(opened, snapshot, f"a newer save of job {job.id} is verified")
    return left


@step("verify the last save")
def verify_last(opened: StoredWorkspace, snapshot: SnapshotId) -> Verified:
    """The proof that a snapshot is whole, where the run that made it is gone."""
    found = find_snapshot(opened.store, opened.spec.name, snapshot)
    return verify_snapshot(opened.store, found, opened.seal, paths=opened.spec.restorable)


@step("see who made a save")
def made_by_machine(opened: StoredWorkspace, snapshot: SnapshotId, since_unix: float) -> bool:
    """Whether a machine made the snapshot by itself, for the job that began to run at
    ``since_unix``."""
    return is_own_save(opened.store, opened.spec.name, snapshot, opened.seal, since_unix)


@step("look for what is frozen")
def holds_frozen(opened: StoredWorkspace, snapshot: SnapshotId, job: str) -> bool:
    """Whether the snapshot holds the frozen command of that job."""
    manifest, _ = open_manifest(opened.store, opened.spec.name, snapshot, opened.seal)
    wanted = {f"{PROGRAMS}/{job}/{name}".encode() for name in IMAGE_FILES}
    return wanted <= {entry.path for entry in manifest.entries if entry.root == 0}
