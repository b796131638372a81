"""Listings that the readers of one look share: each is asked of its store once.

A store bills each page of a listing as it bills a write. `watch` looks every two minutes at all
workspaces, from several sides, and each workspace has machines under several names.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any, cast

from torpor.control.store.object_store import ObjectStore
from torpor.shared.values import RESERVED, StoredObject

_SHARED = tuple(f"workspaces/{name}" for name in RESERVED)
"""Few workspaces have anything under a reserved name. So one listing stands for those of all."""


class SharedListings:
    """Stores as they are listed once, for readers that decide nothing by what is newer: whoever
    writes by what it has read opens its store anew. Several threads may read."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._of: dict[tuple[str, str], _Listing] = {}

    def of(self, store: ObjectStore) -> ObjectStore:
        """The store; of equal listings, only the first one is asked of it."""
        return cast("ObjectStore", _Listed(store, self))

    def list(self, store: ObjectStore, prefix: str) -> list[StoredObject]:
        """What the first listing of this prefix has shown."""
        asked = next((one for one in _SHARED if prefix.startswith(one)), prefix)
        with self._lock:
            listing = self._of.setdefault((store.address, asked), _Listing())
        return [one for one in listing.read(store, asked) if one.key.startswith(prefix)]


class _Listing:
    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._found: list[StoredObject] | None = None

    def read(self, store: ObjectStore, prefix: str) -> list[StoredObject]:
        with self._lock:  # others wait for the answer
            if self._found is None:
                self._found = [*store.list(prefix)]
            return self._found


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
