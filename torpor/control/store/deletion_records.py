"""Deletion records: which snapshots were deleted on purpose, so that a manifest which is gone
without one is known to be lost.

A deletion writes its record first (upkeep/deletion.py). A record says nothing of a snapshot whose
manifest is there: a deletion that was killed has not happened. Prune removes the records that
nobody needs any more (upkeep/presence.py).
"""

from __future__ import annotations

import time
from typing import Final, Literal

import msgspec

from torpor.control.store.object_store import ObjectStore
from torpor.control.store.records import Records
from torpor.shared.errors import InvalidInput
from torpor.shared.format.names import deletions_prefix, snapshot_of
from torpor.shared.values import ObjectKey, SnapshotId, WorkspaceName

_MOST_BYTES: Final = 16 * 1024
_MOST_WHY: Final = 500


class Deletion(msgspec.Struct, frozen=True, kw_only=True):
    """The deletion of one snapshot. ``why``: who asked for it, in words."""

    version: Literal[1] = 1
    snapshot: SnapshotId
    deleted_unix: float  # when the deletion began, by the store's clock
    why: str


class Deletions:
    """The deletion records of one workspace in one store."""

    def __init__(self, store: ObjectStore, workspace: WorkspaceName) -> None:
        self._store = store
        self._prefix = deletions_prefix(workspace)
        self._records = Records(
            store, Deletion, _MOST_BYTES, "look whether the snapshot of its name is there"
        )

    def write(self, snapshot: SnapshotId, why: str) -> None:
        """Record that the snapshot is about to be deleted; replaces an earlier record of it."""
        deletion = Deletion(snapshot=snapshot, deleted_unix=time.time(), why=why[:_MOST_WHY])
        self._records.put(self._key(snapshot), deletion)

    def of(self, snapshot: SnapshotId) -> Deletion | None:
        """The record of the snapshot's deletion; None if there is none. StoreError if it is
        damaged, or of another snapshot."""
        found = self._records.read(self._key(snapshot))
        if found is None:
            return None
        if found[0].snapshot != snapshot:
            raise self._records.damaged(self._key(snapshot), f"it is of {found[0].snapshot}")
        return found[0]

    def times(self) -> dict[SnapshotId, float]:
        """When each record was written, by the store's clock. Needs only a listing."""
        found = {}
        for stored in self._store.list(self._prefix):
            try:
                found[snapshot_of(stored.key)] = stored.modified_unix
            except InvalidInput:
                continue  # another program's object in this prefix
        return found

    def remove(self, *snapshots: SnapshotId) -> None:
        """Remove the records of these snapshots. Idempotent."""
        self._store.delete([self._key(snapshot) for snapshot in snapshots])

    def _key(self, snapshot: SnapshotId) -> ObjectKey:
        return ObjectKey(self._prefix + snapshot)
