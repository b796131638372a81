"""Several readers of one look cost one listing."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.fixtures.memory_store import MemoryStore
from torpor.control.store.shared_listings import SharedListings
from torpor.shared.errors import StoreError, StoreUnavailable
from torpor.shared.values import ObjectKey, StoredObject

SNAPSHOT = ObjectKey("workspaces/demo/snapshots/a")
NODE = ObjectKey("workspaces/nodes--demo/rentals/open/b")
OTHERS = ObjectKey("workspaces/nodes--other/rentals/open/c")


class Counted(MemoryStore):
    """Notes each prefix that it lists."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[str] = []

    def list(self, prefix: str) -> Iterator[StoredObject]:
        self.asked.append(prefix)
        return super().list(prefix)


def _keys(found: Iterator[StoredObject]) -> list[ObjectKey]:
    return [one.key for one in found]


def test_readers_at_once_ask_the_store_once_and_see_all_of_it() -> None:
    store, once = Counted(), SharedListings()
    store.put(SNAPSHOT, b"1")
    with ThreadPoolExecutor(8) as threads:
        read = [
            threads.submit(lambda: _keys(once.of(store).list("workspaces/demo/snapshots/")))
            for _ in range(8)
        ]
        assert [one.result() for one in read] == [[SNAPSHOT]] * 8
    assert store.asked == ["workspaces/demo/snapshots/"]
    assert once.of(store).get(SNAPSHOT, max_bytes=1) == b"1", "what is read is as it is now"


def test_one_listing_shows_the_nodes_of_each_workspace() -> None:
    store, once = Counted(), SharedListings()
    for key in (NODE, OTHERS):
        store.put(key, b"1")
    seen = once.of(store)
    assert _keys(seen.list("workspaces/nodes--demo/rentals/")) == [NODE]
    assert _keys(seen.list("workspaces/nodes--other/rentals/")) == [OTHERS]
    assert _keys(seen.list("workspaces/nodes--none/rentals/")) == []
    assert store.asked == ["workspaces/nodes--"]


def test_what_one_workspace_holds_hides_the_nodes_of_no_other() -> None:
    class Flooded(Counted):
        def list(self, prefix: str) -> Iterator[StoredObject]:
            found = super().list(prefix)
            if NODE.startswith(prefix):
                raise StoreError("more than 1000000 objects")
            return found

    store, once = Flooded(), SharedListings()
    for key in (NODE, OTHERS):
        store.put(key, b"1")
    seen = once.of(store)
    for _ in range(2):
        with pytest.raises(StoreError, match="more than"):
            _keys(seen.list("workspaces/nodes--demo/rentals/"))
        assert _keys(seen.list("workspaces/nodes--other/rentals/")) == [OTHERS]
    assert store.asked.count("workspaces/nodes--") == 1
    assert store.asked.count("workspaces/nodes--other/rentals/") == 1


def test_a_listing_that_failed_is_asked_for_again() -> None:
    class Away(Counted):
        def list(self, prefix: str) -> Iterator[StoredObject]:
            found = super().list(prefix)
            if len(self.asked) == 1:
                raise StoreUnavailable("away")
            return found

    store, once = Away(), SharedListings()
    store.put(SNAPSHOT, b"1")
    with pytest.raises(StoreUnavailable):
        _keys(once.of(store).list("workspaces/demo/"))
    assert _keys(once.of(store).list("workspaces/demo/")) == [SNAPSHOT]


def test_each_store_has_listings_of_its_own() -> None:
    once = SharedListings()

    class Elsewhere(Counted):
        @property
        def address(self) -> str:
            return "elsewhere"

    here, there = Counted(), Elsewhere()
    here.put(SNAPSHOT, b"1")
    assert _keys(once.of(here).list("workspaces/demo/")) == [SNAPSHOT]
    assert _keys(once.of(there).list("workspaces/demo/")) == []
