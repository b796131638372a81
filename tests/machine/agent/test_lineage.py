"""What a machine's tree goes on from: a wake, a sync, a snapshot of its own, verified or not."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from flows.procedures.restore import restore_all, restore_run
from tasks.plain_runner import PlainRunner
from tests.fixtures.engine import Engine
from tests.fixtures.own_saves import book_of, saved
from tests.fixtures.snapshots import Machines, commit, manifest_of, scan_and_store
from tests.fixtures.trees import let_settle
from torpor.shared.format.lineage import Lineage, lineage_of
from torpor.shared.values import SnapshotId


def _line(engine: Engine, snapshot: SnapshotId) -> Lineage:
    manifest = manifest_of(engine, snapshot)
    line = lineage_of(manifest)
    assert manifest.parent == line.parent
    return line


def _change(root: Path, name: str) -> None:
    (root / name).write_text(f"work {name}")
    let_settle()


@pytest.fixture
def first(engine: Engine, was: Path) -> SnapshotId:
    return engine.snapshot([was])


def test_two_machines_that_go_on_from_one_snapshot_have_its_work_and_not_each_others(
    engine: Engine, was: Path, first: SnapshotId, machines: Machines, tmp_path: Path
) -> None:
    other = machines(engine.store, tmp_path / "other")
    there = tmp_path / "there"
    other.restore(first, [there])
    assert _line(engine, first) == Lineage(first, first)
    _change(was, "mine")
    mine = engine.snapshot([was])
    _change(there, "theirs")
    theirs = other.snapshot([there])
    assert _line(engine, mine).ancestors == [first]
    assert _line(engine, theirs).ancestors == [first]
    with PlainRunner(retries=0, at_once=1):
        path = other.path_restore(mine, b"mine", there / "theirs-too")
        with restore_run(path):
            restore_all(path, "near")
    let_settle()
    assert _line(engine, other.snapshot([there])).ancestors == [theirs, first]


def test_after_a_sync_the_tree_goes_on_from_what_it_was_synced_to(
    engine: Engine, was: Path, first: SnapshotId
) -> None:
    _change(was, "second")
    second = engine.snapshot([was])
    engine.sync(first)
    _change(was, "third")
    third = engine.snapshot([was])
    assert _line(engine, third).ancestors == [first]
    engine.sync(second)
    _change(was, "fourth")
    assert _line(engine, engine.snapshot([was])).ancestors == [second, first]


def test_an_unchanged_tree_has_no_work_of_its_own(
    engine: Engine, was: Path, first: SnapshotId, machines: Machines, tmp_path: Path
) -> None:
    """Also where its files are read again, as after a restore or by a new signature."""
    other = machines(engine.store, tmp_path / "other")
    there = tmp_path / "there"
    other.restore(first, [there])
    shutil.copy2(there / "small", there / "copy")
    os.replace(there / "copy", there / "small")
    let_settle()
    second = other.snapshot([there])
    assert _line(engine, second) == Lineage(second, first, [first])
    third = other.snapshot([there])
    assert _line(engine, third) == Lineage(third, first, [second, first])
    (there / "small").unlink()
    let_settle()
    fourth = other.snapshot([there])
    assert _line(engine, fourth).content == fourth
    os.utime(there / "big", ns=(1, 1))
    let_settle()
    fifth = other.snapshot([there])
    assert _line(engine, fifth).content == fifth


def test_what_nobody_verified_is_part_of_the_line_all_the_same(
    engine: Engine, was: Path, first: SnapshotId
) -> None:
    _change(was, "second")
    run = engine.begin([was])
    scan_and_store(run)
    run.store(1)
    second, _ = commit(run)
    engine.restart()  # killed before the snapshot was verified
    _change(was, "third")
    third = engine.snapshot([was])
    assert _line(engine, third) == Lineage(third, third, [second, first])
    _change(was, "fourth")
    own = saved(engine, book_of(engine, was, third)).snapshot
    assert _line(engine, own).ancestors == [third, second, first]
    assert _line(engine, engine.snapshot([was])).ancestors == [own, third, second, first]


def test_a_machine_that_remembers_nothing_begins_a_line(
    engine: Engine, was: Path, first: SnapshotId, machines: Machines, tmp_path: Path
) -> None:
    other = machines(engine.store, tmp_path / "other")
    snapshot = other.snapshot([was])
    assert _line(engine, snapshot) == Lineage(snapshot, snapshot)
