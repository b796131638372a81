"""A deletion takes one manifest, and never one that is pinned or the newest."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime, timezone

import pytest

from tests.fixtures.memory_store import MemoryStore
from torpor.control.upkeep.deletion import delete_snapshot
from torpor.control.upkeep.pins import MOST_REASON, pin, pinned, unpin
from torpor.shared.errors import InvalidInput, SnapshotKept, SnapshotMissing
from torpor.shared.format.names import manifest_key, new_pack_key
from torpor.shared.values import ObjectKey, SnapshotId, WorkspaceName, new_snapshot_id

DEMO, OTHER = WorkspaceName("demo"), WorkspaceName("other")


@pytest.fixture
def store(memory_store: MemoryStore) -> MemoryStore:
    return memory_store


def _snapshots(store: MemoryStore, count: int, workspace: WorkspaceName = DEMO) -> list[SnapshotId]:
    made: list[SnapshotId] = []
    for _ in range(count):
        made.append(new_snapshot_id(datetime.now(timezone.utc), made[-1] if made else None))
        store.put(manifest_key(workspace, made[-1]), f"manifest {made[-1]}".encode())
    return made


def _keys(store: MemoryStore) -> set[ObjectKey]:
    return {found.key for found in store.list("")}


def test_a_deletion_takes_the_manifest_and_nothing_else(store: MemoryStore) -> None:
    first, second = _snapshots(store, 2)
    _snapshots(store, 1, OTHER)
    store.put(new_pack_key(DEMO), b"pack")
    before = _keys(store)
    delete_snapshot(store, DEMO, first)
    assert before - _keys(store) == {manifest_key(DEMO, first)}
    with pytest.raises(SnapshotMissing, match=f"no snapshot {first} in {store.address}"):
        delete_snapshot(store, DEMO, first)
    assert manifest_key(DEMO, second) in _keys(store)


def test_the_newest_goes_only_when_it_is_named_as_the_newest(store: MemoryStore) -> None:
    first, newest = _snapshots(store, 2)
    for even_newest in (None, first):
        with pytest.raises(SnapshotKept, match=r"the newest of workspace demo .*even_newest"):
            delete_snapshot(store, DEMO, newest, even_newest=even_newest)
    delete_snapshot(store, DEMO, newest, even_newest=newest)
    with pytest.raises(SnapshotKept, match="the newest"):
        delete_snapshot(store, DEMO, first)  # it is the newest now


def test_a_pinned_snapshot_is_deleted_by_nothing(store: MemoryStore) -> None:
    first, newest = _snapshots(store, 2)
    pin(store, DEMO, first, "the weights  of\nthe paper")
    pin(store, DEMO, newest, "latest")
    assert pinned(store, DEMO) == {first: "the weights of the paper", newest: "latest"}
    assert pinned(store, OTHER) == {}
    for snapshot in (first, newest):
        with pytest.raises(SnapshotKept, match=r"is pinned \((the weights of|latest)"):
            delete_snapshot(store, DEMO, snapshot, even_newest=newest)
    unpin(store, DEMO, first)
    unpin(store, DEMO, first)
    delete_snapshot(store, DEMO, first)
    assert pinned(store, DEMO) == {newest: "latest"}


def test_a_pin_needs_a_reason_and_a_snapshot(store: MemoryStore) -> None:
    (only,) = _snapshots(store, 1)
    for reason in ("", " \n ", "x" * (MOST_REASON + 1)):
        with pytest.raises(InvalidInput, match="a pin needs a reason of 1 to 500 characters"):
            pin(store, DEMO, only, reason)
    with pytest.raises(SnapshotMissing, match="nothing was pinned"):
        pin(store, OTHER, only, "why")
    assert pinned(store, OTHER) == pinned(store, DEMO) == {}


def test_a_damaged_pin_still_pins(store: MemoryStore) -> None:
    first, _ = _snapshots(store, 2)
    store.put(ObjectKey(f"workspaces/demo/pins/{first}"), b"\xff{")
    store.put(ObjectKey("workspaces/demo/pins/notes.txt"), b"somebody else's")
    assert pinned(store, DEMO) == {first: "the reason cannot be read"}
    with pytest.raises(SnapshotKept, match="is pinned"):
        delete_snapshot(store, DEMO, first)


class _PinnedAtTheLastMoment:
    """A store where another run pins a snapshot between the deletion's look and its delete."""

    def __init__(self, store: MemoryStore, snapshot: SnapshotId) -> None:
        self._store, self._snapshot = store, snapshot

    def __getattr__(self, name: str) -> object:
        return getattr(self._store, name)

    def delete(self, keys: Iterable[ObjectKey]) -> None:
        pin(self._store, DEMO, self._snapshot, "just in time")
        self._store.delete(keys)


def test_a_pin_made_while_the_snapshot_is_deleted_brings_it_back(store: MemoryStore) -> None:
    first, _ = _snapshots(store, 2)
    before = store.get(manifest_key(DEMO, first), max_bytes=1000)
    racing = _PinnedAtTheLastMoment(store, first)
    with pytest.raises(SnapshotKept, match="just in time"):
        delete_snapshot(racing, DEMO, first)  # type: ignore[arg-type]
    assert store.get(manifest_key(DEMO, first), max_bytes=1000) == before
