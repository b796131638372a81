"""The steps of a restore as tasks."""

from __future__ import annotations

from prefect import task

from tasks.place import Place
from tasks.progress import Progress
from tasks.retrying import BUSY_TRIES, BUSY_WAIT_S, STEP, retry_if_busy
from torpor.control.remote.paths import Chosen
from torpor.control.remote.restore import (
    Checked,
    Finished,
    RemoteRestore,
    RestoredPart,
    RestorePart,
    RestorePlan,
)
from torpor.control.store.snapshots import find_snapshot, read_manifest
from torpor.control.upkeep.differences import entry_at
from torpor.shared.errors import SnapshotDamaged
from torpor.shared.values import StoredSnapshot, snapshot_id

NEWEST = "newest"


@task(name="pick snapshot", **STEP)
def pick_snapshot(place: Place, wanted: str) -> StoredSnapshot:
    """The newest snapshot or the named one; its manifest is read and checked here, so that a
    wrong key or a damaged manifest costs no machine."""
    name = None if wanted in ("", NEWEST) else snapshot_id(wanted)
    found = find_snapshot(place.store, place.spec.name, name)
    read_manifest(place.store, found, place.seal)
    return found


@task(name="choose path", **STEP)
def choose_path(place: Place, wanted: StoredSnapshot, path: str) -> Chosen:
    """The entry that ``path`` names in a snapshot; InvalidInput says what is near it."""
    return Chosen(*entry_at(read_manifest(place.store, wanted, place.seal), path))


@task(
    name="begin restore",
    **(
        STEP
        | {
            "retries": BUSY_TRIES,
            "retry_delay_seconds": BUSY_WAIT_S,
            "retry_condition_fn": retry_if_busy,
        }
    ),
)
def begin_restore(restore: RemoteRestore, resume: bool) -> RestorePlan:
    """Check the manifest, the targets and the space on the machine."""
    return restore.begin(resume=resume)


@task(name="restore part", task_run_name="restore part {plan.part}", **STEP)
def restore_part(restore: RemoteRestore, plan: RestorePart, progress: Progress) -> RestoredPart:
    """Fetch, check and write one part; what is on the disk already is not fetched again."""
    return restore.restore_part(plan, lambda event: progress.event(plan.part, event))


@task(name="finish restore", **STEP)
def finish_restore(restore: RemoteRestore) -> Finished:
    """Attributes, links and directories."""
    return restore.finish()


@task(name="check restore", **STEP)
def check_restore(restore: RemoteRestore, full: bool) -> Checked:
    """Compare the machine's disk with the snapshot; SnapshotDamaged names what differs."""
    checked = restore.check(full=full)
    if checked.difference_count:
        raise SnapshotDamaged(
            f"after the restore, {checked.difference_count} names differ from snapshot "
            f"{restore.wanted.snapshot}: {'; '.join(checked.differences[:5])}. The snapshot is "
            "untouched: wake again on another machine"
        )
    return checked
