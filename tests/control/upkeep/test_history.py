"""Which snapshots count, and which machine each is of."""

from __future__ import annotations

from datetime import datetime, timedelta, timezone

import msgspec
import pytest

from tests.fixtures.manifests import PLAIN, honest
from tests.fixtures.memory_store import MemoryStore
from tests.fixtures.records import put_record
from torpor.control.safety import Verified, verify_snapshot
from torpor.control.store.manifests import find_snapshot, open_manifest
from torpor.control.store.memory import md5_of
from torpor.control.store.receipts import newest_verified, verified_snapshots
from torpor.control.upkeep.deletion import delete_snapshot
from torpor.control.upkeep.history import newest_that_counts, taken_snapshots
from torpor.shared.errors import SnapshotDamaged, SnapshotKept
from torpor.shared.format.manifest import encode_manifest
from torpor.shared.format.names import manifest_key, pack_key
from torpor.shared.values import ObjectKey, SnapshotId, WorkspaceName, new_snapshot_id

DEMO = WorkspaceName("demo")
BODY = b"x" * 300


def _pack(snapshot: SnapshotId) -> ObjectKey:
    return pack_key(DEMO, snapshot[-8:].encode() * 2)


def _put(store: MemoryStore, days_ago: float, machine: str = "a" * 32) -> SnapshotId:
    """A whole snapshot with a pack of its own, which nobody has verified."""
    snapshot = new_snapshot_id(datetime.now(timezone.utc) - timedelta(days=days_ago))
    pack = msgspec.structs.replace(
        honest().packs[0], id=snapshot[-8:].encode() * 2, md5=md5_of(BODY)
    )
    store.put(_pack(snapshot), BODY)
    held = {"files": 1, "bytes": 900, "new_bytes": 300}
    _put_manifest(store, snapshot, packs=[pack], machine=machine, statistics=held)
    return snapshot


def _put_manifest(store: MemoryStore, snapshot: SnapshotId, **changes: object) -> None:
    blob, _ = encode_manifest(honest(snapshot=snapshot, **changes), PLAIN)
    store.put(manifest_key(DEMO, snapshot), blob)


def _verify(store: MemoryStore, snapshot: SnapshotId, machine: str = "") -> Verified:
    found = find_snapshot(store, DEMO, snapshot)
    return verify_snapshot(store, found, PLAIN, machine=machine)


def _named(store: MemoryStore) -> dict[SnapshotId, tuple[str, str]]:
    verified = verified_snapshots(store, DEMO)
    return {snapshot: (found.agent, found.machine) for snapshot, found in verified}


def test_a_snapshot_counts_once_it_was_verified(store: MemoryStore) -> None:
    older, newer = _put(store, 2), _put(store, 1)
    assert newest_verified(store, DEMO) is None
    _verify(store, older, "m-1")
    assert newest_verified(store, DEMO) == older
    _verify(store, newer)
    assert newest_verified(store, DEMO) == newer
    _verify(store, older)  # by a run that does not know the machine
    assert _named(store) == {newer: ("a" * 32, ""), older: ("a" * 32, "m-1")}
    _verify(store, newer, "m-1")
    assert _named(store)[newer] == ("a" * 32, "m-1")


def test_a_receipt_of_an_older_version_learns_what_the_snapshot_holds_and_keeps_the_rest(
    store: MemoryStore,
) -> None:
    snapshot = _put(store, 1)
    found = find_snapshot(store, DEMO, snapshot)
    verify_snapshot(store, found, PLAIN, machine="m-1", made_by="backup")
    (stored,) = store.list("workspaces/demo/verified/")
    ((_, whole),) = verified_snapshots(store, DEMO)
    older = {**msgspec.to_builtins(whole), "files": None, "bytes": None, "new_bytes": None}
    put_record(store, stored.key, older)
    _verify(store, snapshot)
    assert [*verified_snapshots(store, DEMO)] == [(snapshot, whole)]
    assert (whole.machine, whole.made_by, whole.files) == ("m-1", "backup", 1)
    assert (whole.bytes, whole.new_bytes) == (900, 300)


