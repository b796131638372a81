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


def _snapshots(store: MemoryStore, count: int, workspace: WorkspaceName = DEMO) -> list[SnapshotId]:
    made: list[SnapshotId] = []
    for _ in range(count):
        made.append(new_snapshot_id(datetime.now(timezone.utc), made[-1] if made else None))
        store.put(manifest_key(workspace, made[-1]), f"manifest {made[-1]}".encode())
    return made


def test_a_deletion_takes_the_manifest_and_nothing_else(store: MemoryStore) -> None:
    first, _ = _snapshots(store, 2)
    _snapshots(store, 1, OTHER)
    store.put(new_pack_key(DEMO), b"pack")
    before = [found.key for found in store.list("")]
    delete_snapshot(store, DEMO, first)
    before.remove(manifest_key(DEMO, first))
    assert [found.key for found in store.list("")] == before
    with pytest.raises(SnapshotMissing, match=f"no snapshot {first} in {store.address}"):
        delete_snapshot(store, DEMO, first)


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


def test_a_pin_made_while_the_snapshot_is_deleted_brings_it_back(
    store: MemoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another run pins it between the deletion's look and its delete."""
    first, _ = _snapshots(store, 2)
    before = store.get(manifest_key(DEMO, first), max_bytes=1000)

    def delete(keys: Iterable[ObjectKey]) -> None:
        pin(store, DEMO, first, "just in time")
        MemoryStore.delete(store, keys)

    monkeypatch.setattr(store, "delete", delete)
    with pytest.raises(SnapshotKept, match="just in time"):
        delete_snapshot(store, DEMO, first)
    assert store.get(manifest_key(DEMO, first), max_bytes=1000) == before
