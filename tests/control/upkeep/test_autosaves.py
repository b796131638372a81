"""Autosaves: prune beside them, what they count for, and which of them go."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from tests.control.upkeep.test_prune import delete, fill, packs, prune, restorable
from tests.fixtures.clocked_agent import ClockedStore, NearAgent
from tests.fixtures.engine import WORKSPACE
from tests.fixtures.manifests import PLAIN
from tests.fixtures.memory_store import MemoryStore
from tests.fixtures.own_saves import book_of, saved
from tests.fixtures.small_saves import DEMO, put_save, verified_save
from torpor.control.store.manifests import open_manifest, snapshot_ids
from torpor.control.store.marks import marked_packs
from torpor.control.store.receipts import newest_verified, verified_snapshots
from torpor.control.upkeep.autosaves import KEPT, delete_superseded, thin
from torpor.control.upkeep.history import newest_that_counts, taken_snapshots
from torpor.control.upkeep.lineage import choose_newest
from torpor.control.upkeep.pins import holds, let_go, pin
from torpor.control.upkeep.prune import GRACE_S, YOUNG_S
from torpor.control.upkeep.retention import Retention, judge
from torpor.control.upkeep.superseded import Succession
from torpor.shared.format.lineage import MOST_SAVES
from torpor.shared.format.names import manifest_key, pack_id_of
from torpor.shared.values import SnapshotId
from torpor.shared.wire.autosave import Book
from torpor.shared.wire.job import OwnSave


@pytest.fixture
def clocked(memory_store: MemoryStore) -> ClockedStore:
    return ClockedStore(memory_store)


@pytest.fixture
def machine(clocked: ClockedStore, tmp_path: Path) -> Iterator[NearAgent]:
    machine = NearAgent(clocked, tmp_path / "home", tmp_path / "workspace")
    machine.root.mkdir()
    fill(machine, 1)
    yield machine
    machine.runs.close()


@pytest.fixture
def store() -> MemoryStore:
    return MemoryStore(itertools.count(1.0).__next__)


def _book(machine: NearAgent, basis: SnapshotId) -> Book:
    return msgspec.structs.replace(book_of(machine, machine.root, basis), job="")


def _save(machine: NearAgent, book: Book, *made: OwnSave) -> OwnSave:
    rest = msgspec.structs.replace(
        book, saves=book.saves[len(made) :], packs=book.packs[len(made) :]
    )
    roots = [one.root for one in made]
    return saved(machine, rest, left_s=None, given_unix=0.0, made=roots, scheduled=True)


@pytest.mark.rule(13)
def test_prune_leaves_what_autosaves_name(
    machine: NearAgent, clocked: ClockedStore, tmp_path: Path
) -> None:
    """The second save on a book goes on from the first, and both snapshots before it are gone."""
    base = machine.hibernated()
    clocked.advance(YOUNG_S)
    book = _book(machine, base)
    fill(machine, 2, "first")
    first = _save(machine, book)
    delete(clocked, base)
    delete(clocked, first.snapshot)
    assert prune(machine, without_snapshots=True).plan.unnamed
    fill(machine, 3, "second")
    second = _save(machine, book, first)
    clocked.advance(10 * GRACE_S)
    assert prune(machine).plan.free == []
    assert restorable(machine, tmp_path) == 1
    assert snapshot_ids(clocked, WORKSPACE) == [second.snapshot]


def test_a_save_on_the_next_book_names_no_pack_that_was_marked_before_it(
    machine: NearAgent, clocked: ClockedStore, tmp_path: Path
) -> None:
    base = machine.hibernated()
    clocked.advance(YOUNG_S)
    book = _book(machine, base)
    delete(clocked, base)
    prune(machine, without_snapshots=True)
    fill(machine, 2, "first")
    first = _save(machine, book)  # it may name them: the mark is younger than its book
    marked = marked_packs(clocked, WORKSPACE)
    assert marked <= {pack_id_of(key) for key in packs(clocked)}
    second = _save(machine, _book(machine, first.snapshot))
    manifest, _ = open_manifest(clocked, WORKSPACE, second.snapshot, machine.seal)
    assert not marked & {pack.id for pack in manifest.packs}
    delete(clocked, first.snapshot)
    clocked.advance(GRACE_S)
    prune(machine)
    assert restorable(machine, tmp_path) == 1


def _autosaves(store: MemoryStore, *minutes: float) -> list[SnapshotId]:
    """One after the other, each on top of those before."""
    line: list[SnapshotId] = []
    for at in minutes:
        line.insert(0, put_save(store, at, list(line), own_save=1, autosave=1))
    return line[::-1]


@pytest.mark.rule(13)
def test_autosaves_count_for_no_rule_and_get_no_receipt(store: MemoryStore) -> None:
    kept = put_save(store, 0, [])
    verified_save(store, kept)
    own = _autosaves(store, 10, 20, 30)
    taken = list(taken_snapshots(store, DEMO, PLAIN, ["~/workspace"]))
    judged = {one.snapshot: one.reasons for one in judge(taken, Retention(last=1, daily=1), {})}
    assert "last" in judged[kept][0] or "last" in judged[kept]
    assert all(judged[one][-1] == "its machine made it by itself" for one in own)
    assert newest_that_counts(store, DEMO, PLAIN, ["~/workspace"]) == (kept, [])
    assert [snapshot for snapshot, _ in verified_snapshots(store, DEMO)] == [kept]
    verified_save(store, own[-1])  # as the user may ask for
    assert newest_verified(store, DEMO) == kept
    taken = list(taken_snapshots(store, DEMO, PLAIN, ["~/workspace"]))
    assert [one.snapshot for one in taken if one.autosave] == own


@pytest.mark.rule(13)
def test_superfluous_autosaves_are_deleted_and_no_other_snapshot(store: MemoryStore) -> None:
    users = put_save(store, 0, [])
    own = _autosaves(store, 10, 20, 30, 40, 50)
    pin(store, DEMO, own[0], "the best weights")
    verified_save(store, own[1])  # it stays an autosave
    assert thin(store, DEMO, PLAIN) == own[1:-KEPT]
    assert thin(store, DEMO, PLAIN) == []
    other = put_save(store, 55, [], own_save=1, autosave=1)  # of another line
    verified = put_save(store, 60, [*own[::-1], users])
    late = put_save(store, 52, [own[-1]], own_save=1, autosave=1)  # with a name from before
    assert delete_superseded(store, verified_save(store, verified), PLAIN)[:2] == (own[-KEPT:], [])
    assert snapshot_ids(store, DEMO) == sorted([users, own[0], other, verified, late])


@pytest.mark.rule(13)
def test_a_machine_that_claims_all_older_work_deletes_no_autosave_of_another(
    store: MemoryStore,
) -> None:
    own = _autosaves(store, 10, 20, 30, 40, 50)
    put_save(store, 55, own_save=1, autosave=1)  # its lineage does not say what it goes on from
    assert thin(store, DEMO, PLAIN) == own[:-KEPT]
    verified = verified_save(store, put_save(store, 60))
    assert delete_superseded(store, verified, PLAIN)[:2] == ([], [])
    assert set(own[-KEPT:]) < set(snapshot_ids(store, DEMO))


@pytest.mark.rule(13)
def test_a_verify_of_an_autosave_does_not_keep_it_for_good(store: MemoryStore) -> None:
    own = _autosaves(store, 10, 20, 30, 40, 50)
    verified_save(store, own[0])
    assert newest_verified(store, DEMO) is None
    assert thin(store, DEMO, PLAIN) == own[:-KEPT]


@pytest.mark.rule(13)
def test_an_autosave_that_is_not_whole_is_passed_over_and_named(
    machine: NearAgent, clocked: ClockedStore
) -> None:
    base = machine.hibernated()
    before = set(packs(clocked))
    fill(machine, 2, "new")
    save = _save(machine, _book(machine, base))

    def newest() -> SnapshotId | None:
        found, _, refused, _ = choose_newest(clocked, WORKSPACE, machine.seal)
        passed_over.extend((one.snapshot, one.own) for one, _ in refused)
        return found and found.snapshot

    passed_over: list[tuple[SnapshotId, bool]] = []
    assert newest() == save.snapshot
    clocked.delete(sorted(set(packs(clocked)) - before))
    assert newest() == base
    assert passed_over == [(save.snapshot, True)]
    fill(machine, 3, "newer")
    damaged = machine.hibernated()
    clocked.delete([f"workspaces/{WORKSPACE}/verified/{damaged}"])  # as of a run that was killed
    clocked.delete(sorted(set(packs(clocked)) - before))
    assert newest() == base
    assert passed_over[1:] == [(damaged, False), (save.snapshot, True)]


@pytest.mark.rule(13)
def test_the_last_autosave_with_what_later_ones_miss_stays_through_any_number_of_them(
    store: MemoryStore,
) -> None:
    """A lineage names so many autosaves, and what stays is older than all of them one day."""
    base = put_save(store, 0, [])
    verified_save(store, base)
    covered = put_save(store, 1, [base], holds=30, own_save=1, autosave=1)
    holder = put_save(store, 2, [base], saves=[covered], holds=40, own_save=1, autosave=1)
    line = [holder, covered]
    for minutes in range(3, MOST_SAVES + 5):
        line.insert(
            0, put_save(store, minutes, [base], saves=line[:MOST_SAVES], own_save=1, autosave=1)
        )
        thin(store, DEMO, PLAIN)
    assert snapshot_ids(store, DEMO) == [base, holder, *line[:KEPT][::-1]]
    newest, _ = open_manifest(store, DEMO, line[0], PLAIN)
    assert holder not in newest.environment["lineage"]["saves"]
    why = holds(store, DEMO)
    assert [*why] == [holder]
    assert why[holder].reason.startswith("it alone holds 39 files (0 bytes) ")

    verified = verified_save(store, put_save(store, 200, [base], saves=line[:MOST_SAVES]))
    assert delete_superseded(store, verified, PLAIN)[:2] == (line[:KEPT][::-1], [])
    assert holds(store, DEMO) == why


@pytest.mark.rule(13)
def test_an_autosave_that_the_store_completes_late_is_named_for_what_newer_ones_miss(
    store: MemoryStore,
) -> None:
    base = put_save(store, 0, [])
    verified_save(store, base, "backup")
    late = put_save(store, 10, [base], holds=40, own_save=1, autosave=1)
    on_its_way = store.get(manifest_key(DEMO, late), max_bytes=1 << 20)
    store.delete([manifest_key(DEMO, late)])
    newest = put_save(store, 20, [base], saves=[late])
    store.put(manifest_key(DEMO, late), on_its_way)
    Succession(store, DEMO, PLAIN).hold(newest)
    assert [*holds(store, DEMO)] == [late]


@pytest.mark.rule(13)
def test_a_snapshot_that_is_equal_to_an_autosave_stands_for_it_where_another_machine_missed_files(
    store: MemoryStore,
) -> None:
    """The machine that made the autosave was hibernated, and its replica lost most of it."""
    base = put_save(store, 0, [])
    verified_save(store, base, "backup")
    save = put_save(store, 10, [base], holds=40, own_save=1, autosave=1)
    equal = put_save(store, 20, [base], saves=[save], holds=40, content=save)
    verified = verified_save(store, equal, "hibernate")
    assert delete_superseded(store, verified, PLAIN).deleted == [save]
    of_replica = put_save(store, 30, [base], saves=[save])
    Succession(store, DEMO, PLAIN).hold(of_replica)
    assert [*holds(store, DEMO)] == [equal]


def test_an_autosave_that_is_not_whole_stands_for_no_older_one(
    machine: NearAgent, clocked: ClockedStore
) -> None:
    base = machine.hibernated()
    for number in range(20):
        fill(machine, number, f"data {number}")
    older = _save(machine, _book(machine, base))
    before = set(packs(clocked))
    fill(machine, 99, "newer data")
    newer = _save(machine, _book(machine, older.snapshot))
    damaged = set(packs(clocked)) - before
    for file in machine.root.iterdir():
        file.unlink()
    fill(machine, 50, "alone")
    verified = machine.hibernated()
    Succession(clocked, WORKSPACE, machine.seal).hold(verified)
    assert [*holds(clocked, WORKSPACE)] == [newer.snapshot]
    let_go(clocked, WORKSPACE, newer.snapshot)
    clocked.delete(sorted(damaged))
    Succession(clocked, WORKSPACE, machine.seal).hold(verified)
    assert [*holds(clocked, WORKSPACE)] == [older.snapshot]
