"""The key objects of a store: ``keys/ID``, by each of which one key of a user opens it.

A key object holds the store key, sealed for that key. It is signed with the store key besides, so
that the holder of any key can tell the store's own key objects from somebody else's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import suppress
from datetime import UTC, datetime
from typing import Final, NamedTuple

import msgspec

from torpor.control.store.object_store import ObjectStore
from torpor.control.store.s3 import S3Settings, S3Store
from torpor.control.store.signatures import Forged, Signer, Unsigned, place_of, record_in
from torpor.shared.errors import InvalidInput, RecordRefused, StoreCorrupt, StoreMissing, WrongKey
from torpor.shared.format.user_keys import KeyObject, UserKey, is_key_id
from torpor.shared.plain_text import plain
from torpor.shared.values import Away, ObjectKey, learned, object_key

PREFIX: Final = "keys/"
MOST_BYTES: Final = 8 * 1024
MOST_READ: Final = 100
"""Key objects that are read for their labels: each takes a request."""
_NAMED: Final = 10

_opened: dict[tuple[str, str | None, str], bytes] = {}


class Opened(NamedTuple):
    """What a key opens: the store key, and the key object; None if the key is the store key."""

    store_key: bytes
    found: KeyObject | None


class Listed(NamedTuple):
    """A key object. ``genuine``: whoever made it had the store key. ``found``: what it says; None
    if that cannot be read."""

    id: str
    found: KeyObject | None
    genuine: bool


class KeyObjects:
    """The key objects of one store. ``place``: its bucket and prefix, as in signatures."""

    def __init__(self, store: ObjectStore, place: str) -> None:
        self.store: Final = store
        self.place: Final = place

    def open(self, key: UserKey, *, moved: bool = False) -> Opened:
        """What this key opens. Raises WrongKey where there is no key object for it, and
        RecordRefused where that is damaged, replaced, or made for another bucket or prefix, unless
        it is known that the store has ``moved``."""
        if not key.opens:
            return Opened(key.secret, None)
        name = _name(key.id)
        try:
            blob = self.store.get(name, max_bytes=MOST_BYTES)
        except StoreMissing:
            raise WrongKey(self._opens_nothing(key)) from None
        except StoreCorrupt as error:  # longer than any key object
            raise self._refused(key.id, str(error)) from None
        try:
            found = _parsed(blob)
            store_key = key.open(found)
            Signer(store_key, found.place).check(name, blob)
        except (Unsigned, Forged, WrongKey, InvalidInput) as why:
            raise self._refused(key.id, str(why)) from None
        if found.place != self.place and not moved:
            raise RecordRefused(
                f"{name} in {self.store.address} was made for {found.place}, and this is "
                f"{self.place}. If you copied the store here, `torpor store moved` with the name "
                "of the store's block makes the key object for this place. Else somebody put it "
                "here from another store: nothing is sealed or opened with it"
            )
        return Opened(store_key, found)

    def add(
        self, key: UserKey, store_key: bytes, label: str, made_unix: float, replaces: str = ""
    ) -> KeyObject:
        """Have ``key`` open the store, and read that back. Idempotent."""
        made = key.seal(store_key, self.place, label, int(made_unix), replaces)
        name = _name(key.id)
        body = Signer(store_key, self.place).sign(name, msgspec.json.encode(made))
        self.store.put(name, body)
        if self.open(key).store_key != store_key:
            raise RecordRefused(f"{name} in {self.store.address} reads back as another key object")
        return made

    def listed(self, store_key: bytes) -> list[Listed]:
        """The key objects by age, and at most MOST_READ of them."""
        signer = Signer(store_key, self.place)
        found = [self._one(one, signer) for one in self._ids()[:MOST_READ]]
        return sorted(found, key=lambda one: (one.found.made_unix if one.found else 0, one.id))

    def _one(self, one: str, signer: Signer) -> Listed:
        blob = b""
        with suppress(StoreMissing, StoreCorrupt):
            blob = self.store.get(_name(one), max_bytes=MOST_BYTES)
        try:
            found = _parsed(blob)
        except Unsigned:
            return Listed(one, None, False)
        try:
            signer.check(_name(one), blob)
        except Forged:
            return Listed(one, found, False)
        return Listed(one, found, found.id == one and found.place == self.place)

    def there(self, one: str) -> bool:
        """Whether there is a key object of this id."""
        return self.store.head(_name(one)) is not None

    def remove(self, ids: Iterable[str]) -> None:
        """The keys of these ids open the store no more. Idempotent."""
        self.store.delete([_name(one) for one in ids])

    def labels(self) -> str:
        """What the key objects say of themselves, for a message; empty if there are none. Nobody
        can check that without a key of the store."""
        ids = self._ids()
        said = []
        for one in ids[:_NAMED]:
            with suppress(StoreMissing, StoreCorrupt, Unsigned):
                found = _parsed(self.store.get(_name(one), max_bytes=MOST_BYTES))
                said.append(f'"{plain(found.label)}" ({one[:8]}, {day(found.made_unix)})')
        more = len(ids) - len(said)
        return ", ".join([*said, *([f"{more} more"] if more else [])])

    def _ids(self) -> list[str]:
        keys = (found.key.removeprefix(PREFIX) for found in self.store.list(PREFIX))
        return sorted(filter(is_key_id, keys))

    def _opens_nothing(self, key: UserKey) -> str:
        labels = self.labels()
        there = (
            f"It has keys labelled {labels}: use one of them"
            if labels
            else "It has no keys: see that endpoint, bucket and prefix are right"
        )
        return (
            f"the key {key.id[:8]} opens nothing in {self.store.address}: it was removed or "
            f"rotated, or is of another store. {there}. Nothing is damaged by that, and nothing is "
            "sealed with this key"
        )

    def _refused(self, one: str, why: str) -> RecordRefused:
        return RecordRefused(
            f"{_name(one)} in {self.store.address} is damaged or was replaced: {why}. The key may "
            "be right, and the snapshots may be whole: open the store with another of its keys, or "
            "put an earlier version of this object back. Nothing is sealed with this key meanwhile"
        )


def opened_key(
    settings: S3Settings, key: UserKey, on_away: Callable[[Away], None] | None = None
) -> bytes:
    """The store key that ``key`` opens there: one request for each process, key and store, so what
    is removed later changes nothing for this process."""
    if not key.opens:
        return key.secret
    place = place_of(settings.bucket, settings.prefix)
    known = (key.id, settings.endpoint_url, place)
    if known not in _opened:
        store = S3Store.connect(settings, on_away)
        try:
            _opened[known] = KeyObjects(store, place).open(key).store_key
        finally:
            store.close()
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
