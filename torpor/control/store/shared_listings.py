"""Listings that the readers of one look share: each is asked of its store once.

A store bills each page of a listing as it bills a write. `watch` looks every two minutes at all
workspaces, from several sides, and each workspace has machines under several names.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any, Final, cast

from torpor.control.store.object_store import ObjectStore
from torpor.shared.errors import StoreError
from torpor.shared.values import RESERVED, StoredObject

_SHARED: Final = tuple(f"workspaces/{name}" for name in RESERVED)
"""Few workspaces have anything under a reserved name. So one listing stands for those of all."""


class SharedListings:
    """Stores, each prefix of which is listed once, at the first look at it.

    Objects are read as they are now, so that a listed one may have gone; a new one is
    not seen. What acts on a look opens its store anew. Several threads may read.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._of: dict[tuple[str, str], _Listing] = {}

    def of(self, store: ObjectStore) -> ObjectStore:
        """The store; of equal listings, only the first one is asked of it."""
        return cast("ObjectStore", _Listed(store, self))

    def list(self, store: ObjectStore, prefix: str) -> list[StoredObject]:
        """What the first listing of this prefix has shown. Where one of all workspaces fails, each
        workspace is listed by itself: what one of them holds hinders no other."""
        shared = next((one for one in _SHARED if prefix.startswith(one)), "")
        found = self._listing(store, shared).shared(store, shared) if shared else None
        if found is None:
            return self._listing(store, prefix).read(store, prefix)
        return [one for one in found if one.key.startswith(prefix)]

    def _listing(self, store: ObjectStore, prefix: str) -> _Listing:
        with self._lock:
            return self._of.setdefault((store.address, prefix), _Listing())


class _Listing:
    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._found: list[StoredObject] | None = None
        self._failed = False

    def read(self, store: ObjectStore, prefix: str) -> list[StoredObject]:
        with self._lock:  # others wait for the answer
            if self._found is None:
                self._found = [*store.list(prefix)]
            return self._found

    def shared(self, store: ObjectStore, prefix: str) -> list[StoredObject] | None:
        """None where it fails, now and later."""
        if self._failed:
            return None
        try:
            return self.read(store, prefix)
        except StoreError:
            self._failed = True
            return None


class _Listed:
    """An ``ObjectStore`` whose listings are shared."""

    def __init__(self, store: ObjectStore, listings: SharedListings) -> None:
        self._store, self._listings = store, listings

    def __repr__(self) -> str:
        return repr(self._store)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def list(self, prefix: str) -> Iterator[StoredObject]:
        yield from self._listings.list(self._store, prefix)
