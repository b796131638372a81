"""A machine learns what its user's programs use, and the next wake restores that first."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

import torpor.machine.agent.file_use as file_use
from tests.fixtures.engine import WORKSPACE, Engine
from tests.fixtures.memory_store import MemoryStore
from tests.fixtures.snapshots import Machines, Waking, manifest_of, waking_of
from tests.fixtures.trees import let_settle
from torpor.shared.format.file_use import BEFORE_READY, LATER, recorded_use
from torpor.shared.format.manifest import FILE
from torpor.shared.values import MIB, SnapshotId
from torpor.shared.wire.restore import NoteReady


@pytest.fixture
def was(tmp_path: Path) -> Path:
    was, dice = tmp_path / "was", random.Random(7)
    for name in ("model", "bin/__pycache__", "data", "rest"):
        (was / name).mkdir(parents=True)
    for name in ("data/rows", "model/weights", "rest/a", "rest/b", "rest/c"):
        (was / name).write_bytes(dice.randbytes(5 * MIB))
    for name in ("bin/__pycache__/run.pyc", "bin/run.py", "model/config", "rest/notes", "log"):
        (was / name).write_bytes(dice.randbytes(2000))
    (was / "model/link").symlink_to("weights")
    let_settle()
    return was


@pytest.fixture
def woken(machines: Machines, memory_store: MemoryStore, was: Path) -> Waking:
    """A machine that is restored."""
    woken = waking_of(machines, memory_store, was)
    woken.engine.restore(woken.snapshot, [woken.back])
    let_settle()
    return woken


def _read(root: Path, *names: str) -> None:
    for name in names:
        (root / name).read_bytes()


def _classes(engine: Engine, snapshot: SnapshotId) -> dict[str, int]:
    """The class of each file that was used."""
    manifest = manifest_of(engine, snapshot)
    classes = zip(manifest.entries, recorded_use(manifest), strict=False)
    return {entry.path.decode(): when for entry, when in classes if when and entry.kind == FILE}


def _learn(woken: Waking) -> SnapshotId:
    """What a deploy does, and work after it."""
    _read(woken.back, "model/weights", "bin/__pycache__/run.pyc")
    woken.engine.call(NoteReady(WORKSPACE))
    _read(woken.back, "data/rows", "model/weights")
    with (woken.back / "log").open("ab") as log:
        log.write(b"more")
    let_settle()
    return woken.engine.snapshot([woken.back])


LEARNED = {
    "model/weights": BEFORE_READY, "bin/__pycache__/run.pyc": BEFORE_READY,
    "log": BEFORE_READY, "data/rows": LATER,
}  # fmt: skip


def test_a_snapshot_says_what_was_used_and_changes_nothing_of_it(woken: Waking) -> None:
    first = _learn(woken)
    assert _classes(woken.engine, first) == LEARNED
    assert _classes(woken.engine, woken.engine.snapshot([woken.back])) == LEARNED


def test_what_made_a_machine_ready_stays_until_another_deploy(
    woken: Waking, machines: Machines, tmp_path: Path
) -> None:
    back = tmp_path / "again"
    again = machines(woken.engine.store, tmp_path / "third")
    again.restore(_learn(woken), [back])
    _read(back, "rest/a")
    (back / "bin/__pycache__/run.pyc").unlink()
    let_settle()
    learned = _classes(again, again.snapshot([back]))
    assert learned == {"log": BEFORE_READY, "model/weights": BEFORE_READY, "rest/a": LATER}
    again.call(NoteReady(WORKSPACE))
    learned = _classes(again, again.snapshot([back]))
    assert learned == {"rest/a": BEFORE_READY}


def test_the_next_wake_brings_what_made_the_machine_ready_first(
    woken: Waking, machines: Machines, tmp_path: Path
) -> None:
    waking = Waking(
        machines(woken.engine.store, tmp_path / "third"),
        _learn(woken),
        woken.back,
        tmp_path / "again",
    )
    waking.engine.part_bytes = 2 * MIB
    waking.use([])
    early = {
        "log", "bin/__pycache__/run.pyc", "bin/run.py", "model/config", "model/link",
        "model/weights", "bin", "bin/__pycache__", "model",
    }  # fmt: skip
    assert waking.plan.first == len(early)
    there = {str(path.relative_to(waking.back)) for path in waking.back.rglob("*")}
    assert early <= there
    assert not there & {"data/rows", "rest/a", "rest/notes"}
    waking.fetch(waking.parts(first=False)[:1])
    staged = b"".join(path.read_bytes() for path in waking.back.glob(".torpor-*/*"))
    assert (waking.was / "data/rows").read_bytes()[: 2 * MIB] in staged  # what was used later
    waking.fetch(waking.parts(first=False))
    waking.complete()


def test_the_user_s_list_overrides_what_was_learned(
    woken: Waking, machines: Machines, tmp_path: Path
) -> None:
    other = machines(woken.engine.store, tmp_path / "third")
    run, plan = other.begin_restore(_learn(woken), [tmp_path / "again"], first=["rest/a"])
    run.end()
    assert plan.first == 1


def test_where_reads_do_not_show_nothing_is_learned_and_the_report_says_so(
    woken: Waking, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(file_use, "blind_place", lambda roots, excluded: roots[0])
    _read(woken.back, "data/rows")
    report = woken.engine.hibernate([woken.back])
    assert _classes(woken.engine, report.snapshot) == {}
    (said,) = (row["value"] for row in report.rows() if row["what"] == "order of the next wake")
    assert str(woken.back) in said
