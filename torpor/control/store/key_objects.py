"""The key objects of a store: ``keys/ID``, by each of which one key of a user opens it.

A key object holds the store key, sealed for that key. It is signed with the store key besides, so
that the holder of any key can tell the store's own key objects from somebody else's.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Final, NamedTuple
from weakref import WeakKeyDictionary

import msgspec

from torpor.control.store.object_store import ObjectStore
from torpor.control.store.signatures import Forged, Signer, Unsigned, record_in
from torpor.shared.errors import (
    InvalidInput,
    KeyDamaged,
    KeyUnknown,
    ObjectExists,
    StoreCorrupt,
    StoreError,
    StoreMissing,
    WrongKey,
)
from torpor.shared.format.user_keys import KeyObject, UserKey, is_key_id
from torpor.shared.values import ObjectKey, learned, object_key

PREFIX: Final = "keys/"
MOST_BYTES: Final = 8 * 1024
MOST_READ: Final = 100
"""Key objects that are listed: each takes a request."""
_ANYWHERE: Final = ""
"""The place that key objects are signed for: they are of each copy of the bucket, too."""

_opened: dict[tuple[str, str], bytes] = {}
_refused: Final = WeakKeyDictionary[ObjectStore, dict[str, tuple[type[StoreError], str]]]()
"""Of each store object, why a key opens nothing there: each record of a look would ask again."""


@dataclass(frozen=True)
class Opened:
    """What a key opens: the store key, and the key object; None if the key is the store key."""

    store_key: bytes = field(repr=False)
    found: KeyObject | None


class Listed(NamedTuple):
    """A key object. ``genuine``: whoever made it had the store key. ``found``: what it says; None
    if that cannot be read."""

    id: str
    found: KeyObject | None
    genuine: bool


class KeyObjects:
    """The key objects of one store."""

    def __init__(self, store: ObjectStore) -> None:
        self.store: Final = store

    def open(self, key: UserKey) -> Opened:
        """What this key opens. Raises KeyUnknown where there is no key object for it, and
        KeyDamaged where that was changed."""
        try:
            return self._opened(key)
        except StoreMissing:
            raise KeyUnknown(self._opens_nothing(key)) from None

    def _opened(self, key: UserKey) -> Opened:
        """The same; StoreMissing where there is no key object for it. One request at most."""
        if not key.opens:
            return Opened(key.secret, None)
        try:
            found = _parsed(self.stored(key.id))
            return Opened(key.open(found), found)
        except (Unsigned, WrongKey) as why:
            raise self._refused(key.id, str(why)) from None

    def stored(self, one: str) -> bytes:
        """The key object of this id, as it is stored. StoreMissing where there is none; Unsigned
        for what is longer than any key object; StoreCorrupt where the bytes were damaged on their
        way here: what is stored may be whole."""
        name = _name(one)
        try:
            return self.store.get(name, max_bytes=MOST_BYTES)
        except StoreCorrupt:
            now = self.store.head(name)
            if now is not None and now.bytes > MOST_BYTES:
                raise Unsigned(f"it has {now.bytes} bytes, more than any key object") from None
            raise

    def add(
        self, key: UserKey, store_key: bytes, label: str, made_unix: float, replaces: str = ""
    ) -> KeyObject:
        """Have a new ``key`` open the store, and read that back. Raises KeyDamaged where it
        reads back as another one, or there was one already."""
        made = key.seal(store_key, label, int(made_unix), replaces)
        name = _name(key.id)
        body = Signer(store_key, _ANYWHERE).sign(name, msgspec.json.encode(made))
        with suppress(ObjectExists):
            self.store.put(name, body, if_absent=True)
        if self.open(key).found != made:
            raise KeyDamaged(
                f"{name} in {self.store.address} reads back as another key object: somebody made "
                "one for the same key meanwhile. Give the command again"
            )
        return made

    def ids(self) -> list[str]:
        """The ids of all key objects, whoever made them."""
        keys = (found.key.removeprefix(PREFIX) for found in self.store.list(PREFIX))
        return sorted(filter(is_key_id, keys))

    def read(self, one: str, store_key: bytes) -> Listed:
        """The key object of this id, as far as it can be read."""
        try:
            blob = self.stored(one)
            found = _parsed(blob)
        except (StoreMissing, Unsigned):
            return Listed(one, None, False)
        try:
            Signer(store_key, _ANYWHERE).check(_name(one), blob)
        except Forged:
            return Listed(one, found, False)
        return Listed(one, found, found.id == one)

    def listed(self, store_key: bytes, first: str = "") -> tuple[list[Listed], int]:
        """At most MOST_READ key objects by age, among them ``first``, and how many more there are:
        whoever writes in the bucket may add any number."""
        ids = sorted(self.ids(), key=lambda one: (one != first, one))
        found = [self.read(one, store_key) for one in ids[:MOST_READ]]
        found.sort(key=lambda one: (one.found.made_unix if one.found else 0, one.id))
        return found, len(ids) - len(found)

    def there(self, one: str) -> bool:
        """Whether there is a key object of this id."""
        return self.store.head(_name(one)) is not None

    def remove(self, one: str, own: UserKey) -> None:
        """The key of this id opens the store no more. Idempotent. Nothing is removed that cannot be
        read, nor where the remover's ``own`` key opens nothing. The key object is put back before
        any error: where ``own`` opens nothing afterwards, because somebody has removed it at the
        same moment (KeyUnknown: of two such removers one at least does so), and where the store
        does not say whether it opens."""
        name, before = _name(one), b""
        with suppress(StoreMissing, Unsigned):  # gone already, or no key object
            before = self.stored(one)
        self.open(own)
        try:
            self.store.delete([name])
            self._opened(own)
        except BaseException as error:
            if before:
                with suppress(ObjectExists):
                    self.store.put(name, before, if_absent=True)
            if not isinstance(error, StoreMissing | KeyDamaged):
                raise
            raise KeyUnknown(
                f"the key {own.id[:8]} opens nothing in {self.store.address} any more: somebody "
                f"removed or replaced keys/{own.id} while this command removed {name}"
                + (", which was put back: nothing was removed here" if before else "")
            ) from None

    def _opens_nothing(self, key: UserKey) -> str:
        there = (
            f"It has other keys ({count}): use one of them, or the store key of your recovery sheet"
            if (count := len(self.ids()))
            else "It has no keys: see that endpoint, bucket and prefix are right. The store key of "
            "your recovery sheet opens a store without its keys/"
        )
        return (
            f"the key {key.id[:8]} opens nothing in {self.store.address}: it was removed or "
            f"rotated, or is of another store. {there}. Nothing is damaged by that, and nothing is "
            "sealed with this key"
        )

    def _refused(self, one: str, why: str) -> KeyDamaged:
        return KeyDamaged(
            f"{_name(one)} in {self.store.address} does not open: {why}. The key may be right, and "
            "the snapshots may be whole: open the store with the store key of your recovery sheet, "
            "or with another of its keys. Nothing is sealed with this key meanwhile"
        )


def opened_key(key: UserKey, store: ObjectStore) -> bytes:
    """The store key that ``key``, which opens a key object, opens in the store: one request for
    each process, key and store, so what is removed later changes nothing for this process. Where
    the key opens nothing, this store object is not asked again, and each use raises the same."""
    known = (key.id, store.address)
    if known not in _opened:
        refused = _refused.setdefault(store, {})
        if key.id in refused:
            kind, why = refused[key.id]
            raise kind(why)
        try:
            _opened[known] = KeyObjects(store).open(key).store_key
        except (KeyUnknown, KeyDamaged) as error:
            refused[key.id] = type(error), str(error)
            raise
    return _opened[known]


def day(unix: int) -> str:
    """The date of a time that a key object says."""
    try:
        return datetime.fromtimestamp(unix, UTC).date().isoformat()
    except (OverflowError, OSError, ValueError):
        return "no date"


def _name(one: str) -> ObjectKey:
    if not is_key_id(one):
        raise InvalidInput(f"{one!r} is no id of a key: `torpor store keys` lists them")
    return object_key(PREFIX + one)


def _parsed(blob: bytes) -> KeyObject:
    """Raises Unsigned for what is no key object of this version."""
    try:
        found = msgspec.json.decode(record_in(blob), type=learned(KeyObject))
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        raise Unsigned("it is no key object") from None
    if found.version != 1 or not 0 <= found.made_unix < 2**63:
        raise Unsigned(f"its version is {found.version}, which this torpor does not know")
    return found
