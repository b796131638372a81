"""Signs the records of a store that have no signature of its key, such as after the key was lost.

Nobody can tell such a record from one that somebody else wrote. So this is done only when its user
asks for it by name.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, NamedTuple

import msgspec

from torpor.control.store.block_records import BlockRecords, came_late, side_and_block
from torpor.control.store.catalog import CATALOG
from torpor.control.store.object_store import ObjectStore
from torpor.control.store.signatures import Forged, Unsigned, record_in
from torpor.shared.errors import ObjectChanged, RecordRefused, StoreCorrupt, StoreMissing
from torpor.shared.values import MIB, ObjectKey, StoredObject, WorkspaceName

_KINDS: Final = frozenset(
    {"rentals", "jobs", "hosts", "verified", "deleted", "marks", "pins", "holds", "claim", "blocks"}
)
"""What is signed of a workspace, by the word after its name (``workspaces/NAME/KIND``)."""
_OF_ALL: Final = ("canaries/",)
"""What is signed and belongs to no workspace."""
_MOST_BYTES: Final = 33 * MIB  # a mark of prune; all others are small
_PASSES: Final = 5  # a run that goes on may write an unsigned record after it was listed


_LEFT: Final = (ObjectChanged, RecordRefused, StoreCorrupt, msgspec.MsgspecError, ValueError)


class Signed(NamedTuple):
    """The records that were signed, and those that were left as they are, with the reason."""

    signed: list[ObjectKey]
    left: dict[ObjectKey, str]


def sign_records(
    store: ObjectStore,
    store_key: bytes | None = None,
    *,
    of: Callable[[WorkspaceName], bool] = lambda name: True,
) -> Signed:
    """Sign every record of the store that its key has not signed, or that was changed, and settings
    that came into the bucket long after they were signed, in the order in which they were written,
    until a pass finds none. ``store_key``: what seals settings there; None where the store is
    plain. Settings that have no signature at all, or that it does not open, stay as they are:
    anybody may have written them, and they say where a market's key is sent. ``of``: whether a
    workspace's records are meant. Idempotent."""
    blocks = BlockRecords(store, store_key)
    signed: list[ObjectKey] = []
    for _ in range(_PASSES):
        found = [one for prefix in ("workspaces/", *_OF_ALL) for one in store.list(prefix)]
        left: dict[ObjectKey, str] = {}
        before = len(signed)
        for stored in sorted(found, key=lambda one: one.modified_unix):
            if not is_signed_kind(stored.key) or not of(_workspace(stored.key)):
                continue
            try:
                if _sign(store, stored, blocks):
                    signed.append(stored.key)
            except _LEFT as error:
                left[stored.key] = str(error)
            except RecursionError:
                left[stored.key] = "it is nested too deeply"
        if len(signed) == before:
            break
    return Signed(signed, left)


def is_signed_kind(key: ObjectKey) -> bool:
    """Whether objects of such a name are records that carry a signature."""
    parts = key.split("/")
    is_kind = len(parts) > 2 and parts[2] in _KINDS and parts[3:] != [CATALOG]  # made anew
    if is_kind and parts[2] == "blocks":
        return side_and_block(key) is not None
    return key.startswith(_OF_ALL) or is_kind


def _workspace(key: ObjectKey) -> WorkspaceName:
    return WorkspaceName("" if key.startswith(_OF_ALL) else key.split("/")[1])


def _sign(store: ObjectStore, stored: StoredObject, blocks: BlockRecords) -> bool:
    """Whether it was signed now. Raises what keeps it as it is."""
    key = stored.key
    try:
        blob, version = store.read(key, max_bytes=_MOST_BYTES)
    except StoreMissing:
        return False  # a run has moved it meanwhile
    fits, record, of_block = False, blob, side_and_block(key) is not None
    try:
        record = store.signer.check(key, blob)
        fits = True
    except Unsigned:
        if of_block:
            raise  # torpor has signed each of them
    except Forged:
        record = record_in(blob)
    if fits and not (of_block and came_late(stored, blocks.written_unix(record))):
        return False
    if of_block:
        record = blocks.written_now(key, record)  # else it looks put back
    msgspec.json.decode(record)
    store.put(key, store.signer.sign(key, record), if_version=version)
    return True
