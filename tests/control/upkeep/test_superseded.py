"""What may go, and what torpor pins because it alone holds files that a machine missed."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator

import pytest

from tests.fixtures.manifests import PLAIN
from tests.fixtures.memory_store import MemoryStore
from tests.fixtures.small_saves import DEMO, put_save, verified_save
from torpor.control.store.catalog import Catalog
from torpor.control.store.manifests import snapshot_ids
from torpor.control.store.receipts import withdraw_receipt
from torpor.control.upkeep.autosaves import delete_superseded
from torpor.control.upkeep.deletion import delete_snapshot
from torpor.control.upkeep.pins import holds, pin, pinned, unpin
from torpor.control.upkeep.superseded import Succession
from torpor.shared.errors import SnapshotKept, SnapshotMissing, StoreArchived
from torpor.shared.format.names import manifest_key
from torpor.shared.values import ObjectKey, SnapshotId, StoredObject

pytestmark = pytest.mark.rule(11)

MANY, FEW = 40, 1
"""Files of a workspace, and what a machine is left with whose disk was not mounted."""


@pytest.fixture
def store() -> MemoryStore:
    return MemoryStore(itertools.count(1.0).__next__)


class History:
    """Snapshots one after the other; a backup's is verified and compared."""

    def __init__(self, store: MemoryStore) -> None:
        self.store = store
        self.line: list[SnapshotId] = []

    def unverified(self, holds: int, other: int = 0, **statistics: int) -> SnapshotId:
        at = 10.0 * len(self.line)
        saved = put_save(self.store, at, self.line, holds=holds, other=other, **statistics)
        self.line.insert(0, saved)
        return saved

    def backup(self, holds: int, other: int = 0) -> SnapshotId:
        snapshot = self.unverified(holds, other)
        Succession(self.store, DEMO, PLAIN).hold(snapshot)
        verified = verified_save(self.store, snapshot, "backup")
        delete_superseded(self.store, verified, PLAIN)
        return verified.snapshot

    def end(self, *wanted: SnapshotId) -> list[SnapshotId]:
        """What of this a rule deletes that wants all of it to go."""
        return Succession(self.store, DEMO, PLAIN).end(wanted, "no rule keeps it").deleted

    def delete_by_name(self, snapshot: SnapshotId) -> None:
        Succession(self.store, DEMO, PLAIN).named(snapshot)
        delete_snapshot(self.store, DEMO, snapshot, named=True)

    @property
    def held(self) -> Iterable[SnapshotId]:
        return [*holds(self.store, DEMO)]


@pytest.fixture
def history(store: MemoryStore) -> History:
    return History(store)


def test_a_loss_stays_known_when_new_files_make_up_for_it(history: History) -> None:
    """The machine was lost before anybody verified the save that shows the loss."""
    holder = history.backup(MANY)
    shows = history.unverified(FEW, own_save=1, autosave=1)
    history.backup(FEW, other=MANY)
    assert shows not in snapshot_ids(history.store, DEMO)
    assert history.held == [holder]
    assert holder not in history.end(holder)


def test_a_loss_stays_known_when_its_witness_goes_and_the_holder_was_kept(
    history: History,
) -> None:
    holder, witness = history.backup(MANY), history.backup(FEW)
    history.backup(FEW)
    assert history.end(witness) == [witness]
    history.backup(FEW)
    assert history.end(holder) == []
    assert history.held == [holder]


def test_a_loss_stays_known_when_its_user_deletes_the_snapshot_that_shows_it(
    history: History,
) -> None:
    holder = history.backup(MANY)
    witness = history.unverified(FEW)
    history.unverified(FEW)
    history.delete_by_name(witness)
    assert history.held == [holder]
    history.backup(FEW)
    assert history.end(holder) == []


def test_a_loss_stays_known_where_the_run_that_showed_it_was_killed_before_it_looked(
    history: History,
) -> None:
    """Another run has verified its snapshot since."""
    holder, witness = history.backup(MANY), history.unverified(FEW)
    verified_save(history.store, witness)
    assert history.held == []
    history.backup(FEW)
    assert history.held == [holder]


def test_a_loss_stays_known_when_the_branch_goes_that_still_had_the_files(
    history: History,
) -> None:
    holder = history.backup(MANY)
    branch = put_save(history.store, 5, [holder], holds=MANY + 1)
    history.backup(FEW)
    verified = verified_save(history.store, branch, "hibernate")
    delete_superseded(history.store, verified, PLAIN)
    assert history.held == []
    history.delete_by_name(branch)
    assert history.held == [holder]


