"""One file or directory of a snapshot comes back beside what is there, and never over it."""

from __future__ import annotations

import errno
import os
import random
from pathlib import Path
from typing import Any

import pytest

from tests.fixtures.engine import WORKSPACE, Engine
from tests.fixtures.memory_store import MemoryStore
from tests.fixtures.snapshots import Machines
from tests.fixtures.trees import content, differences, facts, kept, let_settle, plant_every_kind
from torpor.control.remote.paths import RemotePath
from torpor.machine.agent import paths
from torpor.shared.errors import InvalidInput, SnapshotDamaged, WorkspaceBusy
from torpor.shared.format.names import packs_prefix
from torpor.shared.values import MIB
from torpor.shared.wire.restore import Checked, RestorePlan


class Recovery:
    """A snapshot of ``was``, of which paths come back into ``into`` on the machine itself."""

    def __init__(self, engine: Engine, was: Path, into: Path) -> None:
        self.engine, self.was, self.into = engine, was, into
        self.snapshot = engine.snapshot([was])

    def run(self, path: bytes, **options: Any) -> RemotePath:
        return self.engine.path_restore(self.snapshot, path, self.into, **options)

    def restore(self, path: bytes, *, aside: str = "") -> RestorePlan:
        """``aside``: the new name of what is there."""
        run = self.run(path, aside=bool(aside))
        plan = _fetched(run)
        checked = Checked([], 0, moved_aside=aside and str(self.into / aside))
        assert run.check(full=True) == run.check(full=True) == checked  # the first was lost
        run.end()
        return plan

    def holds(self, *names: str) -> None:
        """``into`` holds these and nothing else."""
        assert sorted(os.listdir(self.into)) == sorted(names)


def _fetched(run: RemotePath) -> RestorePlan:
    plan = run.begin()
    for part in plan.parts:
        run.restore_part(part)
    return plan


@pytest.fixture
def recovery(engine: Engine, was: Path, tmp_path: Path) -> Recovery:
    """Of a workspace at rest, with a symlink and an empty file."""
    (was / "link").symlink_to("nowhere")
    (was / "empty").touch(mode=0o400)
    let_settle()
    return Recovery(engine, was, tmp_path / "into")


def test_a_directory_with_every_kind_of_entry(
    machines: Machines, memory_store: MemoryStore, tmp_path: Path
) -> None:
    was = tmp_path / "work" / "every"
    plant_every_kind(was)
    (was.parent / "outside").write_bytes(b"not asked for")
    os.link(was.parent / "outside", was / "linked")  # its file stands outside of what is asked for
    os.link(was.parent / "outside", was / "linked too")
    before = kept(was)
    let_settle()
    engine = machines(memory_store, tmp_path / "home", bytes(range(32)))
    recovery = Recovery(engine, was.parent, tmp_path / "into")
    engine.restart()
    back = recovery.into / "every"
    assert recovery.restore(b"every").roots == [str(back)]
    recovery.holds("every")
    assert differences(before, facts(back)) == []
    assert (back / "linked").samefile(back / "linked too")


def test_a_single_file_brings_no_more_than_its_packs(recovery: Recovery) -> None:
    recovery.into.mkdir()
    (recovery.into / "mine").write_text("stays")
    plan = recovery.restore(b"d/other")
    assert facts(recovery.into)[b"other"] == facts(recovery.was / "d")[b"other"]
    assert (plan.files, plan.bytes) == (1, 2000)
    assert plan.stored_bytes < MIB  # the 5 MiB beside it were not asked for
    for name in ("link", "empty"):
        recovery.restore(name.encode())
        assert facts(recovery.into)[name.encode()] == facts(recovery.was)[name.encode()]
    recovery.holds("mine", "other", "link", "empty")


@pytest.mark.rule(11)
def test_what_is_there_is_refused_or_moved_aside_and_never_lost(recovery: Recovery) -> None:
    into = recovery.into
    (into / "d").mkdir(parents=True)
    (into / "d" / "new work").write_text("precious")
    (into / "small").write_text("precious too")
    for path in (b"d", b"small"):
        with pytest.raises(InvalidInput, match="already exists on the machine: torpor never over"):
            recovery.run(path).begin()
    recovery.holds("d", "small")
    before = f".before-{recovery.snapshot}"
    for path, aside in ((b"d", f"d{before}"), (b"small", f"small{before}")):
        recovery.restore(path, aside=aside)
    recovery.restore(b"small", aside=f"small{before}-2")
    recovery.holds("d", "small", f"d{before}", f"small{before}", f"small{before}-2")
    assert (into / f"d{before}" / "new work").read_text() == "precious"
    assert (into / f"small{before}").read_text() == "precious too"
    assert (into / "small").read_bytes() == content(2, 3000)


