"""Replace the key of a store's block, without storing anything again.

The order is: the new key object, read back; the blocks, read back; the end of the old key object.
Killed at any point, each block has a key that opens the store, and the next call goes on.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Final, NamedTuple

from torpor.control.store.key_objects import KeyObjects
from torpor.shared.errors import KeyDamaged, KeyUnknown
from torpor.shared.format.user_keys import UserKey

USUAL_LABEL: Final = "this installation"


class Rotated(NamedTuple):
    """``key``: what the block has now. ``gone``: the ids of the keys that open nothing any more;
    none where the old key is the store key itself. ``resumed``: one of them is of an earlier
    rotation, which was stopped."""

    key: UserKey
    gone: list[str]
    resumed: bool


def rotate(
    objects: KeyObjects, old: UserKey, save: Callable[[str, UserKey], None], now_unix: float
) -> Rotated:
    """Have the block, whose key is ``old``, open the store with a new key.

    ``save`` gets the id of the key that is to go, and the key to save in the block and in each
    other one that has the old key. It reads the blocks back, and raises unless they have it."""
    opened, gone = objects.open(old), []
    found = opened.found
    if found is not None and found.replaces and objects.there(found.replaces):
        # An earlier rotation was stopped here, or somebody has put the old key object back.
        save(found.replaces, old)
        objects.remove(found.replaces, old)
        gone.append(found.replaces)
    key, goes = UserKey.new(), old.id if old.opens else ""
    label = USUAL_LABEL if found is None else found.label
    objects.add(key, opened.store_key, label, now_unix, goes)
    save(goes, key)
    if goes:
        try:
            objects.remove(goes, key)
        except KeyUnknown:  # somebody has removed the new key, and the old key object is there
            with suppress(KeyUnknown, KeyDamaged):  # or another rotation has taken it away, too
                objects.open(old)
                save(key.id, old)
            raise
    return Rotated(key, [*gone, *([goes] if goes else [])], bool(gone))