@pytest.mark.rule(11)
def test_a_snapshot_that_lost_a_pack_counts_no_more(store: MemoryStore) -> None:
    older, newer = _put(store, 2), _put(store, 1)
    for snapshot in (older, newer):
        _verify(store, snapshot)
    store.delete([_pack(newer)])
    with pytest.raises(SnapshotDamaged, match="1 of 1 packs missing"):
        _verify(store, newer)
    assert newest_verified(store, DEMO) == older


@pytest.mark.rule(11)
@pytest.mark.parametrize("hidden", [False, True])
def test_a_manifest_under_a_verified_name_does_not_inherit_that(
    store: MemoryStore, hidden: bool
) -> None:
    snapshot = _put(store, 1)
    if hidden:  # a store whose ETags are no MD5s
        store.hide_md5(manifest_key(DEMO, snapshot))
    _verify(store, snapshot)
    blob = store.get(manifest_key(DEMO, snapshot), max_bytes=1 << 20)
    manifest, _ = open_manifest(store, DEMO, snapshot, PLAIN)
    other, _ = encode_manifest(msgspec.structs.replace(manifest, run="nur"), PLAIN)
    assert len(other) == len(blob)
    store.put(manifest_key(DEMO, snapshot), other)
    if hidden:
        store.hide_md5(manifest_key(DEMO, snapshot))
    assert newest_verified(store, DEMO) is None
    store.put(manifest_key(DEMO, snapshot), blob)
    assert newest_verified(store, DEMO) == snapshot


def test_a_deleted_snapshot_leaves_no_receipt_and_the_newest_verified_stays(
    store: MemoryStore,
) -> None:
    oldest, sure, newest = (_put(store, days) for days in (3, 2, 1))
    for snapshot in (oldest, sure):
        _verify(store, snapshot)
    with pytest.raises(SnapshotKept, match=f"{sure} is the newest verified one"):
        delete_snapshot(store, DEMO, sure)
    delete_snapshot(store, DEMO, oldest)
    delete_snapshot(store, DEMO, newest, even_newest=newest)
    (receipt,) = store.list("workspaces/demo/verified/")
    assert receipt.key == f"workspaces/demo/verified/{sure}"


@pytest.mark.rule(11)
def test_what_nobody_verified_is_looked_at_once(store: MemoryStore) -> None:
    """Snapshots of older versions have no receipts."""
    whole, damaged, unreadable, known = (_put(store, days) for days in (4, 3, 2, 1))
    _verify(store, known, "m-1")
    store.delete([_pack(damaged)])
    store.put(manifest_key(DEMO, unreadable), b"TORPOR\r\n and no more")
    taken = [*taken_snapshots(store, DEMO, PLAIN, honest().roots)]
    assert [(seen.snapshot, seen.verified, seen.agent, seen.machine) for seen in taken] == [
        (whole, True, "a" * 32, ""),
        (damaged, False, "a" * 32, ""),
        (unreadable, False, "", ""),
        (known, True, "a" * 32, "m-1"),
    ]
    for seen in taken:  # by the store's clock
        assert seen.stored_unix == store.head(manifest_key(DEMO, seen.snapshot)).modified_unix
    assert _named(store).keys() == {whole, known}


def test_the_newest_that_counts_is_found_below_damaged_ones(store: MemoryStore) -> None:
    oldest, sure, whole, damaged = (_put(store, days) for days in (4, 3, 2, 1))
    _verify(store, sure)
    store.delete([_pack(damaged), _pack(oldest)])
    newest, faults = newest_that_counts(store, DEMO, PLAIN, honest().roots)
    assert newest == whole
    assert [damaged in fault for fault in faults] == [True]
    store.delete([manifest_key(DEMO, sure), manifest_key(DEMO, whole)])
    assert newest_that_counts(store, DEMO, PLAIN, honest().roots).verified is None


def test_a_hostile_name_of_a_machine_costs_no_receipt(store: MemoryStore) -> None:
    endless, nameless = _put(store, 2, machine="x" * 100_000), _put(store, 1, machine="")
    for snapshot in (endless, nameless):
        _verify(store, snapshot)
    assert _named(store) == {endless: ("x" * 100, ""), nameless: ("unnamed", "")}