def test_a_loss_stays_known_where_a_machine_went_back_to_the_holder_and_changed_nothing(
    history: History,
) -> None:
    """No wake brings or names what it stored: it has no work of its own."""
    holder, _ = history.backup(MANY), history.backup(FEW)
    equal = put_save(history.store, 90, [holder], holds=MANY, content=holder)
    delete_superseded(history.store, verified_save(history.store, equal, "backup"), PLAIN)
    assert history.held == [holder]
    assert history.end(holder) == []


def test_a_lineage_in_a_circle_ends_no_look(store: MemoryStore) -> None:
    """Of two that are equal to a third which is gone; and of a machine that lies."""
    gone = put_save(store, 0, [], holds=MANY)
    pair = [put_save(store, at, [gone], holds=MANY, content=gone) for at in (10, 20)]
    store.delete([manifest_key(DEMO, gone)])
    for one in pair:
        assert Succession(store, DEMO, PLAIN).hold(one) == []


def test_an_unreadable_witness_that_was_verified_lets_no_holder_go(history: History) -> None:
    holder, witness, newest = history.backup(MANY), history.unverified(FEW), history.line
    verified_save(history.store, witness, "backup")
    history.backup(FEW)
    seen = history.store.get

    def broken(key: ObjectKey, *, max_bytes: int) -> bytes:
        return b"" if key == manifest_key(DEMO, witness) else seen(key, max_bytes=max_bytes)

    history.store.get = broken  # type: ignore[method-assign]
    assert newest and holder not in history.end(holder)


def test_a_users_own_pin_neither_ends_nor_replaces_torpors(history: History) -> None:
    holder, _ = history.backup(MANY), history.backup(FEW)
    pin(history.store, DEMO, holder, "the best weights")
    with pytest.raises(SnapshotKept, match="it alone holds 39 files"):
        unpin(history.store, DEMO, holder)
    assert history.end(holder) == []


