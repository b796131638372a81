"""Deleting a snapshot deletes its manifest, and nothing else.

Prune frees the packs that no manifest names. So a deletion can be undone until prune has run, and
is safe beside every reader.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress

from torpor.control.safety import Verified
from torpor.control.store.receipts import newest_verified, withdraw_receipt
from torpor.control.store.seam import ObjectStore
from torpor.control.store.snapshots import MAX_MANIFEST_BYTES, newest_snapshot
from torpor.control.upkeep.pins import pinned, pinned_ids
from torpor.control.upkeep.retention import Judged
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

    It refuses a pinned snapshot. It refuses the newest and the newest verified one unless
    ``even_newest`` names it: a wake restores the newest, and a machine may have been destroyed
    because of the newest verified one. Raises SnapshotKept and SnapshotMissing; both leave the
    snapshot unchanged.
    """
    check_not_kept(store, workspace, [snapshot], even_newest)
    key = manifest_key(workspace, snapshot)
    try:
        blob = store.get(key, max_bytes=MAX_MANIFEST_BYTES)
    except StoreMissing:
        raise SnapshotMissing(
            f"workspace {workspace} has no snapshot {snapshot} in {store.address}: nothing was "
            "deleted; list the snapshots to find its id"
        ) from None
    store.delete([key])
    # A pin made since the first look has found the snapshot there.
    try:
        is_pinned = snapshot in pinned_ids(store, workspace)
    except BaseException:
        store.put(key, blob)  # not known is not unpinned
        raise
    if is_pinned:
        store.put(key, blob)
        _check_not_pinned(store, workspace, snapshot)
    withdraw_receipt(store, workspace, snapshot)


def check_not_kept(
    store: ObjectStore,
    workspace: WorkspaceName,
    snapshots: Sequence[SnapshotId],
    even_newest: SnapshotId | None = None,
) -> None:
    """SnapshotKept if one of them is pinned, or is the newest or the newest verified one and
    ``even_newest`` does not name it.
    """
    for snapshot in snapshots:
        _check_not_pinned(store, workspace, snapshot)
    newest = newest_snapshot(store, workspace)
    if newest in snapshots and newest != even_newest:
        raise SnapshotKept(
            f"snapshot {newest} is the newest of workspace {workspace} in {store.address}, which "
            "a wake restores: it was not deleted; to delete it, name it in `even_newest`"
        )
    sure = newest_verified(store, workspace)
    if sure in snapshots and sure != even_newest:
        raise SnapshotKept(
            f"snapshot {sure} is the newest verified one of workspace {workspace} in "
            f"{store.address}: it was not deleted. Verify a newer one first, or name it in "
            "`even_newest`"
        )


def expire(store: ObjectStore, verified: Verified, verdicts: Sequence[Judged]) -> list[SnapshotId]:
    """Delete what no retention rule keeps, now that ``verified`` is whole in the store.

    Returns what was deleted, newest first. It skips snapshots that were pinned or deleted
    meanwhile. Raises SnapshotMissing and deletes nothing if the verified snapshot itself is gone.
    """
    workspace = verified.workspace
    if store.head(manifest_key(workspace, verified.snapshot)) is None:
        raise SnapshotMissing(
            f"snapshot {verified.snapshot} of workspace {workspace} disappeared from "
            f"{store.address} after it was verified: nothing was deleted; run the backup again"
        )
    deleted = []
    for verdict in verdicts:
        # A proof deletes nothing as new as itself, whatever a clock or a rule says.
        if verdict.kept or verdict.snapshot >= verified.snapshot:
            continue
        with suppress(SnapshotKept, SnapshotMissing):
            delete_snapshot(store, workspace, verdict.snapshot)
            deleted.append(verdict.snapshot)
    return deleted


def _check_not_pinned(store: ObjectStore, workspace: WorkspaceName, snapshot: SnapshotId) -> None:
    if snapshot in pinned_ids(store, workspace):
        raise SnapshotKept(
            f"snapshot {snapshot} of workspace {workspace} in {store.address} is pinned "
            f"({pinned(store, workspace).get(snapshot, 'unpinned meanwhile')}): it was not deleted;"
            " remove its pin first, by `pin` with `remove`"
        )
