"""Pins: no flow deletes a pinned snapshot until it is unpinned.

A pin is an object named like the snapshot, beside the snapshots. The name alone pins: whoever can
write in the bucket can keep a snapshot. The object's content is the reason, signed.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import suppress
from typing import Final

import msgspec

from torpor.control.store.seam import ObjectStore
from torpor.control.store.signatures import ENVELOPE_BYTES, Forged, Unsigned
from torpor.shared.errors import InvalidInput, SnapshotMissing, StoreCorrupt, StoreMissing
from torpor.shared.format.names import manifest_key, snapshot_of
from torpor.shared.values import ObjectKey, SnapshotId, WorkspaceName, learned

MOST_REASON: Final = 500
"""The most characters of a reason."""
_MOST_BYTES: Final = 16 * 1024


class Pin(msgspec.Struct, frozen=True):
    """Why a snapshot is kept, and since when."""

    reason: str
    pinned_unix: float


def pin(store: ObjectStore, workspace: WorkspaceName, snapshot: SnapshotId, reason: str) -> Pin:
    """Pin a snapshot; a second pin replaces the reason.

    Raises InvalidInput without a reason, and SnapshotMissing if there is no such snapshot.
    """
    why = " ".join(reason.split())
    if not why or len(why) > MOST_REASON:
        raise InvalidInput(
            f"a pin needs a reason of 1 to {MOST_REASON} characters, this one has {len(why)}: say "
            f"why to keep snapshot {snapshot}"
        )
    made = Pin(why, time.time())
    # Write the pin first, then look for the snapshot. A deletion looks for pins once more after
    # it has deleted, so one of the two always sees the other (deletion.py).
    key = _key(workspace, snapshot)
    store.put(key, store.signer.sign(key, msgspec.json.encode(made)))
    if store.head(manifest_key(workspace, snapshot)) is None:
        unpin(store, workspace, snapshot)
        raise SnapshotMissing(
            f"workspace {workspace} has no snapshot {snapshot} in {store.address}: nothing was "
            "pinned; list the snapshots to find its id"
        )
    return made


def unpin(store: ObjectStore, workspace: WorkspaceName, snapshot: SnapshotId) -> None:
    """Remove a pin. Does nothing if the snapshot is not pinned."""
    store.delete([_key(workspace, snapshot)])


def pinned(store: ObjectStore, workspace: WorkspaceName) -> dict[SnapshotId, str]:
    """The pinned snapshots and why each is kept."""
    return {
        snapshot: _reason(store, _key(workspace, snapshot))
        for snapshot in pinned_ids(store, workspace)
    }


def pinned_ids(store: ObjectStore, workspace: WorkspaceName) -> Iterator[SnapshotId]:
    """The pinned snapshots by a listing alone."""
    yield from pin_times(store, workspace)


def is_pinned(store: ObjectStore, workspace: WorkspaceName, snapshot: SnapshotId) -> bool:
    """Whether one snapshot is pinned, by its own key and by no listing."""
    return store.head(_key(workspace, snapshot)) is not None


def pin_times(store: ObjectStore, workspace: WorkspaceName) -> dict[SnapshotId, float]:
    """When each snapshot was pinned last, by the store's clock."""
    found = {}
    for pin in store.list(_prefix(workspace)):
        with suppress(InvalidInput):  # another program's object in this prefix
            found[snapshot_of(pin.key)] = pin.modified_unix
    return found


def is_own(store: ObjectStore, workspace: WorkspaceName, snapshot: SnapshotId) -> bool:
    """Whether a control side of this store has pinned the snapshot."""
    return _read(store, _key(workspace, snapshot)) is not None


def _reason(store: ObjectStore, key: ObjectKey) -> str:
    found = _read(store, key)
    if found is None:  # it is pinned nevertheless
        return "torpor did not write its reason, or cannot read it"
    return found.reason


def _read(store: ObjectStore, key: ObjectKey) -> Pin | None:
    try:
        blob = store.get(key, max_bytes=_MOST_BYTES + ENVELOPE_BYTES)
        return msgspec.json.decode(store.signer.check(key, blob), type=learned(Pin))
    except (StoreMissing, StoreCorrupt, Unsigned, Forged, msgspec.MsgspecError):
        return None


def _prefix(workspace: WorkspaceName) -> str:
    return f"workspaces/{workspace}/pins/"


def _key(workspace: WorkspaceName, snapshot: SnapshotId) -> ObjectKey:
    return ObjectKey(_prefix(workspace) + snapshot)
