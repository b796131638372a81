"""What a quick look finds, what reading the bytes adds, and which snapshots the faults damage."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from tests.fixtures.clocked_agent import ClockedStore, NearAgent
from tests.fixtures.engine import WORKSPACE
from tests.fixtures.memory_store import MemoryStore
from tests.fixtures.trees import let_settle
from torpor.control.upkeep.pins import pin
from torpor.control.upkeep.verification import (
    SHOWN,
    SnapshotVerdict,
    Verification,
    quick_look,
    to_verify,
)
from torpor.control.upkeep.verify_report import MOST_NAMED, MOST_VERDICTS, VerifyReport
from torpor.shared.errors import SnapshotMissing, StoreUnavailable
from torpor.shared.format.names import manifest_key, packs_prefix
from torpor.shared.transfer.transfer import Transfer
from torpor.shared.values import KIB, ObjectKey, SnapshotId, StoredObject


class HidingStore(ClockedStore):
    """Shows no MD5s, as stores with keys of the customer's do, or another one for all."""

    shown: str | None = None

    def list(self, prefix: str) -> Iterator[StoredObject]:
        return (msgspec.structs.replace(found, md5=self.shown) for found in super().list(prefix))


@pytest.fixture
def store(memory_store: MemoryStore) -> ClockedStore:
    return ClockedStore(memory_store)


@pytest.fixture
def machine(store: ClockedStore, tmp_path: Path) -> Iterator[NearAgent]:
    machine = NearAgent(store, tmp_path / "home", tmp_path / "workspace")
    machine.root.mkdir()
    grow(machine, 1)
    yield machine
    machine.runs.close()


def grow(machine: NearAgent, seed: int) -> None:
    for number in range(3):
        big = random.Random(seed * 10 + number).randbytes(1200 * KIB)
        (machine.root / f"big-{seed}-{number}").write_bytes(big)
    let_settle()


def looked(machine: NearAgent, store: ClockedStore | None = None) -> Verification:
    at = store or machine.store
    return quick_look(at, WORKSPACE, machine.seal, to_verify(at, WORKSPACE))


def report(found: Verification) -> VerifyReport:
    return VerifyReport.of("full", found, found.verdicts(), {})


def full_report(machine: NearAgent) -> VerifyReport:
    found = looked(machine)
    machine.examine(found)
    return report(found)


def only_pack(store: ClockedStore) -> ObjectKey:
    (found,) = store.list(packs_prefix(WORKSPACE))
    return found.key


def test_a_store_that_hides_md5s_leaves_packs_unproven_until_they_are_read(
    machine: NearAgent, store: ClockedStore
) -> None:
    machine.hibernated()
    quick = looked(machine, HidingStore(store.real))
    assert len(quick.unproven) == 1
    assert "a full verify reads them" in report(quick).title()
    assert not report(quick).failed
    machine.examine(quick)
    assert quick.unproven == set()


def test_a_longer_object_is_named_though_no_file_is_lost(
    machine: NearAgent, store: ClockedStore
) -> None:
    snapshot = machine.hibernated()
    key = only_pack(store)
    store.put(key, store.get(key, max_bytes=1 << 30) + b"more")
    (quick,) = looked(machine).verdicts()
    assert (quick.damaged_files, quick.objects) == (3, [key])  # it was not read
    found = full_report(machine)
    assert found.failed and found.whole == []
    assert found.restorable == [snapshot]
    assert "every file can be restored, 1 objects differ from what was written" in found.title()


def test_what_reading_proves_right_is_right_whatever_the_etag_says(
    machine: NearAgent, store: ClockedStore
) -> None:
    snapshot = machine.hibernated()
    lying = HidingStore(store.real)
    lying.shown = "0" * 32
    lied_to = looked(machine, lying)
    assert {pack.hex() for pack in lied_to.faults} == {only_pack(store).rsplit("/")[-1]}
    machine.examine(lied_to)
    assert report(lied_to).whole == [snapshot]


