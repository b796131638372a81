"""What a machine gets to save by itself, prune beside such saves, and what they are worth."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from unittest.mock import patch

import msgspec
import pytest

from tests.control.upkeep.test_prune import delete, fill, packs, prune, restorable, steps_after
from tests.fixtures.clocked_agent import ClockedStore, NearAgent
from tests.fixtures.engine import WORKSPACE, Engine
from tests.fixtures.memory_store import MemoryStore
from tests.fixtures.own_saves import JOB, book_of, saved, stored
from torpor.control.jobs.standby import (
    OWN_SAVES,
    PACKS,
    SCHEDULED_SAVES,
    renewed_s,
)
from torpor.control.safety import check_whole, verify_snapshot
from torpor.control.store.manifests import find_snapshot, read_manifest
from torpor.control.store.marks import COMMIT_S, OWN_COMMIT_S, marked_packs
from torpor.control.upkeep.lineage import JobLineage, choose_newest
from torpor.control.upkeep.prune import GRACE_S, YOUNG_S
from torpor.shared.errors import GrantExpired, StoreUnavailable
from torpor.shared.format.names import manifest_key, marks_prefix, pack_id_of, packs_prefix
from torpor.shared.values import PROGRAMS, SnapshotId, StoredObject
from torpor.shared.wire.autosave import Autosave
from torpor.shared.wire.protocol import MAX_LINE_BYTES, request_line


class SteppedStore(ClockedStore):
    """Does ``then`` once, right after the ``number``-th listing of packs or marks."""

    number = 0
    then: Callable[[], object] = staticmethod(lambda: None)

    def list(self, prefix: str) -> Iterator[StoredObject]:
        found = list(super().list(prefix))
        if prefix in (packs_prefix(WORKSPACE), marks_prefix(WORKSPACE)) and self.number:
            self.number -= 1
            if not self.number:
                self.then()
        return iter(found)


@pytest.fixture
def store(memory_store: MemoryStore) -> SteppedStore:
    return SteppedStore(memory_store)


@pytest.fixture
def machine(store: SteppedStore, tmp_path: Path) -> Iterator[NearAgent]:
    machine = NearAgent(store, tmp_path / "home", tmp_path / "workspace")
    machine.root.mkdir()
    fill(machine, 1)
    yield machine
    machine.runs.close()


def marked_but_named(machine: NearAgent, store: SteppedStore) -> SnapshotId:
    """A snapshot that names a pack which prune has marked: it was committed beside the mark."""
    base = machine.hibernated()
    store.advance(YOUNG_S)
    steps = steps_after(machine, "compare packs")
    delete(store, base)
    assert len(prune(machine, without_snapshots=True).plan.unnamed) == 1
    *_, snapshot = steps
    return SnapshotId(snapshot)


def test_a_book_has_names_that_sort_and_grants_that_end(
    machine: NearAgent, store: SteppedStore
) -> None:
    base = machine.hibernated()
    book = book_of(machine, machine.root, base, exclude=["cache"], accept_changed=["log"])
    names = [save.snapshot for save in book.saves]
    assert len(names) == OWN_SAVES
    assert [base, *names] == sorted({base, *names})
    for grant in [*(save.grant for save in book.saves), *book.packs]:
        assert (grant.verb, grant.once) == ("PUT", True)
        assert grant.expires_unix == int(store.now) + OWN_COMMIT_S
    for save in book.saves:
        assert save.grant.key == manifest_key(WORKSPACE, save.snapshot)
    assert len({grant.key for grant in book.packs} - packs(store)) == PACKS
    assert (book.job, book.roots) == (JOB, [str(machine.root)])
    assert book.known[0].grant.key == manifest_key(WORKSPACE, base)
    assert (book.exclude, book.accepted, book.unusable) == (
        ["cache"],
        ["log", f"{PROGRAMS}/*.log"],
        [],
    )
    assert renewed_s(book.lasts_s) < book.lasts_s == OWN_COMMIT_S
    same = book_of(machine, machine.root, None)
    assert same.known[0].root == book.known[0].root


def test_a_book_with_a_save_each_minute_fits_into_a_line(machine: NearAgent) -> None:
    book = book_of(machine, machine.root, None, every_s=60.0)
    assert len(book.saves) == OWN_SAVES + SCHEDULED_SAVES
    assert (
        len(request_line("id", Autosave(book, []))) * 4 < MAX_LINE_BYTES
    )  # real grants are longer


def test_grants_that_can_replace_what_was_verified_end_within_the_hour(
    machine: NearAgent, store: SteppedStore
) -> None:
    store.real.takes_conditions = False
    book = book_of(machine, machine.root, machine.hibernated(), every_s=600.0)
    assert {one.expires_unix for one in book.packs} == {int(store.now) + COMMIT_S}
    assert (book.lasts_s, len(book.saves)) == (COMMIT_S, OWN_SAVES + 7)
    assert renewed_s(book.lasts_s) == COMMIT_S / 2


def test_a_machine_without_a_snapshot_can_save_too(machine: NearAgent) -> None:
    assert len(book_of(machine, machine.root, None).packs) == PACKS
    save = saved(machine, book_of(machine, machine.root, None))
    verify_snapshot(machine.store, stored(machine, save), machine.seal)


def test_a_save_may_name_packs_that_no_snapshot_names_until_prune_marks_them(
    machine: NearAgent, store: SteppedStore
) -> None:
    delete(store, machine.hibernated())
    assert set(book_of(machine, machine.root, None).young) == packs(store) != set()
    store.advance(YOUNG_S)
    prune(machine, without_snapshots=True)
    assert packs(store)
    assert book_of(machine, machine.root, None).young == []


@pytest.mark.rule(13)
def test_a_save_by_the_machine_names_no_marked_pack(
    machine: NearAgent, store: SteppedStore, tmp_path: Path
) -> None:
    basis = marked_but_named(machine, store)
    marked = marked_packs(store, WORKSPACE)
    fill(machine, 2, "new")
    book = book_of(machine, machine.root, basis)
    assert {pack_id_of(key) for key in book.unusable} == marked
    save = saved(machine, book)
    store.look()
    delete(store, basis)
    store.advance(GRACE_S)
    assert prune(machine).freed.packs == 1
    assert not marked & {pack_id_of(key) for key in packs(store)}
    assert restorable(machine, tmp_path) == 1
    check_whole(store, stored(machine, save), machine.seal)


@pytest.mark.rule(13)
def test_a_pack_that_is_swept_between_both_looks_is_not_named(
    machine: NearAgent, store: SteppedStore, tmp_path: Path
) -> None:
    """The marks are read before the packs are listed: the mark of a pack that is gone is gone."""
    basis = marked_but_named(machine, store)
    (doomed,) = marked_packs(store, WORKSPACE)
    manifest = read_manifest(store, find_snapshot(store, WORKSPACE, basis), machine.seal)
    store.advance(GRACE_S)

    def sweep() -> None:
        delete(store, basis)
        assert prune(machine, without_snapshots=True).freed.packs == 1

    store.number, store.then = 1, sweep
    stale = find_snapshot(store, WORKSPACE, basis)
    with pytest.MonkeyPatch.context() as patch:  # it looked before the snapshot was deleted
        patch.setattr("torpor.control.jobs.standby.find_snapshot", lambda *_: stale)
        book = book_of(machine, machine.root, basis, manifest)
    assert [pack_id_of(key) for key in book.unusable] == [doomed]
    saved(machine, book)
    assert restorable(machine, tmp_path) == 1


@pytest.mark.rule(13)
def test_a_control_side_that_slept_hands_over_grants_that_have_ended(
    machine: NearAgent, store: SteppedStore
) -> None:
    """The grants are signed before the marks are read: what was read long ago allows nothing."""
    basis = machine.hibernated()

    def sleep() -> None:
        store.advance(YOUNG_S)
        delete(store, basis)
        prune(machine, without_snapshots=True)
        store.advance(GRACE_S)
        assert prune(machine, without_snapshots=True).freed.packs == 1

    store.number, store.then = 2, sleep
    book = book_of(machine, machine.root, basis)
    assert store.number == 0
    assert book.unusable == []
    for save in book.saves:
        with pytest.raises(GrantExpired):
            store.refuse_late(save.grant)


@pytest.mark.rule(13)
def test_a_mark_that_comes_after_the_book_waits_for_the_save(
    machine: NearAgent, store: SteppedStore, tmp_path: Path
) -> None:
    basis = machine.hibernated()
    store.advance(YOUNG_S)
    book = book_of(machine, machine.root, basis)
    delete(store, basis)
    marked = prune(machine, without_snapshots=True).plan.unnamed
    store.advance(COMMIT_S)
    store.refuse_late(book.saves[0].grant)
    saved(machine, book)
    store.advance(10 * GRACE_S)
    done = prune(machine)
    assert done.plan.free == []
    assert done.plan.retiring == marked
    assert restorable(machine, tmp_path) == 1


def test_the_newest_save_of_a_machine_that_is_gone_is_used(
    machine: NearAgent, store: SteppedStore
) -> None:
    basis = machine.hibernated()
    assert _newest(machine, basis) == (basis, 0)
    fill(machine, 2)
    save = saved(machine, book_of(machine, machine.root, basis))
    assert _newest(machine, basis) == (save.snapshot, 0)
    assert _newest(machine, None) == (save.snapshot, 0)


@pytest.mark.rule(13)
def test_a_save_that_is_not_whole_is_named_and_the_one_before_is_used(
    machine: NearAgent, store: SteppedStore
) -> None:
    basis = machine.hibernated()
    before = packs(store)
    fill(machine, 2)
    first = saved(machine, book_of(machine, machine.root, basis))
    between = packs(store)
    fill(machine, 3)
    saved(machine, book_of(machine, machine.root, basis))
    store.delete(packs(store) - between)
    assert _newest(machine, basis) == (first.snapshot, 1)
    store.delete(packs(store) - before)
    assert _newest(machine, basis) == (basis, 2)
    store.delete(before)
    assert _newest(machine, basis) == (None, 3)


def test_a_save_under_an_older_book_is_newer_than_what_came_between(
    machine: NearAgent, store: SteppedStore
) -> None:
    """The control side was lost after a save and before it handed over the next book."""
    basis = machine.hibernated()
    old = book_of(machine, machine.root, basis)
    given_up = NearAgent(store, machine.home.parent / "other-home", machine.root)
    of_another = book_of(given_up, given_up.root, basis)
    for _ in range(OWN_SAVES + 1):
        verified = machine.hibernated()
    store.advance(10)
    fill(machine, 2)
    save = saved(machine, old)
    assert save.snapshot < verified
    assert _newest(machine, verified) == (save.snapshot, 0)
    blob = store.get(manifest_key(WORKSPACE, basis), max_bytes=1 << 20)
    store.advance(10)  # an older snapshot that was put back is not a newer save
    store.put(manifest_key(WORKSPACE, basis), blob)
    assert _newest(machine, verified) == (save.snapshot, 0)
    store.advance(10)  # neither is one of a machine that was given up and lived on
    late = saved(given_up, of_another)
    assert late.snapshot < verified
    assert _newest(machine, verified) == (save.snapshot, 0)


def test_what_cannot_be_known_is_not_damage(machine: NearAgent, memory_store: MemoryStore) -> None:
    basis = machine.hibernated()
    save = saved(machine, book_of(machine, machine.root, basis))
    for key in packs(machine.clock):
        memory_store.hide_md5(key)
    assert _newest(machine, basis) == (save.snapshot, 0)  # a restore checks every hash
    memory_store.fails = StoreUnavailable("away")
    with pytest.raises(StoreUnavailable):
        _newest(machine, basis)


def _newest(machine: Engine, verified: SnapshotId | None) -> tuple[SnapshotId | None, int]:
    own = JobLineage(verified, frozenset(), frozenset())
    found = choose_newest(machine.store, WORKSPACE, machine.seal, own=own)
    return found.snapshot and found.snapshot.snapshot, len(found.refused)


def test_no_save_of_a_machine_waits_for_a_store_that_is_away(machine: NearAgent) -> None:
    """It tries again itself, each second: a market may take the machine within two minutes."""
    basis = machine.hibernated()
    signed = machine.store.grant
    patient = lambda *of, **how: msgspec.structs.replace(signed(*of, **how), patience_s=1800.0)  # noqa: E731
    with patch.object(machine.store, "grant", patient):
        book = book_of(machine, machine.root, basis)
    grants = [*book.packs, *(save.grant for save in book.saves), *(one.grant for one in book.known)]
    assert {grant.patience_s for grant in grants} == {0.0}
