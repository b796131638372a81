"""Deleting a snapshot deletes its receipt and its manifest, and nothing else.

Prune frees the packs that no manifest names. So a deletion can be undone until prune has run, and
is safe beside every reader. The deletion record comes first and the manifest goes last: a deletion
that is killed either has happened and is on record, or has left a snapshot that any deletion takes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torpor.control.store.deletion_records import Deletions
from torpor.control.store.manifests import MAX_MANIFEST_BYTES, snapshot_ids
from torpor.control.store.object_store import ObjectStore
from torpor.control.store.receipts import (
    newest_verified,
    put_back_receipt,
    receipt_bytes,
    withdraw_receipt,
)
from torpor.control.upkeep.pins import is_pinned, let_go, pinned
from torpor.control.upkeep.presence import NamedBy, all_named, missing_snapshots
from torpor.shared.errors import SnapshotKept, SnapshotMissing, StoreCorrupt, StoreMissing
from torpor.shared.format.names import manifest_key
from torpor.shared.values import SnapshotId, WorkspaceName


def delete_snapshot(
    store: ObjectStore,
    workspace: WorkspaceName,
    snapshot: SnapshotId,
    *,
    even_newest: SnapshotId | None = None,
    why: str = "it was named to be deleted",
    named: bool = False,
) -> None:
    """Delete one snapshot. ``why`` is kept in its deletion record. ``named``: its user has named
    it, which ends a pin that torpor made.

    It refuses a pinned snapshot. It refuses the newest and the newest verified one unless
    ``even_newest`` names it: a wake restores the newest, and a machine may have been destroyed
    because of the newest verified one. Raises SnapshotKept and SnapshotMissing, and StoreCorrupt
    where the store's listing lacks the snapshot; all leave it unchanged.
    """
    check_not_kept(store, workspace, [snapshot], even_newest, named=named)
    key = manifest_key(workspace, snapshot)
    try:
        manifest = store.get(key, max_bytes=MAX_MANIFEST_BYTES)
    except StoreMissing:
        raise SnapshotMissing(
            f"workspace {workspace} has no snapshot {snapshot} in {store.address}: nothing was "
            "deleted; list the snapshots to find its id"
        ) from None
    receipt = receipt_bytes(store, workspace, snapshot)
    deletions = Deletions(store, workspace)
    deletions.write(snapshot, why)
    withdraw_receipt(store, workspace, snapshot)
    store.delete([key])

    def put_back() -> None:
        store.put(key, manifest)
        put_back_receipt(store, workspace, snapshot, receipt)
        deletions.remove(snapshot)

    # A pin that was made since the first look has found the snapshot still there.
    try:
        kept = is_pinned(store, workspace, snapshot, by_user=named)
    except BaseException:
        put_back()  # it is unknown whether the snapshot is pinned, so it is put back
        raise
    if kept:
        put_back()
        _check_not_pinned(store, workspace, snapshot, by_user=named)
    if named:
        let_go(store, workspace, snapshot)


def record_missing(
    store: ObjectStore,
    workspace: WorkspaceName,
    snapshot: SnapshotId,
    by_records: Mapping[SnapshotId, NamedBy],
) -> None:
    """Give up a snapshot whose manifest is gone although something names it: record its deletion,
    so that prune goes on. SnapshotKept if it is pinned, SnapshotMissing if nothing names it.
    ``by_records``: as in ``all_named``."""
    _check_not_pinned(store, workspace, snapshot, by_user=True)
    named = all_named(store, workspace, by_records)
    if snapshot not in missing_snapshots(store, workspace, named, snapshot_ids(store, workspace)):
        raise SnapshotMissing(
            f"workspace {workspace} has no snapshot {snapshot} in {store.address}: nothing was "
            "deleted; list the snapshots to find its id"
        )
    Deletions(store, workspace).write(snapshot, "its manifest was lost, and its user gave it up")
    let_go(store, workspace, snapshot)
    withdraw_receipt(store, workspace, snapshot)


def check_not_kept(
    store: ObjectStore,
    workspace: WorkspaceName,
    snapshots: Sequence[SnapshotId],
    even_newest: SnapshotId | None = None,
    *,
    named: bool = False,
) -> None:
    """SnapshotKept if one of them is pinned, or is the newest or the newest verified one and
    ``even_newest`` does not name it. StoreCorrupt if the listing that says which is the newest
    lacks one of them. Where the user has ``named`` them, pins that torpor made do not count.
    """
    for snapshot in snapshots:
        _check_not_pinned(store, workspace, snapshot, by_user=named)
    there = snapshot_ids(store, workspace)
    for snapshot in snapshots:
        if snapshot not in there and store.head(manifest_key(workspace, snapshot)) is not None:
            raise StoreCorrupt(
                f"{store.address} has snapshot {snapshot} of workspace {workspace}, but its "
                "listing lacks it, so which snapshot is the newest is not known: nothing was "
                "deleted. Try again; if the listing stays incomplete, have the store repaired"
            )
    newest = max(there, default=None)
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


def _check_not_pinned(
    store: ObjectStore, workspace: WorkspaceName, snapshot: SnapshotId, *, by_user: bool = False
) -> None:
    if is_pinned(store, workspace, snapshot, by_user=by_user):
        raise SnapshotKept(
            f"snapshot {snapshot} of workspace {workspace} in {store.address} is pinned "
            f"({pinned(store, workspace).get(snapshot, 'unpinned meanwhile')}): it was not deleted;"
            " remove its pin first, by `pin` with `remove`"
        )
