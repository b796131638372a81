"""Signs the records of a store that torpor wrote before it signed them, or with a key that is lost.

Nobody can tell such a record from one that somebody else wrote. So this is done when an
installation is brought up to date, once, and else only when its user asks for it by name.
"""

from __future__ import annotations

from contextlib import suppress
from typing import Final

import msgspec

from torpor.control.store.seam import ObjectStore
from torpor.control.store.signatures import Forged, Unsigned, record_in
from torpor.shared.errors import ObjectChanged, StoreMissing
from torpor.shared.values import MIB, ObjectKey

_KINDS: Final = frozenset({"rentals", "jobs", "hosts", "verified", "deleted", "marks", "claim"})
"""What is signed of a workspace, by the first word of its name (``workspaces/NAME/KIND``)."""
_CANARIES: Final = "canaries/"
_MOST_BYTES: Final = 33 * MIB  # a mark of prune; all others are small


def sign_records(store: ObjectStore, *, whatever: bool = False) -> list[ObjectKey]:
    """Sign every unsigned record of the store; returns their names. ``whatever``: also those that
    another key signed, or that were changed. A record that a run writes meanwhile, and an object
    that is no JSON, stay as they are. Idempotent."""
    there = [found.key for prefix in ("workspaces/", _CANARIES) for found in store.list(prefix)]
    return [key for key in there if is_signed_kind(key) and _sign(store, key, whatever)]


def is_signed_kind(key: ObjectKey) -> bool:
    """Whether objects of such a name are records that carry a signature."""
    parts = key.split("/")
    return key.startswith(_CANARIES) or (len(parts) > 2 and parts[2] in _KINDS)


def _sign(store: ObjectStore, key: ObjectKey, whatever: bool) -> bool:
    try:
        blob, version = store.read(key, max_bytes=_MOST_BYTES)
    except StoreMissing:
        return False  # a run has moved it meanwhile, and signed it
    try:
        store.signer.check(key, blob)
    except Unsigned:
        record = blob
    except Forged:
        if not whatever:
            return False
        record = record_in(blob)
    else:
        return False
    with suppress(ObjectChanged, msgspec.MsgspecError, UnicodeDecodeError):
        msgspec.json.decode(record)
        store.put(key, store.signer.sign(key, record), if_version=version)
        return True
    return False
