"""Records that several runs write: small JSON objects, signed, and replaced only as they were read.

A record whose signature does not fit is an error that names it: nothing is done that it says, and
it is not taken for absent. A write names the version that it replaces, so a late or second writer
is refused and reads again. Times in records (fields named ``*_unix``) are by the store's clock; in
memory they are by this host's, so that it can compare them with its own.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Final, Generic, TypeVar

import msgspec

from torpor.control.store.object_store import ObjectStore
from torpor.control.store.signatures import ENVELOPE_BYTES, Forged, Unsigned
from torpor.shared.errors import (
    RecordRefused,
    StoreCorrupt,
    StoreError,
    StoreMissing,
    StoreUnavailable,
)
from torpor.shared.values import ObjectKey, StoredObject, learned

TRIES: Final = 10
"""How often a change is tried again after another run's write. Each time, some run has made
progress."""

_SAME_MOMENT_S: Final = 2.0  # seconds within which nobody can say which of two times is later

Record = TypeVar("Record", bound=msgspec.Struct)
Unread = dict[ObjectKey, StoreError]
"""The records that a reader has left out, and why each cannot be trusted. A caller that shows
records leaves such a record out and names it. A caller that ends, deletes or rents because of a set
of records needs all of them."""


class Records(Generic[Record]):
    """The records of one kind in one store. ``advice``: what a user does about a damaged one."""

    def __init__(
        self, store: ObjectStore, kind: type[Record], most_bytes: int, advice: str
    ) -> None:
        self._store = store
        self._kind = kind
        self._most_bytes = most_bytes
        self._advice = advice

    def read(self, key: ObjectKey) -> tuple[Record, str] | None:
        """The record and its version; None if it is absent. RecordRefused if no control side of
        this store signed it, or if it is damaged."""
        try:
            blob, version = self._store.read(key, max_bytes=self._most_bytes + ENVELOPE_BYTES)
            body = self._store.signer.check(key, blob)
            found = msgspec.json.decode(body, type=learned(self._kind))
        except StoreMissing:
            return None
        except (Unsigned, Forged) as why:
            raise refused(self._store, key, why, self._advice) from None
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise self.damaged(key, error) from None
        return _moved(found, -self._store.clock_ahead_s()), version

    def read_each(self, keys: Iterable[ObjectKey], unread: Unread | None = None) -> list[Record]:
        """The existing records. ``unread`` gets the errors of those that cannot be trusted; without
        ``unread``, the first one is raised."""
        found = []
        for key in keys:
            with left_out(key, unread):
                if (record := self.read(key)) is not None:
                    found.append(record[0])
        return found

    def damaged(self, key: ObjectKey, why: object) -> RecordRefused:
        """The error of a record that cannot be trusted."""
        return RecordRefused(
            f"{key} in {self._store.address} is not what this torpor writes ({why}): where a "
            f"newer one wrote it, use that one; else {self._advice}, then delete the object"
        )

    def create(self, key: ObjectKey, record: Record) -> None:
        """Write a record that does not exist yet; ObjectExists if it does."""
        self._store.put(key, self._encoded(key, record), if_absent=True)

    def replace(self, key: ObjectKey, record: Record, version: str) -> None:
        """Write over the version that was read; ObjectChanged if another run has written since."""
        self._store.put(key, self._encoded(key, record), if_version=version)

    def put(self, key: ObjectKey, record: Record) -> None:
        """Write the record, whatever exists."""
        self._store.put(key, self._encoded(key, record))

    def contested(self, key: ObjectKey) -> StoreUnavailable:
        """The error after TRIES changes that other runs overtook."""
        return StoreUnavailable(
            f"{key} in {self._store.address}: other runs wrote it {TRIES} times while this run "
            "changed it; try again, and see which runs work on it"
        )

    def _encoded(self, key: ObjectKey, record: Record) -> bytes:
        body = msgspec.json.encode(_moved(record, self._store.clock_ahead_s()))
        return self._store.signer.sign(key, body)


@contextmanager
def left_out(key: ObjectKey, unread: Unread | None) -> Iterator[None]:
    """Within this context, leave out the record of this name if it cannot be trusted, as
    ``read_each`` does."""
    try:
        yield
    # StoreCorrupt: longer than any record, for example
    except (RecordRefused, StoreCorrupt) as error:
        if unread is None:
            raise
        unread[key] = error


def last_written(found: Iterable[StoredObject], most: int) -> list[ObjectKey]:
    """The ``most`` objects that were written last, oldest first, and what was written within the
    same seconds as the first of them: the signing of older records writes many at once."""
    by_time = sorted(found, key=lambda stored: stored.modified_unix)
    if not most or not by_time:
        return []
    since_unix = by_time[-most:][0].modified_unix - _SAME_MOMENT_S
    return [stored.key for stored in by_time if stored.modified_unix >= since_unix]


def refused(store: ObjectStore, key: ObjectKey, why: object, advice: str) -> RecordRefused:
    """The error of an object that no control side of this store has signed as it is."""
    whose = "with another key: give both the same (docs/safety.md)"
    if isinstance(why, Unsigned):
        whose = "that runs an older torpor: run its `torpor down`, and bring it up to date"
    return RecordRefused(
        f"{key} in {store.address} is not believed: {why}. Nothing is done that it says. If no "
        "`torpor up` has run since you brought torpor up to date here, run it: it signs what is "
        f"there, once. Else a control side of yours may have written it {whose}. Then, if you know "
        "that it is true, and nobody else can write to the bucket, `torpor up --believe-records` "
        f"signs all that is there. Else somebody else wrote it: {advice}, delete the object, and "
        "replace the bucket's access key"
    )


def named(unread: Unread) -> str:
    """Why the first of these records cannot be trusted, and the names of the others; empty without
    any."""
    others = ", ".join([*unread][1:])
    why = "".join(str(error) for error in [*unread.values()][:1])
    return f"{why}. Nor are: {others}" if others else why


def _moved(record: Record, by_s: float) -> Record:
    """The record with all its times moved; 0.0 and None are not times."""
    if not by_s:
        return record
    changes: dict[str, Any] = {}
    for name in record.__struct_fields__:
        value = getattr(record, name)
        if name.endswith("_unix") and isinstance(value, tuple):
            changes[name] = tuple(item + by_s for item in value)
        elif name.endswith("_unix") and value:
            changes[name] = value + by_s
        elif isinstance(value, list):
            changes[name] = [_moved(o, by_s) if isinstance(o, msgspec.Struct) else o for o in value]
    return msgspec.structs.replace(record, **changes)
