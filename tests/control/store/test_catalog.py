"""What is known of a workspace's snapshots costs one request, and is never older than the store."""

from __future__ import annotations

from collections import Counter

import msgspec
import pytest

from tests.fixtures.manifests import PLAIN
from tests.fixtures.memory_store import MemoryStore
from tests.fixtures.small_saves import DEMO, put_line, put_save, verified_save
from torpor.control.store import catalog
from torpor.control.store.catalog import FEW, Catalog
from torpor.control.store.manifests import open_manifest
from torpor.control.store.receipts import receipt_of, receipts_prefix, withdraw_receipt
from torpor.control.store.signatures import Signer
from torpor.control.upkeep.lineage import choose_newest
from torpor.shared.errors import (
    StoreArchived,
    StoreCorrupt,
    StoreDenied,
    StoreError,
    StoreUnavailable,
)
from torpor.shared.format.lineage import AUTOSAVE, OWN_SAVE, recorded
from torpor.shared.format.names import manifest_key
from torpor.shared.transfer.retries import Retries
from torpor.shared.values import ObjectKey, SnapshotId, StoredObject

CATALOG = ObjectKey(receipts_prefix(DEMO) + "catalog")


class CountingStore(MemoryStore):
    """Counts what is read; refuses to write a catalog where it ``denies``."""

    def __init__(self) -> None:
        super().__init__()
        self.read_keys: list[ObjectKey] = []
        self.denies = False

    def get(self, key: ObjectKey, *, max_bytes: int) -> bytes:
        self.read_keys.append(key)
        return super().get(key, max_bytes=max_bytes)

    def put(self, key: ObjectKey, body: bytes, **how: object) -> StoredObject:
        if self.denies and key == CATALOG:
            raise StoreDenied("this key may not write")
        return super().put(key, body, **how)  # type: ignore[arg-type]

    def reads(self) -> Counter[str]:
        """How many objects of each kind were read since the last call."""
        kinds = Counter(
            "catalog" if key == CATALOG else key.split("/")[2] for key in self.read_keys
        )
        self.read_keys = []
        return kinds


@pytest.fixture
def store() -> CountingStore:
    return CountingStore()


def _history(store: CountingStore, verified: int, saves: int) -> list[SnapshotId]:
    """A line of verified snapshots, and then autosaves that nobody verified."""
    line = put_line(store, *range(verified))
    for snapshot in line:
        verified_save(store, snapshot, made_by="backup")
    ancestors, own = line[::-1], list[SnapshotId]()
    for at in range(verified, verified + saves):
        kind = {AUTOSAVE: 1, OWN_SAVE: 1}
        content = own[0] if own else None
        own.insert(0, put_save(store, at, ancestors, saves=own, content=content, **kind))
    line += own[::-1]
    store.reads()
    return line


def _facts(store: CountingStore) -> dict[SnapshotId, object]:
    """All that a catalog knows."""
    now = Catalog(store, DEMO)
    receipts = now.receipts()
    rest = {one: now.said(one, PLAIN) for one in now.manifests if one not in receipts}
    now.keep()
    return {**receipts, **rest}


def test_the_second_look_reads_one_object_and_knows_the_same(store: CountingStore) -> None:
    _history(store, 30, 20)
    first = _facts(store)
    assert store.reads() == {"verified": 30, "snapshots": 20}
    assert _facts(store) == first
    assert store.reads() == {"catalog": 1}


def test_a_few_new_snapshots_are_read_each_time_and_more_are_kept(store: CountingStore) -> None:
    line = _history(store, 30, 0)
    _facts(store)
    store.reads()
    for number in range(FEW + 1):
        new = put_save(store, 100 + number, line[::-1])
        verified_save(store, new)
        store.reads()
        _facts(store)
        assert store.reads() == {"catalog": 1, "verified": number + 1}
    _facts(store)
    assert store.reads() == {"catalog": 1}


def test_what_was_written_since_is_read(store: CountingStore) -> None:
    """A receipt that is withdrawn, one that names the machine later, one for what was unverified,
    and another manifest under an old name."""
    line = _history(store, 20, 10)
    line.append(put_save(store, 40))
    _facts(store)
    withdraw_receipt(store, DEMO, line[3])
    verified_save(store, line[4], made_by="hibernate")
    verified_save(store, line[-1])
    blob = store.get(manifest_key(DEMO, line[6]), max_bytes=1 << 20)
    store.put(manifest_key(DEMO, line[5]), blob)
    receipts = Catalog(store, DEMO).receipts()
    assert line[3] not in receipts
    assert receipts[line[4]].made_by == "hibernate"
    assert line[-1] in receipts
    assert line[5] not in receipts
    store.delete([manifest_key(DEMO, line[7])])
    assert line[7] not in Catalog(store, DEMO).receipts()


def test_what_was_kept_is_what_the_receipts_and_manifests_say(store: CountingStore) -> None:
    line = _history(store, 30, 20)
    _facts(store)
    kept = Catalog(store, DEMO)
    for snapshot in line[:30]:
        assert kept.receipt(snapshot) == receipt_of(store, DEMO, snapshot, kept.manifests[snapshot])
    for snapshot in line[30:]:
        manifest, _ = open_manifest(store, DEMO, snapshot, PLAIN)
        assert kept.said(snapshot, PLAIN).lineage == recorded(manifest)
    assert len(recorded(manifest).saves) == 19  # type: ignore[union-attr]


