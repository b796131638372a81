"""Signs the records of a store that have no signature of its key, such as after the key was lost.

Nobody can tell such a record from one that somebody else wrote. So this is done only when its user
asks for it by name.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, NamedTuple

import msgspec

from torpor.control.store.catalog import CATALOG
from torpor.control.store.object_store import ObjectStore
from torpor.control.store.signatures import Forged, Unsigned, record_in
from torpor.shared.errors import ObjectChanged, StoreCorrupt, StoreMissing
from torpor.shared.values import MIB, ObjectKey, WorkspaceName

_KINDS: Final = frozenset(
    {"rentals", "jobs", "hosts", "verified", "deleted", "marks", "pins", "holds", "claim"}
)
"""The kinds of a workspace's records that are signed, by the word after its name
(``workspaces/NAME/KIND``)."""
_OF_ALL: Final = ("canaries/",)
"""Prefixes of signed records that belong to no workspace."""
_MOST_BYTES: Final = 33 * MIB  # bytes of prune's mark; all other records are small
_PASSES: Final = 5  # passes: a run may write an unsigned record after it was listed


class Signed(NamedTuple):
    """The records that were signed, and those that were left as they are, with the reason."""

    signed: list[ObjectKey]
    left: dict[ObjectKey, str]


def sign_records(
    store: ObjectStore,
    *,
    of: Callable[[WorkspaceName], bool] = lambda name: True,
) -> Signed:
    """Sign every record of the store that its key has not signed, or that was changed, in the order
    in which they were written, until a pass finds none. ``of``: whether a workspace's records are
    meant. Idempotent."""
    signed: list[ObjectKey] = []
    for _ in range(_PASSES):
        found = [one for prefix in ("workspaces/", *_OF_ALL) for one in store.list(prefix)]
        left: dict[ObjectKey, str] = {}
        before = len(signed)
        for stored in sorted(found, key=lambda one: one.modified_unix):
            if not is_signed_kind(stored.key) or not of(_workspace(stored.key)):
                continue
            try:
                if _sign(store, stored.key):
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
    # these are made again
    is_kind = len(parts) > 2 and parts[2] in _KINDS and parts[3:] != [CATALOG]
    return key.startswith(_OF_ALL) or is_kind


def _workspace(key: ObjectKey) -> WorkspaceName:
    return WorkspaceName("" if key.startswith(_OF_ALL) else key.split("/")[1])


def _sign(store: ObjectStore, key: ObjectKey) -> bool:
    """Sign one object; returns whether it was signed now. Raises the reason if it must stay as it
    is."""
    try:
        blob, version = store.read(key, max_bytes=_MOST_BYTES)
    except StoreMissing:
        return False  # a run has moved it meanwhile
    try:
        store.signer.check(key, blob)
    except Unsigned:
        record = blob
    except Forged:
        record = record_in(blob)
    else:
        return False
    msgspec.json.decode(record)
    store.put(key, store.signer.sign(key, record), if_version=version)
    return True