def test_a_fault_in_transit_disappears(
    machine: NearAgent, store: ClockedStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    snapshot = machine.hibernated()
    original = Transfer.get_ranges
    flips = iter([True])

    def flipping(self: Transfer, *args: object, **options: object) -> Iterator[memoryview]:
        for view in original(self, *args, **options):  # type: ignore[arg-type]
            if len(view) > 100 * KIB and next(flips, False):
                view[7] ^= 1
            yield view

    monkeypatch.setattr(Transfer, "get_ranges", flipping)
    assert full_report(machine).whole == [snapshot]
    assert next(flips, None) is None


def test_a_store_that_is_away_is_no_verdict(
    machine: NearAgent, store: ClockedStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine.hibernated()
    found = looked(machine)

    def away(self: Transfer, *_: object, **__: object) -> Iterator[memoryview]:
        raise StoreUnavailable("the store is away")
        yield

    monkeypatch.setattr(Transfer, "get_ranges", away)
    with pytest.raises(StoreUnavailable):
        machine.examine(found)


def test_a_pinned_snapshot_that_is_gone_is_missed(machine: NearAgent, store: ClockedStore) -> None:
    first = machine.hibernated()
    grow(machine, 2)
    second = machine.hibernated()
    pin(store, WORKSPACE, first, "the weights of the paper")
    store.delete([manifest_key(WORKSPACE, first)])
    found = report(looked(machine))
    assert found.whole == [second]
    assert found.damaged[0].snapshot == first
    assert "is gone" in found.damaged[0].fault


def test_nothing_to_verify_is_no_success(store: ClockedStore) -> None:
    with pytest.raises(SnapshotMissing, match="nothing to verify"):
        to_verify(store, WORKSPACE)


def test_another_key_is_reported_for_each_snapshot(machine: NearAgent, store: ClockedStore) -> None:
    machine.hibernated()
    machine.store_key = bytes(32)
    found = report(looked(machine))
    assert "not sealed" in found.title()
    assert found.whole == []


def test_a_fault_is_put_down_to_every_snapshot_that_it_concerns_and_no_other(
    machine: NearAgent, store: ClockedStore
) -> None:
    first = machine.hibernated()
    shared = only_pack(store)
    grow(machine, 2)
    second = machine.hibernated()
    for path in machine.root.glob("big-1-*"):
        path.unlink()
    third = machine.hibernated()
    store.delete([shared])
    found = full_report(machine)
    assert found.whole == [third]
    damaged = [(verdict.snapshot, verdict.damaged_files) for verdict in found.damaged]
    assert damaged == [(second, 3), (first, 3)]
    assert found.damaged[0].paths == [f"{machine.root}/big-1-{n}" for n in range(3)]
    assert f"the newest that can be restored whole is {third}" in found.title()
    assert len(found.rows()) == 3


def test_manifests_that_disagree_are_both_looked_into(
    machine: NearAgent, store: ClockedStore
) -> None:
    """A hostile manifest may cut a pack otherwise; the honest one's verdict stays."""
    honest = machine.hibernated()
    found = looked(machine)
    (pack, chunks), *_ = found.works()
    shifted = [msgspec.structs.replace(chunk, offset=chunk.offset + 1) for chunk in chunks[:-1]]
    for chunk in shifted:
        found._chunks[pack][(chunk.offset, chunk.name)] = chunk
    works = found.works()
    assert [work[0] for work in works] == [pack, pack]
    assert sum(len(work[1]) for work in works) == len(chunks) + len(shifted)
    machine.examine(found)
    (verdict,) = found.verdicts()
    assert verdict.snapshot == honest
    assert verdict.damaged_files == 0  # no file here uses those other offsets


def test_a_report_is_bounded(machine: NearAgent) -> None:
    machine.hibernated()
    names = [SnapshotId(f"20270101T{n // 60:04d}{n % 60:02d}Z-{n:08x}") for n in range(210)]
    objects = [ObjectKey(f"workspaces/{WORKSPACE}/packs/00/{n:032x}") for n in range(SHOWN)]
    verdicts = [
        SnapshotVerdict(name, "", 9999, 999, ["p" * 150] * SHOWN, 99, objects) for name in names
    ]
    found = VerifyReport.of("full", looked(machine), verdicts, {})
    assert found.damaged_count == 210
    assert len(found.damaged) == MOST_VERDICTS
    assert len(found.rows()) == MOST_NAMED
    assert len(msgspec.json.encode(found)) < 64 * KIB
    assert found.snapshot_count == 210
