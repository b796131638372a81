"""Signs the records of a store that have no signature of its key, such as after the key was lost.

Nobody can tell such a record from one that somebody else wrote. So this is done only when its user
asks for it by name.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Final, NamedTuple

import msgspec

from torpor.control.store.block_records import came_late
from torpor.control.store.catalog import CATALOG
from torpor.control.store.object_store import ObjectStore
from torpor.control.store.signatures import Forged, Unsigned, record_in
from torpor.shared.errors import ObjectChanged, StoreCorrupt, StoreMissing
from torpor.shared.values import MIB, ObjectKey, StoredObject, WorkspaceName

_KINDS: Final = frozenset(
    {"rentals", "jobs", "hosts", "verified", "deleted", "marks", "pins", "holds", "claim", "blocks"}
)
"""What is signed of a workspace, by the word after its name (``workspaces/NAME/KIND``)."""
_OF_ALL: Final = ("canaries/",)
"""What is signed and belongs to no workspace."""
_MOST_BYTES: Final = 33 * MIB  # a mark of prune; all others are small
_PASSES: Final = 5  # a run that goes on may write an unsigned record after it was listed


class Signed(NamedTuple):
    """The records that were signed, and those that were left as they are, with the reason."""

    signed: list[ObjectKey]
    left: dict[ObjectKey, str]


def sign_records(
    store: ObjectStore,
    *,
    of: Callable[[WorkspaceName], bool] = lambda name: True,
) -> Signed:
    """Sign every record of the store that its key has not signed, or that was changed, and settings
    that came into the bucket long after they were signed, in the order in which they were written,
    until a pass finds none. ``of``: whether a workspace's records are meant. Idempotent."""
    signed: list[ObjectKey] = []
    for _ in range(_PASSES):
        found = [one for prefix in ("workspaces/", *_OF_ALL) for one in store.list(prefix)]
        left: dict[ObjectKey, str] = {}
        before = len(signed)
        for stored in sorted(found, key=lambda one: one.modified_unix):
            if not is_signed_kind(stored.key) or not of(_workspace(stored.key)):
                continue
            try:
                if _sign(store, stored):
                    signed.append(stored.key)
            except (ObjectChanged, StoreCorrupt, msgspec.MsgspecError, ValueError) as error:
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
    return key.startswith(_OF_ALL) or is_kind


def _workspace(key: ObjectKey) -> WorkspaceName:
    return WorkspaceName("" if key.startswith(_OF_ALL) else key.split("/")[1])


def _sign(store: ObjectStore, stored: StoredObject) -> bool:
    """Whether it was signed now. Raises what keeps it as it is."""
    key = stored.key
    try:
        blob, version = store.read(key, max_bytes=_MOST_BYTES)
    except StoreMissing:
        return False  # a run has moved it meanwhile
    fits, record = False, blob
    try:
        record = store.signer.check(key, blob)
        fits = True
    except Unsigned:
        pass  # as torpor wrote it before it signed records
    except Forged:
        record = record_in(blob)
    if key.split("/")[2:3] == ["blocks"]:
        found = msgspec.json.decode(record, type=dict[str, Any])
        written_unix = found.get("written_unix")
        if fits and isinstance(written_unix, float) and not came_late(stored, written_unix):
            return False
        now_unix = time.time() + store.clock_ahead_s()  # else it looks put back
        record = msgspec.json.encode(found | {"written_unix": now_unix})
    elif fits:
        return False
    msgspec.json.decode(record)
    store.put(key, store.signer.sign(key, record), if_version=version)
    return True