def test_a_holder_that_another_run_deletes_at_this_moment_ends_no_look_and_keeps_its_witness(
    history: History, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A backup goes on, and what shows the loss stays until the next one has looked."""
    holder, witness = history.backup(MANY), history.unverified(FEW)
    newest = history.unverified(FEW)
    verified = verified_save(history.store, newest)

    def gone(*_: object) -> None:
        raise SnapshotMissing("it is gone at this moment")

    with monkeypatch.context() as moment:
        moment.setattr("torpor.control.upkeep.superseded.hold", gone)
        assert Succession(history.store, DEMO, PLAIN).hold(newest) == []
        ended = Succession.of(history.store, verified, PLAIN).end([witness], "asked")
    assert ended[:2] == ([], [])
    assert history.end(witness) == [witness]
    assert history.held == [holder]


def test_a_verified_snapshot_stays_where_only_an_unverified_one_is_equal(
    store: MemoryStore,
) -> None:
    gone = put_save(store, 0, [], holds=MANY)
    one, other = (put_save(store, at, [gone], holds=MANY, content=gone) for at in (10, 20))
    verified = verified_save(store, one, "hibernate")
    put_save(store, 30, [])  # the newest of all, which nothing deletes
    store.delete([manifest_key(DEMO, gone)])
    assert Succession.of(store, verified, PLAIN).end([one], "asked")[:2] == ([], [])
    assert Succession.of(store, verified, PLAIN).end([other], "asked").deleted == [other]


def test_what_lies_in_an_archive_is_not_whole_and_ends_no_look(
    history: History, monkeypatch: pytest.MonkeyPatch
) -> None:
    holder, _ = history.backup(MANY), history.unverified(FEW)

    def archived(*_: object, **__: object) -> None:
        raise StoreArchived("its packs are in an archive")

    monkeypatch.setattr("torpor.control.upkeep.superseded.check_whole", archived)
    history.backup(FEW)
    assert history.held == [holder]


def test_files_that_are_half_back_are_not_back(history: History) -> None:
    """A copy that is under way."""
    holder, _ = history.backup(MANY), history.backup(FEW)
    history.backup(MANY // 2 + 2)
    assert history.held == [holder]
    history.backup(MANY)
    assert history.held == []


def test_a_loss_that_is_over_keeps_nothing(history: History) -> None:
    """The disk is back: what was pinned for it may go, as may what shows it."""
    first, witness, back = history.backup(MANY), history.backup(FEW), history.backup(MANY)
    assert history.held == []
    assert history.end(first, witness, back) == [first, witness]


def test_a_pin_of_torpor_ends_with_the_deletion_by_name_and_with_nothing_else(
    history: History,
) -> None:
    holder, newest = history.backup(MANY), history.backup(FEW)
    with pytest.raises(SnapshotKept, match="it alone holds 39 files"):
        unpin(history.store, DEMO, holder)
    with pytest.raises(SnapshotKept, match="is pinned"):
        delete_snapshot(history.store, DEMO, holder)
    history.delete_by_name(holder)
    assert snapshot_ids(history.store, DEMO) == [newest]
    assert pinned(history.store, DEMO) == {}


def test_a_users_pin_of_what_torpor_pinned_is_the_users(history: History) -> None:
    holder, _ = history.backup(MANY), history.backup(FEW)
    pin(history.store, DEMO, holder, "the best weights")
    with pytest.raises(SnapshotKept, match="the best weights"):
        history.delete_by_name(holder)
    history.backup(MANY)
    assert pinned(history.store, DEMO) == {holder: "the best weights"}


def test_what_a_replica_lacks_and_its_origin_has_goes(store: MemoryStore) -> None:
    """The user of a replica deleted a data set that the first machine keeps."""
    origin = put_save(store, 0, [], holds=MANY)
    verified_save(store, origin, "backup")
    later = put_save(store, 10, [origin], holds=MANY)
    of_replica = put_save(store, 20, [origin], holds=FEW)
    verified = verified_save(store, later, "backup")
    verified_save(store, of_replica, "hibernate")
    ended = Succession.of(store, verified, PLAIN).end([origin, later, of_replica], "asked")
    assert ended[:2] == ([origin], [])


def test_a_replica_that_changed_nothing_goes_where_its_origin_stays(store: MemoryStore) -> None:
    origin = put_save(store, 0, [], holds=MANY)
    verified = verified_save(store, origin, "backup")
    equal = put_save(store, 10, [origin], holds=MANY, content=origin)
    verified_save(store, equal, "hibernate")
    other = put_save(store, 20, [origin], holds=MANY)
    verified_save(store, other, "hibernate")
    assert Succession.of(store, verified, PLAIN).end([equal, other], "asked").deleted == [equal]


def test_what_cannot_be_read_stays_and_stands_for_nothing(store: MemoryStore) -> None:
    first = put_save(store, 0, [], holds=MANY)
    broken = put_save(store, 10, [first], holds=FEW)
    newest = put_save(store, 20, [broken, first], holds=MANY)
    verified = verified_save(store, newest, "backup")
    store.put(manifest_key(DEMO, broken), b"no manifest")
    assert Succession.of(store, verified, PLAIN).end([first, broken], "asked").deleted == [first]


class LaggingStore(MemoryStore):
    """Its listing still shows ``ghost``, which was deleted."""

    ghost: StoredObject | None = None

    def list(self, prefix: str) -> Iterator[StoredObject]:
        found = [*super().list(prefix)]
        if self.ghost is not None and self.ghost.key.startswith(prefix):
            found.append(self.ghost)
        return iter(sorted(found, key=lambda one: one.key))


@pytest.mark.parametrize("lags", [True, False])
def test_nothing_goes_for_a_snapshot_whose_receipt_is_withdrawn_meanwhile(lags: bool) -> None:
    """A look at its bytes has found it damaged, and no listing shows that."""
    store = LaggingStore(itertools.count(1.0).__next__)
    history = History(store)
    for _ in range(20):
        history.backup(MANY)
    damaged, good = history.line[:2]
    verified_save(store, put_save(store, 5000, history.line[-1:]), "backup")  # another line
    Catalog(store, DEMO).receipts()
    key = ObjectKey(f"workspaces/{DEMO}/verified/{damaged}")
    shown, before = store.head(key), Succession(store, DEMO, PLAIN)
    withdraw_receipt(store, DEMO, damaged)
    store.ghost = shown if lags else None
    succession = Succession(store, DEMO, PLAIN) if lags else before
    assert succession.end([good], "no rule keeps it").deleted == []
    assert good in snapshot_ids(store, DEMO)


def test_what_a_replica_stored_again_is_held_when_its_origin_is_deleted_by_name(
    store: MemoryStore,
) -> None:
    """Nothing else names the replica's snapshot: it has no work of its own, and is no tip."""
    history = History(store)
    origin = history.backup(MANY)
    replica = put_save(store, 5000, [origin], holds=MANY, content=origin)
    verified_save(store, replica, "backup")
    history.backup(FEW)
    assert [*history.held] == [origin]
    history.delete_by_name(origin)
    assert [*history.held] == [replica]
