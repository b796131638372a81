"""A deletion takes one manifest, and never one that is pinned or the newest."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime, timezone

import pytest

from tests.fixtures.faulty_stores import ShortListings
from tests.fixtures.memory_store import MemoryStore
from tests.fixtures.records import put_record, read_record
from torpor.control.store.deletion_records import Deletions
from torpor.control.upkeep.deletion import delete_snapshot
from torpor.control.upkeep.pins import MOST_REASON, pin, pinned, unpin
from torpor.shared.errors import (
    InvalidInput,
    SnapshotKept,
    SnapshotMissing,
    StoreCorrupt,
    StoreError,
)
from torpor.shared.format.names import manifest_key, new_pack_key
from torpor.shared.values import ObjectKey, SnapshotId, WorkspaceName, new_snapshot_id

DEMO, OTHER = WorkspaceName("demo"), WorkspaceName("other")


def _snapshots(store: MemoryStore, count: int, workspace: WorkspaceName = DEMO) -> list[SnapshotId]:
    made: list[SnapshotId] = []
    for _ in range(count):
        made.append(new_snapshot_id(datetime.now(timezone.utc), made[-1] if made else None))
        store.put(manifest_key(workspace, made[-1]), f"manifest {made[-1]}".encode())
    return made


def test_a_deletion_takes_the_manifest_and_the_receipt_and_leaves_a_record(
    store: MemoryStore,
) -> None:
    first, _ = _snapshots(store, 2)
    _snapshots(store, 1, OTHER)
    store.put(new_pack_key(DEMO), b"pack")
    store.put(ObjectKey(f"workspaces/demo/verified/{first}"), b"a receipt")
    before = {found.key for found in store.list("")}
    delete_snapshot(store, DEMO, first, why="a test")
    record = ObjectKey(f"workspaces/demo/deleted/{first}")
    after = {found.key for found in store.list("")}
    assert before - after == {manifest_key(DEMO, first), f"workspaces/demo/verified/{first}"}
    assert after - before == {record}
    deletion = Deletions(store, DEMO).of(first)
    assert deletion is not None and (deletion.snapshot, deletion.why) == (first, "a test")
    put_record(store, record, read_record(store, record) | {"version": 2})
    with pytest.raises(StoreError, match=f"{record} in .* is not what this torpor writes"):
        Deletions(store, DEMO).of(first)
    with pytest.raises(SnapshotMissing, match=f"no snapshot {first} in {store.address}"):
        delete_snapshot(store, DEMO, first)


@pytest.mark.rule(11)
def test_the_newest_goes_only_when_it_is_named_as_the_newest(store: MemoryStore) -> None:
    first, newest = _snapshots(store, 2)
    for even_newest in (None, first):
        with pytest.raises(SnapshotKept, match=r"the newest of workspace demo .*even_newest"):
            delete_snapshot(store, DEMO, newest, even_newest=even_newest)
    delete_snapshot(store, DEMO, newest, even_newest=newest)
    with pytest.raises(SnapshotKept, match="the newest"):
        delete_snapshot(store, DEMO, first)  # it is the newest now


@pytest.mark.rule(13)
def test_a_listing_that_lacks_the_newest_lets_nobody_delete_it_by_chance(
    store: MemoryStore,
) -> None:
    _, newest = _snapshots(store, 2)
    short = ShortListings(store)
    short.hidden = {manifest_key(DEMO, newest)}
    with pytest.raises(StoreCorrupt, match=f"has snapshot {newest} .* but its listing lacks it"):
        delete_snapshot(short, DEMO, newest)
    assert store.head(manifest_key(DEMO, newest)) is not None


@pytest.mark.rule(11)
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
    assert pinned(store, DEMO) == {first: "torpor did not write its reason, or cannot read it"}
    with pytest.raises(SnapshotKept, match="is pinned"):
        delete_snapshot(store, DEMO, first)


@pytest.mark.rule(11)
def test_a_pin_made_while_the_snapshot_is_deleted_brings_it_back(
    store: MemoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another run pins it between the deletion's look and its delete."""
    first, _ = _snapshots(store, 2)
    before = store.get(manifest_key(DEMO, first), max_bytes=1000)

    receipt = ObjectKey(f"workspaces/demo/verified/{first}")
    store.put(receipt, b"a receipt")

    def delete(keys: Iterable[ObjectKey]) -> None:
        wanted = list(keys)
        if manifest_key(DEMO, first) in wanted:
            pin(store, DEMO, first, "just in time")
        MemoryStore.delete(store, wanted)

    monkeypatch.setattr(store, "delete", delete)
    with pytest.raises(SnapshotKept, match="just in time"):
        delete_snapshot(store, DEMO, first)
    assert store.get(manifest_key(DEMO, first), max_bytes=1000) == before
    assert store.get(receipt, max_bytes=1000) == b"a receipt"
    assert Deletions(store, DEMO).times() == {}
