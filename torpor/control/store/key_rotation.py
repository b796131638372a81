"""Replace the key of a store's block, without storing anything again.

The order is: the new key object, read back; the blocks, read back; the end of the old key object.
Killed at any point, each block has a key that opens the store, and the next call goes on.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, NamedTuple

from torpor.control.store.key_objects import KeyObjects
from torpor.shared.format.user_keys import UserKey

USUAL_LABEL: Final = "this installation"


class Rotated(NamedTuple):
    """``key``: what the block has now. ``gone``: the id of the key that opens nothing any more;
    empty where the old key is the store key itself. ``resumed``: an earlier call made the key."""

    key: UserKey
    gone: str
    resumed: bool


def rotate(
    objects: KeyObjects, old: UserKey, save: Callable[[str, UserKey], None], now_unix: float
) -> Rotated:
    """Have the block, whose key is ``old``, open the store with a new key.

    ``save`` gets the id of the key that is to go, and the key to save in the block and in each
    other one that has the old key. It reads the blocks back, and raises unless they have it."""
    store_key, found = objects.open(old)
    if found is not None and found.replaces and objects.there(found.replaces):
        key, gone, resumed = old, found.replaces, True
    else:
        key, gone, resumed = UserKey.new(), old.id if old.opens else "", False
        label = USUAL_LABEL if found is None else found.label
        objects.add(key, store_key, label, now_unix, gone)
    save(gone, key)
    if gone:
        objects.remove([gone])
    return Rotated(key, gone, resumed)
