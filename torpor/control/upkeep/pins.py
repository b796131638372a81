"""Pins: no flow deletes a pinned snapshot until it is unpinned.

A pin is an object named like the snapshot, beside the snapshots. The name alone pins: whoever can
write in the bucket can keep a snapshot. The object's content is the reason, signed. torpor pins a
snapshot that alone holds what a later one missed (superseded.py). Such a pin is an object of its
own, a *hold*: a user's pin of the same snapshot comes and goes beside it.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import suppress
from typing import Final

import msgspec

from torpor.control.store.object_store import ObjectStore
from torpor.control.store.signatures import ENVELOPE_BYTES, Forged, Unsigned
from torpor.shared.errors import (
    InvalidInput,
    SnapshotKept,
    SnapshotMissing,
    StoreCorrupt,
    StoreMissing,
)
from torpor.shared.format.names import manifest_key, snapshot_of
from torpor.shared.values import ObjectKey, SnapshotId, WorkspaceName, learned

MOST_REASON: Final = 500
"""Most characters of a pin's reason."""
_MOST_BYTES: Final = 16 * 1024
_UNREAD: Final = "torpor did not write its reason, or cannot read it"


class Pin(msgspec.Struct, frozen=True):
    """Why a snapshot is kept, and since when. ``missed_in``: for a hold, the later snapshot that
    missed what the pinned one holds."""

    reason: str
    pinned_unix: float
    missed_in: SnapshotId | None = None


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
    _write(store, workspace, snapshot, _key(workspace, snapshot), made)
    return made


def hold(
    store: ObjectStore,
    workspace: WorkspaceName,
    snapshot: SnapshotId,
    reason: str,
    missed_in: SnapshotId,
) -> Pin:
    """Pin a snapshot for what it alone holds. SnapshotMissing if there is no such snapshot."""
    made = Pin(reason[:MOST_REASON], time.time(), missed_in)
    _write(store, workspace, snapshot, _hold_key(workspace, snapshot), made)
    return made


def _write(
    store: ObjectStore, workspace: WorkspaceName, snapshot: SnapshotId, key: ObjectKey, made: Pin
) -> None:
    # Write the pin first, then look for the snapshot. A deletion looks for pins once more after
    # it has deleted, so one of the two always sees the other (deletion.py).
    store.put(key, store.signer.sign(key, msgspec.json.encode(made)))
    if store.head(manifest_key(workspace, snapshot)) is None:
        store.delete([key])
        raise SnapshotMissing(
            f"workspace {workspace} has no snapshot {snapshot} in {store.address}: nothing was "
            "pinned; list the snapshots to find its id"
        )


def unpin(store: ObjectStore, workspace: WorkspaceName, snapshot: SnapshotId) -> None:
    """Remove a user's pin. Does nothing if the snapshot is not pinned. SnapshotKept where torpor
    pins the snapshot: only a deletion by name gives up what it alone holds."""
    store.delete([_key(workspace, snapshot)])
    found = holds(store, workspace, only=snapshot).get(snapshot)
    if found is not None:
        raise SnapshotKept(
            f"torpor pins snapshot {snapshot} of workspace {workspace} in {store.address}: "
            f"{found.reason}. No pin of yours is left on it. To give these files up, delete the "
            f'snapshot by its name: delete_snapshots("{workspace}", ["{snapshot}"])'
        )


def holds(
    store: ObjectStore, workspace: WorkspaceName, *, only: SnapshotId | None = None
) -> dict[SnapshotId, Pin]:
    """The snapshots that torpor pins for what they alone hold. A snapshot whose reason cannot be
    read is held all the same."""
    there = _times(store, _holds_prefix(workspace)) if only is None else [only]
    found = {}
    for snapshot in there:
        key = _hold_key(workspace, snapshot)
        if only is None or store.head(key) is not None:
            found[snapshot] = _read(store, key) or Pin(_UNREAD, 0.0)
    return found


def let_go(store: ObjectStore, workspace: WorkspaceName, snapshot: SnapshotId) -> None:
    """End torpor's own pin of a snapshot; a user's pin stays. Idempotent."""
    store.delete([_hold_key(workspace, snapshot)])


def pinned(store: ObjectStore, workspace: WorkspaceName) -> dict[SnapshotId, str]:
    """The pinned snapshots, by users and by torpor, and why each is kept."""
    users = {one: _reason(store, _key(workspace, one)) for one in pin_times(store, workspace)}
    return {one: pin.reason for one, pin in holds(store, workspace).items()} | users


def pinned_ids(store: ObjectStore, workspace: WorkspaceName) -> Iterator[SnapshotId]:
    """The pinned snapshots, by users and by torpor. Needs only listings."""
    yield from pin_times(store, workspace).keys() | _times(store, _holds_prefix(workspace)).keys()


def is_pinned(
    store: ObjectStore, workspace: WorkspaceName, snapshot: SnapshotId, *, by_user: bool = False
) -> bool:
    """Whether one snapshot is pinned, asked by its own keys without a listing. ``by_user``:
    torpor's own pins do not count."""
    if store.head(_key(workspace, snapshot)) is not None:
        return True
    return not by_user and store.head(_hold_key(workspace, snapshot)) is not None


def pin_times(store: ObjectStore, workspace: WorkspaceName) -> dict[SnapshotId, float]:
    """When users pinned each snapshot last, by the store's clock."""
    return _times(store, _prefix(workspace))


def _times(store: ObjectStore, prefix: str) -> dict[SnapshotId, float]:
    found = {}
    for pin in store.list(prefix):
        with suppress(InvalidInput):  # another program's object in this prefix
            found[snapshot_of(pin.key)] = pin.modified_unix
    return found


def is_own(store: ObjectStore, workspace: WorkspaceName, snapshot: SnapshotId) -> bool:
    """Whether a control side of this store has pinned the snapshot."""
    return _read(store, _key(workspace, snapshot)) is not None


def _reason(store: ObjectStore, key: ObjectKey) -> str:
    found = _read(store, key)
    if found is None:  # the snapshot is pinned all the same
        return _UNREAD
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


def _holds_prefix(workspace: WorkspaceName) -> str:
    return f"workspaces/{workspace}/holds/"


def _hold_key(workspace: WorkspaceName, snapshot: SnapshotId) -> ObjectKey:
    return ObjectKey(_holds_prefix(workspace) + snapshot)
