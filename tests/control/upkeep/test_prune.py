"""Pruning over a store whose clock the test moves, beside snapshots that are under way."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from tests.fixtures.clocked_agent import ClockedStore, NearAgent, killed_at_request
from tests.fixtures.engine import WORKSPACE
from tests.fixtures.faulty_stores import DyingStore, Killed, ShortListings
from tests.fixtures.memory_store import MemoryStore
from tests.fixtures.records import put_record, read_record
from tests.fixtures.stores import Server
from tests.fixtures.trees import let_settle
from torpor.control.safety import verify_snapshot
from torpor.control.store.deletion_records import Deletions
from torpor.control.store.manifests import (
    find_snapshot,
    list_snapshots,
    open_manifest,
    snapshot_ids,
)
from torpor.control.store.marks import (
    COMMIT_S,
    LATEST_COMMIT_S,
    SHORTEST_GRACE_S,
    marked_packs,
    read_marks,
)
from torpor.control.store.receipts import receipt_names, withdraw_receipt
from torpor.control.upkeep.deletion import delete_snapshot, record_missing
from torpor.control.upkeep.pins import pin, unpin
from torpor.control.upkeep.presence import NamedBy
from torpor.control.upkeep.prune import (
    GRACE_S,
    YOUNG_S,
    Pruned,
    PrunePlan,
    PruneRules,
    carry_out,
    plan_prune,
)
from torpor.shared.errors import (
    InvalidInput,
    ManifestInvalid,
    RecordRefused,
    SnapshotDamaged,
    SnapshotMissing,
    StoreCorrupt,
    StoreError,
    WrongKey,
)
from torpor.shared.format.names import manifest_key, marks_prefix, pack_key, packs_prefix
from torpor.shared.values import KIB, ObjectKey, SnapshotId

Machines = Callable[[str], NearAgent]


@pytest.fixture
def store(memory_store: MemoryStore) -> ShortListings:
    return ShortListings(memory_store)


@pytest.fixture
def machines(store: ClockedStore, tmp_path: Path) -> Iterator[Machines]:
    made: list[NearAgent] = []

    def machine(name: str) -> NearAgent:
        made.append(NearAgent(store, tmp_path / name / "home", tmp_path / name / "workspace"))
        made[-1].root.mkdir(parents=True)
        return made[-1]

    yield machine
    for machine in made:
        machine.runs.close()


@pytest.fixture
def machine(machines: Machines) -> NearAgent:
    first = machines("first")
    fill(first, 1)
    return first


def fill(machine: NearAgent, seed: int, name: str = "file", size: int = 300 * KIB) -> None:
    (machine.root / name).write_bytes(random.Random(seed).randbytes(size))
    let_settle()


def packs(store: ClockedStore) -> set[ObjectKey]:
    return {found.key for found in store.list(packs_prefix(WORKSPACE))}


def delete(store: ClockedStore, snapshot: SnapshotId) -> None:
    delete_snapshot(store, WORKSPACE, snapshot, even_newest=snapshot, named=True)


def look(machine: NearAgent, named: Mapping[SnapshotId, NamedBy] = {}, **rules: Any) -> PrunePlan:
    return plan_prune(machine.store, WORKSPACE, machine.seal, PruneRules(**rules), named)


def prune(machine: NearAgent, **rules: Any) -> Pruned:
    return carry_out(machine.store, look(machine, **rules))


def steps_after(machine: NearAgent, step: str) -> Iterator[str]:
    """A snapshot that has just done this step, and goes on where these are taken."""
    steps = machine.snapshot_steps()
    while not next(steps).startswith(step):
        pass
    return steps


def restorable(machine: NearAgent, tmp_path: Path) -> int:
    """Every listed snapshot comes back, every byte compared."""
    listed = list_snapshots(machine.store, WORKSPACE)
    other = NearAgent(machine.store, tmp_path / "other-home", tmp_path / "unused")
    for snapshot in listed:
        other.restore(snapshot.snapshot, [tmp_path / f"back-{snapshot.snapshot}"])
    other.runs.close()
    return len(listed)


def test_what_no_manifest_names_goes_after_a_mark_and_a_grace_time(
    machine: NearAgent, store: ClockedStore, tmp_path: Path
) -> None:
    first = machine.hibernated()
    theirs = packs(store)
    fill(machine, 2)
    machine.hibernated()
    store.advance(YOUNG_S)
    assert prune(machine).plan.unnamed == []  # both snapshots are there

    delete(store, first)
    before = prune(machine)
    assert {pack.id for pack in before.plan.unnamed} == {key.rsplit("/")[-1] for key in theirs}
    assert before.freed.packs == 0
    assert theirs < packs(store)

    store.advance(GRACE_S - 1)
    waiting = prune(machine)
    assert waiting.plan.waiting == before.plan.unnamed
    assert waiting.plan.next_free_unix == store.now + 1
    assert waiting.freed.packs == 0

    store.advance(1)
    kept = {found.key for found in store.list("")}
    plan = look(machine)
    assert plan.free == before.plan.unnamed
    assert {found.key for found in store.list("")} == kept
    store.advance(GRACE_S)  # a plan may be carried out late
    done = carry_out(store, plan)
    assert (done.freed.packs, done.freed.bytes) == (len(plan.free), plan.free_bytes)
    record = f"workspaces/{WORKSPACE}/deleted/{first}"
    assert kept - {found.key for found in store.list("")} == {
        *theirs, *(mark.key for mark in plan.marks), record
    }  # fmt: skip
    assert read_marks(store, WORKSPACE) == []
    assert restorable(machine, tmp_path) == 1


def test_packs_of_an_unfinished_run_are_left_alone(machine: NearAgent, store: ClockedStore) -> None:
    machine.hibernated()
    fill(machine, 2, "new")
    run = steps_after(machine, "store")
    machine.restart()  # kill -9
    run.close()
    store.advance(YOUNG_S - 1)
    done = prune(machine)
    assert done.plan.young.packs == 1
    assert done.plan.unnamed == []
    store.advance(1)
    assert len(prune(machine).plan.unnamed) == 1


@pytest.mark.rule(13)
def test_a_run_does_not_commit_what_was_marked_since_it_began(
    machine: NearAgent, store: ClockedStore, tmp_path: Path
) -> None:
    """The base of a running snapshot is deleted, marked and swept while it is being made."""
    base = machine.hibernated()
    fill(machine, 2, "new")
    store.advance(YOUNG_S)
    steps = steps_after(machine, "begin snapshot")
    delete(store, base)
    assert len(prune(machine, without_snapshots=True).plan.unnamed) == 1
    done = list(steps)
    assert "store from pass 3" in done  # what the base held was stored again
    store.advance(GRACE_S)
    assert prune(machine).freed.packs == 1
    assert restorable(machine, tmp_path) == 1


@pytest.mark.rule(13)
def test_a_mark_that_comes_after_the_look_waits_for_the_commit(
    machine: NearAgent, store: ClockedStore, tmp_path: Path
) -> None:
    base = machine.hibernated()
    store.advance(YOUNG_S)
    steps = steps_after(machine, "compare packs")
    delete(store, base)
    marked = prune(machine, without_snapshots=True).plan.unnamed
    store.advance(COMMIT_S)
    assert "commit" in list(steps)  # it names what is marked
    store.advance(10 * GRACE_S)
    done = prune(machine)
    assert done.plan.free == []
    assert done.plan.retiring == marked
    assert restorable(machine, tmp_path) == 1


@pytest.mark.rule(13)
def test_a_commit_after_its_hour_is_refused_and_made_again(
    machine: NearAgent, store: ClockedStore, tmp_path: Path
) -> None:
    """The control side sleeps between the look and the commit, for longer than any grace."""
    base = machine.hibernated()
    store.advance(YOUNG_S)
    steps = steps_after(machine, "compare packs")
    delete(store, base)
    prune(machine, without_snapshots=True)
    store.advance(GRACE_S)
    assert prune(machine, without_snapshots=True).freed.packs == 1
    assert "commit" in list(steps)
    assert restorable(machine, tmp_path) == 1


@pytest.mark.rule(13)
def test_a_manifest_that_appears_too_late_is_not_verified(
    machine: NearAgent, store: ClockedStore
) -> None:
    """As if the store had taken a grant after its time."""
    base = machine.hibernated()
    blob = store.get(manifest_key(WORKSPACE, base), max_bytes=1 << 20)
    wanted = find_snapshot(store, WORKSPACE, base)
    verify_snapshot(store, wanted, machine.seal)
    store.advance(YOUNG_S)
    delete(store, base)
    prune(machine, without_snapshots=True)
    store.look()
    store.advance(LATEST_COMMIT_S + 1)
    store.put(manifest_key(WORKSPACE, base), blob)
    with pytest.raises(SnapshotDamaged, match="long after prune marked"):
        verify_snapshot(store, wanted, machine.seal)


@pytest.mark.rule(13)
def test_a_marked_pack_is_named_by_no_later_snapshot_though_another_names_it(
    machine: NearAgent, machines: Machines, store: ClockedStore, tmp_path: Path
) -> None:
    """X commits beside a mark and is deleted; Y, which began on X, must not name it either."""
    other = machines("second")
    (other.root / "file").write_bytes((machine.root / "file").read_bytes())
    let_settle()
    base = machine.hibernated()
    store.advance(YOUNG_S)
    steps = steps_after(machine, "compare packs")
    delete(store, base)
    (doomed,) = prune(machine, without_snapshots=True).plan.unnamed
    *_, x = steps  # names the marked pack
    y_steps = other.snapshot_steps()
    assert next(y_steps) == "begin snapshot"  # knows X
    delete(store, SnapshotId(x))
    assert "commit" in list(y_steps)
    store.advance(GRACE_S)
    assert prune(machine).freed.packs == 1
    assert doomed.id not in {key.rsplit("/")[-1] for key in packs(store)}
    assert restorable(machine, tmp_path) == 1


def test_the_next_snapshot_stores_mostly_dead_packs_again_within_a_bound(
    machine: NearAgent, store: ClockedStore, tmp_path: Path
) -> None:
    for number in range(7):
        fill(machine, number, f"file-{number}", 1024 * KIB)
    first = machine.hibernated()
    for number in range(1, 7):
        (machine.root / f"file-{number}").unlink()
    second = machine.hibernated()
    delete(store, first)
    store.advance(YOUNG_S)
    none = look(machine, rewrite_bytes=100)
    assert none.retired == []
    done = prune(machine)
    assert len(done.plan.retired) == 1
    assert 1024 * KIB <= done.plan.rewritten_bytes < 1500 * KIB
    third = machine.hibernated()
    assert restorable(machine, tmp_path) == 2
    delete(store, second)
    assert prune(machine).plan.unnamed == done.plan.retired
    store.advance(GRACE_S)
    assert prune(machine).freed.bytes > 5 * 1024 * KIB
    assert list_snapshots(store, WORKSPACE)[0].snapshot == third
    assert marked_packs(store, WORKSPACE) == set()


@pytest.mark.rule(13)
def test_unknown_is_not_unnamed(machine: NearAgent, store: ClockedStore) -> None:
    first = machine.hibernated()
    fill(machine, 2)
    second = machine.hibernated()
    delete(store, first)
    store.advance(YOUNG_S)
    prune(machine)
    store.advance(GRACE_S)
    key = manifest_key(WORKSPACE, second)
    whole = store.get(key, max_bytes=1 << 20)
    before = packs(store)
    damaged = bytearray(whole)
    damaged[70] ^= 1
    for blob in (bytes(damaged), whole[:40], whole[:8] + b"\2" + whole[9:], b""):
        store.put(key, blob)
        with pytest.raises(ManifestInvalid):
            prune(machine)
    store.put(key, whole)
    with pytest.raises(WrongKey):
        sealed = NearAgent(store, machine.home.parent / "x", machine.root, bytes(32))
        prune(sealed)
    stranger = ObjectKey(f"workspaces/{WORKSPACE}/snapshots/v2-20270101T000000Z")
    store.put(stranger, whole)
    with pytest.raises(ManifestInvalid, match="not a snapshot that this version of torpor can"):
        prune(machine)
    store.delete([stranger])
    (mark,) = read_marks(store, WORKSPACE)
    text = store.get(mark.key, max_bytes=1 << 20)
    put_record(store, mark.key, read_record(store, mark.key) | {"version": 2})
    with pytest.raises(StoreError, match="not a mark that this torpor can read"):
        prune(machine)
    with pytest.raises(StoreError, match="not a mark"):
        machine.hibernated()
    store.put(mark.key, text.replace(b'"version":1', b'"version":2'))
    with pytest.raises(RecordRefused, match=mark.key):
        prune(machine)
    with pytest.raises(RecordRefused, match=mark.key):
        machine.hibernated()
    assert packs(store) == before
    store.put(mark.key, text)
    store.advance(GRACE_S)
    assert prune(machine).freed.packs == 1


def test_an_empty_listing_prunes_nothing(machine: NearAgent, store: ClockedStore) -> None:
    first = machine.hibernated()
    delete(store, first)
    store.advance(YOUNG_S)
    with pytest.raises(SnapshotMissing, match=f"{WORKSPACE} has no snapshot in "):
        find_snapshot(store, WORKSPACE, None)
    with pytest.raises(SnapshotMissing, match="has no snapshot"):
        prune(machine)
    assert len(packs(store)) == 1


@pytest.mark.rule(13)
@pytest.mark.parametrize("by", ["receipt", "pin", "job"])
def test_a_listing_that_lacks_the_newest_snapshot_frees_none_of_its_packs(
    by: str, machine: NearAgent, store: ShortListings
) -> None:
    """It ends early without an error, at two prunes that are a day apart."""
    machine.hibernated()
    fill(machine, 2)
    newest = machine.hibernated()
    named = {newest: NamedBy("job 3f2a9c81d04e")} if by == "job" else {}
    if by == "pin":
        pin(store, WORKSPACE, newest, "the paper")
    if by != "receipt":
        withdraw_receipt(store, WORKSPACE, newest)
    store.advance(YOUNG_S)
    before = packs(store)
    store.hidden = {manifest_key(WORKSPACE, newest)}
    for _ in range(2):
        said = rf"snapshot {newest} \(.*{by}.* of workspace {WORKSPACE}, but its listing lacks it"
        with pytest.raises(StoreCorrupt, match=said):
            carry_out(store, look(machine, named))
        store.advance(GRACE_S)
    store.hidden = set()
    assert packs(store) == before and read_marks(store, WORKSPACE) == []
    assert carry_out(store, look(machine, named)).plan.unnamed == []


@pytest.mark.rule(13)
def test_a_snapshot_that_is_gone_without_a_deletion_keeps_its_packs_until_its_user_gives_it_up(
    machine: NearAgent, store: ClockedStore
) -> None:
    lost = machine.hibernated()
    fill(machine, 2)
    machine.hibernated()
    store.delete([manifest_key(WORKSPACE, lost)])
    store.advance(YOUNG_S)
    said = rf'{lost} \(its receipt names it\).*delete_snapshots\("{WORKSPACE}", \["{lost}"\]\)'
    with pytest.raises(SnapshotMissing, match=said):
        prune(machine)
    record_missing(store, WORKSPACE, lost, {})
    with pytest.raises(SnapshotMissing, match="nothing was deleted"):  # nothing names it any more
        record_missing(store, WORKSPACE, lost, {})
    assert len(prune(machine).plan.unnamed) == 1
    store.advance(GRACE_S)
    assert prune(machine).freed.packs == 1
    assert Deletions(store, WORKSPACE).times() == {}


@pytest.mark.parametrize("besides", [False, True])
def test_prune_names_only_the_steps_that_give_up_a_lost_pinned_snapshot(
    besides: bool, machine: NearAgent, store: ClockedStore
) -> None:
    lost = machine.hibernated()
    fill(machine, 2)
    machine.hibernated()
    pin(store, WORKSPACE, lost, "the paper")
    store.delete([manifest_key(WORKSPACE, lost)])
    if not besides:
        withdraw_receipt(store, WORKSPACE, lost)
    with pytest.raises(SnapshotMissing, match=f"{lost} .its pin names it") as told:
        look(machine)
    assert f"remove the pin of {lost} by `pin`" in str(told.value)
    assert ("delete_snapshots" in str(told.value)) is besides
    unpin(store, WORKSPACE, lost)
    if besides:
        record_missing(store, WORKSPACE, lost, {})
    look(machine)


@pytest.mark.rule(13)
def test_what_a_machine_was_ended_for_is_missed_also_beside_a_newer_snapshot(
    machine: NearAgent, store: ClockedStore
) -> None:
    """That one may be of another machine, which goes on from elsewhere."""
    old = machine.hibernated()
    fill(machine, 2)
    machine.hibernated()
    ended = NamedBy("machine m1, which was ended for it,")
    store.delete([manifest_key(WORKSPACE, old)])
    withdraw_receipt(store, WORKSPACE, old)
    with pytest.raises(SnapshotMissing, match=f"{old} .machine m1, which was ended for it, names"):
        look(machine, {old: ended})
    record_missing(store, WORKSPACE, old, {old: ended})
    look(machine, {old: ended})


@pytest.mark.rule(13)
def test_a_deletion_killed_at_any_request_stops_no_prune_and_can_be_repeated(
    machine: NearAgent, memory_store: MemoryStore
) -> None:
    gone = machine.hibernated()
    fill(machine, 2)
    kept = machine.hibernated()
    store = machine.clock
    ends = set()
    for step in itertools.count():
        with memory_store.undone():
            store.advance(YOUNG_S)
            dying = DyingStore(store, step)
            with suppress(Killed):
                delete_snapshot(dying, WORKSPACE, gone)
            plan = prune(machine).plan
            there = gone in snapshot_ids(store, WORKSPACE)
            assert len(plan.unnamed) == (not there)
            if there:
                delete_snapshot(store, WORKSPACE, gone)
            ends.add(there)
            for _ in range(3):
                store.advance(GRACE_S)
                prune(machine)
            assert snapshot_ids(store, WORKSPACE) == [kept] and len(packs(store)) == 1
            assert receipt_names(store, WORKSPACE) == {kept}
            assert Deletions(store, WORKSPACE).times() == {}
        if not dying.dead:
            break
    assert step > 8 and ends == {True, False}


@pytest.mark.rule(13)
def test_a_snapshot_that_was_pinned_while_its_deletion_was_killed_keeps_its_packs(
    machine: NearAgent, store: ClockedStore
) -> None:
    first = machine.hibernated()
    machine.hibernated()
    delete(store, first)
    store.put(ObjectKey(f"workspaces/{WORKSPACE}/pins/{first}"), b"its user was told that it stays")
    with pytest.raises(SnapshotMissing, match=f"remove the pin of {first} by `pin` with `remove`"):
        prune(machine)
    unpin(store, WORKSPACE, first)
    prune(machine)


@pytest.mark.rule(13)
def test_a_mark_stays_while_a_pack_is_there_that_the_listing_lacks(
    machine: NearAgent, store: ShortListings
) -> None:
    first = machine.hibernated()
    fill(machine, 2)
    machine.hibernated()
    delete(store, first)
    store.advance(YOUNG_S)
    (marked,) = prune(machine).plan.unnamed
    store.hidden = {pack_key(WORKSPACE, bytes.fromhex(marked.id))}
    prune(machine)
    assert marked_packs(store, WORKSPACE) == {bytes.fromhex(marked.id)}


@pytest.mark.rule(13)
def test_a_deletion_record_stays_while_something_names_its_snapshot(
    machine: NearAgent, store: ClockedStore
) -> None:
    first = machine.hibernated()
    fill(machine, 2)
    machine.hibernated()
    named = {first: NamedBy("job 3f2a9c81d04e")}
    delete(store, first)
    for _ in range(3):
        store.advance(YOUNG_S)
        carry_out(store, look(machine, named))
    assert Deletions(store, WORKSPACE).times().keys() == {first}
    assert len(packs(store)) == 1
    prune(machine)
    assert Deletions(store, WORKSPACE).times() == {}


def test_a_grace_time_that_is_too_short_is_refused(machine: NearAgent) -> None:
    with pytest.raises(InvalidInput, match="too short"):
        look(machine, grace_s=SHORTEST_GRACE_S - 1)
    with pytest.raises(InvalidInput, match="invalid prune rules"):
        look(machine, dead_below=2)


def test_marks_are_few_however_often_a_prune_runs(machine: NearAgent, store: ClockedStore) -> None:
    """A retired pack stays marked for as long as it is named, in one mark."""
    for number in range(12):
        fill(machine, number, f"file-{number}", 200 * KIB)
    first = machine.hibernated()
    for number in range(1, 12):
        (machine.root / f"file-{number}").unlink()
    machine.hibernated()
    delete(store, first)
    for number in range(4):
        store.advance(YOUNG_S)
        prune(machine)
        newest = list_snapshots(store, WORKSPACE)[0].snapshot
        fill(machine, 100 + number, "changes")
        machine.hibernated()
        if number:
            delete(store, newest)
    assert len(list(store.list(marks_prefix(WORKSPACE)))) <= 2


@pytest.mark.rule(13)
def test_a_prune_killed_at_any_step_is_completed_by_the_next(
    seaweed: Server, tmp_path: Path
) -> None:
    """Marking, deleting and clearing up, each killed before and after every request, in a
    process of its own: so the store is a real server."""
    store = ClockedStore(seaweed.store())
    machine = NearAgent(store, tmp_path / "home", tmp_path / "workspace")
    machine.root.mkdir()
    fill(machine, 1)
    kept = _with_every_kind_of_pack(machine, store)
    killed = step = 0
    while True:
        step += 1
        if not killed_at_request(store, step, lambda: prune(machine)):
            break
        killed += 1
        store.look()
        if step % 3 == 0:
            assert restorable(machine, tmp_path / str(step)) == 2
        if step % 9 == 0:  # the next one has something to do again
            store.advance(GRACE_S)
            kept = _with_every_kind_of_pack(machine, store)
    assert killed > 20
    store.advance(GRACE_S)
    prune(machine)
    store.advance(GRACE_S)
    prune(machine)
    assert packs(store) == {
        pack_key(WORKSPACE, pack.id)
        for snapshot in kept
        for pack in open_manifest(store, WORKSPACE, snapshot, machine.seal)[0].packs
    }
    machine.runs.close()


def _with_every_kind_of_pack(machine: NearAgent, store: ClockedStore) -> list[SnapshotId]:
    """Two snapshots, packs of a third one that is gone, and some that were marked long ago."""
    for snapshot in list_snapshots(store, WORKSPACE):
        delete(store, snapshot.snapshot)
    fill(machine, 7, "kept")
    kept = [machine.hibernated()]
    fill(machine, random.randrange(1 << 30), "changes")
    gone = machine.hibernated()
    store.advance(YOUNG_S)
    delete(store, gone)
    prune(machine)
    store.advance(GRACE_S)
    fill(machine, random.randrange(1 << 30), "changes")
    kept.append(machine.hibernated())
    return kept
