"""The steps of a restore as tasks."""

from __future__ import annotations

from dataclasses import replace

import msgspec

from tasks.progress import Progress
from tasks.retrying import WHILE_BUSY
from tasks.step import step
from tasks.workspace import OpenWorkspace, StoredWorkspace
from torpor.control.losses import left_behind
from torpor.control.remote.paths import Chosen
from torpor.control.remote.restore import RemoteRestore
from torpor.control.rental.search import fit
from torpor.control.store.snapshots import find_snapshot, read_manifest
from torpor.control.upkeep.differences import entry_at
from torpor.shared.errors import SnapshotDamaged
from torpor.shared.format.manifest import Manifest
from torpor.shared.values import StoredSnapshot, Want, snapshot_id
from torpor.shared.wire.restore import Checked, Finished, RestoredPart, RestorePart, RestorePlan

NEWEST = "newest"


@step("pick snapshot")
def pick_snapshot_to_wake(
    opened: OpenWorkspace, wanted: str
) -> tuple[StoredSnapshot, OpenWorkspace]:
    """The same, and the workspace wanting a machine that this snapshot can be woken on: its disk,
    architecture and CUDA."""
    name = None if wanted in ("", NEWEST) else snapshot_id(wanted)
    found = find_snapshot(opened.store, opened.spec.name, name)
    manifest = read_manifest(opened.store, found, opened.seal)
    want = fitted(opened.spec.want, manifest)
    spec = msgspec.structs.replace(opened.spec, want=want)
    return found, replace(opened, spec=spec, left=left_behind(manifest.environment))


def fitted(want: Want, manifest: Manifest) -> Want:
    """``want`` for a machine that this snapshot can be woken on."""
    return fit(want, manifest.environment, manifest.statistics.get("bytes", 0))


@step("pick snapshot")
def pick_snapshot(opened: StoredWorkspace, wanted: str) -> StoredSnapshot:
    """The newest snapshot or the named one; its manifest is read and checked here, so that a
    wrong key or a damaged manifest costs no machine."""
    name = None if wanted in ("", NEWEST) else snapshot_id(wanted)
    found = find_snapshot(opened.store, opened.spec.name, name)
    read_manifest(opened.store, found, opened.seal)
    return found


@step("choose path")
def choose_path(opened: StoredWorkspace, wanted: StoredSnapshot, path: str) -> Chosen:
    """The entry that ``path`` names in a snapshot; InvalidInput if there is none."""
    return Chosen(*entry_at(read_manifest(opened.store, wanted, opened.seal), path))


@step("begin restore", retries=WHILE_BUSY)
def begin_restore(restore: RemoteRestore, resume: bool) -> RestorePlan:
    """Check the manifest, the targets and the space on the machine."""
    return restore.begin(resume=resume)


@step("restore part", run_name="restore part {plan.part}")
def restore_part(restore: RemoteRestore, plan: RestorePart, progress: Progress) -> RestoredPart:
    """Fetch, check and write one part; verified data on the disk is not fetched again."""
    return restore.restore_part(plan, lambda event: progress.event(plan.part, event))


@step("finish what comes first")
def finish_first(restore: RemoteRestore) -> Checked:
    """Attributes, links and directories of what comes first."""
    return _right(restore, restore.finish_first())


@step("finish restore")
def finish_restore(restore: RemoteRestore) -> Finished:
    """Attributes, links and directories."""
    return restore.finish()


@step("check restore")
def check_restore(restore: RemoteRestore, full: bool) -> Checked:
    """Compare the machine's disk with the snapshot; SnapshotDamaged names what differs."""
    hint = ""
    if restore.first:
        hint = (
            "A program that was started when what comes `first` was there may have written to "
            "them before they were restored: name them in `first` too, or let it write elsewhere. "
        )
    return _right(restore, restore.check(full=full), hint)


def _right(restore: RemoteRestore, checked: Checked, hint: str = "") -> Checked:
    if checked.difference_count:
        raise SnapshotDamaged(
            f"after the restore, {checked.difference_count} names differ from snapshot "
            f"{restore.wanted.snapshot}: {'; '.join(checked.differences[:5])}. {hint}The "
            "snapshot is untouched: wake again on another machine"
        )
    return checked
