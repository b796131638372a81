"""Deleting a snapshot: its manifest goes, and nothing else.

Packs that no manifest names any more are prune's. So a deletion can be undone as long as prune has
not run, and is safe beside everything that reads.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress

from torpor.control.safety import Verified
from torpor.control.store.seam import ObjectStore
from torpor.control.store.snapshots import MAX_MANIFEST_BYTES, newest_snapshot
from torpor.control.upkeep.pins import pinned, pinned_ids
from torpor.control.upkeep.retention import Verdict
from torpor.shared.errors import SnapshotKept, SnapshotMissing, StoreMissing
from torpor.shared.format.names import manifest_key
from torpor.shared.values import SnapshotId, WorkspaceName


def delete_snapshot(
    store: ObjectStore,
    workspace: WorkspaceName,
    snapshot: SnapshotId,
    *,
    even_newest: SnapshotId | None = None,
) -> None:
    """Delete one snapshot.

    A pinned one is refused. The newest is refused unless ``even_newest`` names it: a wake takes
    the newest, and a machine may have been destroyed because it is there. Raises SnapshotKept
    and SnapshotMissing; after either the snapshot is as it was.
    """
    refuse_kept(store, workspace, [snapshot], even_newest)
    key = manifest_key(workspace, snapshot)
    try:
        blob = store.get(key, max_bytes=MAX_MANIFEST_BYTES)
    except StoreMissing:
        raise SnapshotMissing(
            f"workspace {workspace} has no snapshot {snapshot} in {store.address}: nothing was "
            "deleted; list the snapshots to see which there are"
        ) from None
    store.delete([key])
    # A pin that was made since the first look found the snapshot there and said so.
    try:
        is_pinned = snapshot in pinned_ids(store, workspace)
    except BaseException:
        store.put(key, blob)  # not known is not unpinned
        raise
    if is_pinned:
        store.put(key, blob)
        _refuse_pinned(store, workspace, snapshot)


def refuse_kept(
    store: ObjectStore,
    workspace: WorkspaceName,
    snapshots: Sequence[SnapshotId],
    even_newest: SnapshotId | None = None,
) -> None:
    """SnapshotKept when one of them is pinned, or is the newest and not named as that."""
    for snapshot in snapshots:
        _refuse_pinned(store, workspace, snapshot)
    newest = newest_snapshot(store, workspace)
    if newest in snapshots and newest != even_newest:
        raise SnapshotKept(
            f"snapshot {newest} is the newest of workspace {workspace} in {store.address}, which "
            "a wake would take: it was not deleted; name it as `even_newest` if it has to go"
        )


def expire(store: ObjectStore, verified: Verified, verdicts: Sequence[Verdict]) -> list[SnapshotId]:
    """Delete what a retention lets go, now that ``verified`` is in the store, whole.

    Returns what was deleted, newest first. What somebody pinned or deleted meanwhile is left as
    it is. Raises SnapshotMissing when the verified snapshot itself is gone: then nothing goes.
    """
    workspace = verified.workspace
    if store.head(manifest_key(workspace, verified.snapshot)) is None:
        raise SnapshotMissing(
            f"snapshot {verified.snapshot} of workspace {workspace} is gone from {store.address}, "
            "though it was verified a moment ago: nothing was deleted; back up again"
        )
    deleted = []
    for verdict in verdicts:
        # Nothing as new as the proof goes by it, whatever a clock or a rule says.
        if verdict.kept or verdict.snapshot >= verified.snapshot:
            continue
        with suppress(SnapshotKept, SnapshotMissing):
            delete_snapshot(store, workspace, verdict.snapshot)
            deleted.append(verdict.snapshot)
    return deleted


def _refuse_pinned(store: ObjectStore, workspace: WorkspaceName, snapshot: SnapshotId) -> None:
    if snapshot in pinned_ids(store, workspace):
        raise SnapshotKept(
            f"snapshot {snapshot} of workspace {workspace} in {store.address} is pinned "
            f"({pinned(store, workspace).get(snapshot, 'unpinned meanwhile')}): it was not deleted;"
            " unpin it first"
        )