@pytest.mark.rule(11)
def test_what_came_meanwhile_is_not_overwritten(recovery: Recovery) -> None:
    for path in (b"small", b"d"):
        run = recovery.run(path)
        _fetched(run)
        place = recovery.into / path.decode()
        place.touch()
        with pytest.raises(InvalidInput, match="appeared on the machine during"):
            run.check(full=True)
        run.end()
        assert place.read_bytes() == b""
    recovery.holds("small", "d")


@pytest.mark.rule(11)
def test_what_was_moved_aside_comes_back_where_the_new_file_cannot_take_its_name(
    recovery: Recovery, monkeypatch: pytest.MonkeyPatch
) -> None:
    into = recovery.into
    into.mkdir()
    (into / "small").write_text("precious")
    run = recovery.run(b"small", aside=True)
    _fetched(run)

    def fails(*_: Any, **__: Any) -> None:
        raise OSError(errno.EIO, "a disk that fails")

    with monkeypatch.context() as patched:
        patched.setattr(os, "link", fails)
        with pytest.raises(OSError, match="a disk that fails"):
            run.check(full=True)
    recovery.holds("small", *(name for name in os.listdir(into) if name[:8] == ".torpor-"))
    assert (into / "small").read_text() == "precious"
    aside = into / f"small.before-{recovery.snapshot}"
    assert run.check(full=True) == Checked([], 0, moved_aside=str(aside))  # asked again
    run.end()
    assert aside.read_text() == "precious"
    assert (into / "small").read_bytes() == content(2, 3000)


def test_a_run_that_ends_early_leaves_nothing(engine: Engine, was: Path, tmp_path: Path) -> None:
    (was / "d").chmod(0o500)
    recovery = Recovery(engine, was, tmp_path / "into")
    for prepared in (False, True):
        run = recovery.run(b"d")
        plan = run.begin()
        if prepared:
            run.restore_part(plan.parts[0])
            run.finish()
        assert [name[:8] for name in os.listdir(recovery.into)] == [".torpor-"]
        run.end()
        recovery.holds()


def test_an_agent_that_is_killed_is_followed_by_one_that_goes_on(
    engine: Engine, was: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine.snapshot([was])
    (was / "later").write_bytes(random.Random(2).randbytes(2 * MIB))  # in a pack of its own
    let_settle()
    recovery = Recovery(engine, was, tmp_path / "into")
    run = recovery.run(b"", part_bytes=MIB)
    first, *rest = run.begin().parts
    assert rest
    run.restore_part(first)
    with monkeypatch.context() as killed:  # a kill gives nothing back and removes nothing
        killed.setattr(paths, "_remove", lambda stage: None)
        engine.restart()
    again = _fetched(run)
    assert {key for part in again.parts for key in part.packs} <= {
        key for part in rest for key in part.packs
    }
    assert run.check(full=True).differences == []
    run.end()
    assert differences(facts(was), facts(recovery.into / "was")) == []
    recovery.holds("was")


def test_what_the_agent_knows_of_the_workspace_stays(recovery: Recovery) -> None:
    """The next snapshot is an increment all the same, of the place restored into too."""
    recovery.into = recovery.was / "recovered"
    recovery.restore(b"small")
    let_settle()
    run = recovery.engine.begin([recovery.was])
    assert run.store(1).unaccepted_count == 1
    with pytest.raises(WorkspaceBusy):
        recovery.run(b"small").begin()
    run.end(committed=False)


def test_what_is_not_in_the_snapshot_is_refused(recovery: Recovery) -> None:
    for path, root in ((b"nowhere", 0), (b"sma", 0), (b"small/", 0), (b"small", 1), (b"../x", 0)):
        with pytest.raises(InvalidInput, match="has nothing at"):
            recovery.run(path, root=root).begin()
    assert not recovery.into.exists()
    recovery.into.touch()
    with pytest.raises(InvalidInput, match="is not a directory"):
        recovery.run(b"small").begin()


def test_a_damaged_path_is_not_moved_into_place(recovery: Recovery) -> None:
    store = recovery.engine.store
    for found in list(store.list(packs_prefix(WORKSPACE))):
        blob = bytearray(store.get(found.key, max_bytes=1 << 30))
        blob[::100] = bytes(byte ^ 1 for byte in blob[::100])
        store.put(found.key, bytes(blob))
    run = recovery.run(b"small")
    with pytest.raises(SnapshotDamaged, match="small"):
        _fetched(run)
    run.end()
    recovery.holds()