@pytest.mark.parametrize("harm", ["flipped", "of another key", "of nobody", "empty", "gone"])
def test_a_catalog_that_torpor_did_not_write_is_not_believed(
    store: CountingStore, harm: str
) -> None:
    _history(store, 20, 0)
    first = _facts(store)
    blob = store.get(CATALOG, max_bytes=1 << 20)
    half = len(blob) // 2
    record = store.signer.check(CATALOG, blob)
    if harm == "gone":
        store.delete([CATALOG])
    else:
        harmed = {
            "flipped": blob[:half] + bytes([blob[half] ^ 1]) + blob[half + 1 :],
            "of another key": Signer(bytes(32), "").sign(CATALOG, record),
            "of nobody": record,
            "empty": b"",
        }
        store.put(CATALOG, harmed[harm])
    store.reads()
    assert _facts(store) == first
    assert store.reads()["verified"] == 20
    assert _facts(store) == first
    assert store.reads() == {"catalog": 1}, "it was written anew"


def test_a_store_that_lets_nobody_write_costs_requests_only(store: CountingStore) -> None:
    line = _history(store, 20, 0)
    store.denies = True
    for _ in range(2):
        assert _facts(store).keys() == {*line}
        assert store.reads() == {"verified": 20}


def test_a_catalog_of_another_version_is_read_by_nobody_and_replaced(
    store: CountingStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    _history(store, 20, 0)
    with monkeypatch.context() as older:
        older.setattr(catalog, "SHAPE", ["Receipt.version"])
        _facts(store)
    store.reads()
    assert len(_facts(store)) == 20
    assert store.reads()["verified"] == 20
    _facts(store)
    assert store.reads() == {"catalog": 1}


def test_a_catalog_is_read_on_where_only_a_type_has_another_name() -> None:
    """Else each workspace of a store is read anew after an upgrade."""
    names = [field.partition(".")[0] for field in catalog.SHAPE]
    assert [*dict.fromkeys(names)] == ["Receipt", "Said", "Lineage", "_Entry"]


@pytest.mark.parametrize("error", [StoreArchived, StoreDenied, StoreUnavailable, StoreCorrupt])
def test_a_catalog_that_the_store_does_not_give_costs_requests_only(
    store: CountingStore, error: type[StoreError], monkeypatch: pytest.MonkeyPatch
) -> None:
    _history(store, 20, 0)
    first, get = _facts(store), CountingStore.get

    def refuse(self: CountingStore, key: ObjectKey, *, max_bytes: int) -> bytes:
        if key == CATALOG:
            raise error("not this one")
        return get(self, key, max_bytes=max_bytes)

    monkeypatch.setattr(CountingStore, "get", refuse)
    assert _facts(store) == first


def test_a_look_waits_for_no_store_that_is_away_when_it_keeps_what_it_read(
    store: CountingStore,
) -> None:
    _history(store, 20, 0)
    slept: list[float] = []
    patient = Retries(patience_s=3600.0, sleep=slept.append)
    put = store.put

    def away() -> StoredObject:
        raise StoreUnavailable("503 SlowDown")

    store.put = lambda *_, **__: patient.run(away)  # type: ignore[method-assign]
    _facts(store)
    store.put = put  # type: ignore[method-assign]
    assert sum(slept) < 60


def test_what_finds_no_room_is_read_each_time_and_nothing_is_written_for_it(
    store: CountingStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(catalog, "MOST_PLAIN", 20 * 1200)
    _history(store, 60, 0)
    first = _facts(store)
    written = store.head(CATALOG)
    store.reads()
    for _ in range(2):
        assert _facts(store) == first
        assert 30 < store.reads()["verified"] < 60
    assert store.head(CATALOG) == written


def test_where_a_store_shows_no_etag_everything_is_read(
    store: CountingStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    _history(store, 20, 0)
    listed = MemoryStore.list

    def bare(self: MemoryStore, prefix: str) -> object:
        return (msgspec.structs.replace(one, etag="") for one in listed(self, prefix))

    monkeypatch.setattr(MemoryStore, "list", bare)
    for _ in range(2):
        assert len(_facts(store)) == 20
        assert store.reads()["verified"] == 20


def test_a_choice_among_three_hundred_lines_reads_no_more_than_among_three(
    store: CountingStore,
) -> None:
    """Each line began from the first snapshot, on a machine of its own."""
    counts = []
    root = put_line(store, 0.0)
    verified_save(store, root[0])
    for lines in (3, 300):
        for number in range(len([*store.list(receipts_prefix(DEMO))]), lines):
            verified_save(store, put_save(store, number + 1.0, root))
        choose_newest(store, DEMO, PLAIN)
        store.reads()
        chosen = choose_newest(store, DEMO, PLAIN)
        assert len(chosen.aside) >= lines - 3
        counts.append(sum(store.reads().values()))
    assert counts[1] <= counts[0]
