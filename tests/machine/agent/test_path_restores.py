"""One file or directory of a snapshot comes back beside what is there, and never over it."""

from __future__ import annotations

import errno
import os
import random
import stat
from pathlib import Path
from typing import Any

import pytest

from tests.fixtures.engine import WORKSPACE, Engine
from tests.fixtures.snapshots import Machines, manifest_of
from tests.fixtures.stores import Server
from tests.fixtures.trees import (
    content,
    differences,
    facts,
    kept,
    let_settle,
    plant_every_kind,
)
from torpor.control.remote.paths import RemotePath
from torpor.machine.agent import paths
from torpor.shared.errors import InvalidInput, SnapshotDamaged, WorkspaceBusy
from torpor.shared.format.names import packs_prefix
from torpor.shared.values import MIB, SnapshotId
from torpor.shared.wire.restore import Checked, RestorePlan


def _restore(
    engine: Engine, snapshot: SnapshotId, path: bytes, into: Path, *, aside: bool = False
) -> RestorePlan:
    run = engine.path_restore(snapshot, path, into, aside=aside)
    plan = _fetched(run)
    assert run.check(full=True) == run.check(full=True) == Checked([], 0)  # the first was lost
    run.end()
    return plan


def _fetched(run: RemotePath) -> RestorePlan:
    plan = run.begin()
    for part in plan.parts:
        run.restore_part(part)
    return plan


def _nothing_else(into: Path, *names: str) -> None:
    assert sorted(os.listdir(into)) == sorted(names)


@pytest.mark.parametrize("key", [None, bytes(range(32))], ids=["plain", "sealed"])
def test_a_directory_with_every_kind_of_entry(
    machines: Machines, seaweed: Server, tmp_path: Path, key: bytes | None
) -> None:
    was = tmp_path / "work" / "every"
    plant_every_kind(was)
    (was.parent / "outside").write_bytes(b"not asked for")
    os.link(was.parent / "outside", was / "linked")  # its file stands outside of what is asked for
    os.link(was.parent / "outside", was / "linked too")
    before = kept(was)
    let_settle()
    engine = machines(seaweed.store(), tmp_path / "home", key)
    snapshot = engine.snapshot([was.parent])
    engine.restart()
    into = tmp_path / "into"
    plan = _restore(engine, snapshot, b"every", into)
    assert plan.roots == [str(into / "every")]
    _nothing_else(into, "every")
    assert differences(before, facts(into / "every")) == []
    assert os.stat(into / "every/linked").st_ino == os.stat(into / "every/linked too").st_ino


def test_a_single_file_brings_no_more_than_its_packs(
    engine: Engine, was: Path, tmp_path: Path
) -> None:
    snapshot = engine.snapshot([was])
    into = tmp_path / "into"
    into.mkdir()
    (into / "mine").write_text("stays")
    plan = _restore(engine, snapshot, b"d/other", into)
    assert (into / "other").read_bytes() == content(3, 2000)
    assert (into / "other").stat().st_mtime_ns == (was / "d/other").stat().st_mtime_ns
    assert (plan.files, plan.bytes) == (1, 2000)
    assert plan.stored_bytes < MIB  # the 5 MiB beside it were not asked for
    _nothing_else(into, "mine", "other")


def test_a_whole_directory_of_the_workspace(engine: Engine, was: Path, tmp_path: Path) -> None:
    snapshot = engine.snapshot([was])
    _restore(engine, snapshot, b"", tmp_path / "into")
    assert differences(facts(was), facts(tmp_path / "into" / "was")) == []


def test_a_symlink_and_an_empty_file(engine: Engine, was: Path, tmp_path: Path) -> None:
    (was / "link").symlink_to("nowhere")
    (was / "empty").touch(mode=0o400)
    let_settle()
    snapshot = engine.snapshot([was])
    for name in ("link", "empty"):
        _restore(engine, snapshot, name.encode(), tmp_path / "into")
    assert os.readlink(tmp_path / "into/link") == "nowhere"
    assert stat.S_IMODE((tmp_path / "into/empty").stat().st_mode) == 0o400
    _nothing_else(tmp_path / "into", "link", "empty")


def test_what_is_there_is_refused_or_moved_aside_and_never_lost(
    engine: Engine, was: Path, tmp_path: Path
) -> None:
    snapshot = engine.snapshot([was])
    into = tmp_path / "into"
    (into / "d").mkdir(parents=True)
    (into / "d" / "new work").write_text("precious")
    (into / "small").write_text("precious too")
    for path in (b"d", b"small"):
        with pytest.raises(InvalidInput, match="already exists on the machine: torpor never over"):
            engine.path_restore(snapshot, path, into).begin()
    _nothing_else(into, "d", "small")
    for path in (b"d", b"small", b"small"):
        _restore(engine, snapshot, path, into, aside=True)
    before = f".before-{snapshot}"
    _nothing_else(into, "d", "small", f"d{before}", f"small{before}", f"small{before}-2")
    assert (into / f"d{before}" / "new work").read_text() == "precious"
    assert (into / f"small{before}").read_text() == "precious too"
    assert (into / "small").read_bytes() == content(2, 3000)


def test_what_came_meanwhile_is_not_overwritten(engine: Engine, was: Path, tmp_path: Path) -> None:
    snapshot = engine.snapshot([was])
    for path in (b"small", b"d"):
        run = engine.path_restore(snapshot, path, tmp_path / "into")
        _fetched(run)
        place = tmp_path / "into" / path.decode()
        place.touch()
        with pytest.raises(InvalidInput, match="appeared on the machine during"):
            run.check(full=True)
        run.end()
        assert place.read_bytes() == b""
    _nothing_else(tmp_path / "into", "small", "d")


def test_what_was_moved_aside_comes_back_where_the_new_file_cannot_take_its_name(
    engine: Engine, was: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    snapshot, into = engine.snapshot([was]), tmp_path / "into"
    into.mkdir()
    (into / "small").write_text("precious")
    run = engine.path_restore(snapshot, b"small", into, aside=True)
    _fetched(run)

    def fails(*_: Any, **__: Any) -> None:
        raise OSError(errno.EIO, "a disk that fails")

    with monkeypatch.context() as patched:
        patched.setattr(os, "link", fails)
        with pytest.raises(OSError, match="a disk that fails"):
            run.check(full=True)
    _nothing_else(into, "small", *(name for name in os.listdir(into) if name[:8] == ".torpor-"))
    assert (into / "small").read_text() == "precious"
    assert run.check(full=True) == Checked([], 0)  # asked again
    run.end()
    assert (into / f"small.before-{snapshot}").read_text() == "precious"
    assert (into / "small").read_bytes() == content(2, 3000)


def test_a_run_that_ends_early_leaves_nothing(engine: Engine, was: Path, tmp_path: Path) -> None:
    (was / "d").chmod(0o500)
    snapshot = engine.snapshot([was])
    for prepared in (False, True):
        run = engine.path_restore(snapshot, b"d", tmp_path / "into")
        plan = run.begin()
        if prepared:
            run.restore_part(plan.parts[0])
            run.finish()
        assert [name[:8] for name in os.listdir(tmp_path / "into")] == [".torpor-"]
        run.end()
        _nothing_else(tmp_path / "into")


def test_an_agent_that_is_killed_is_followed_by_one_that_goes_on(
    engine: Engine, was: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine.snapshot([was])
    (was / "later").write_bytes(random.Random(2).randbytes(2 * MIB))  # in a pack of its own
    let_settle()
    snapshot = engine.snapshot([was])
    run = engine.path_restore(snapshot, b"", tmp_path / "into", part_bytes=MIB)
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
    assert differences(facts(was), facts(tmp_path / "into" / "was")) == []
    _nothing_else(tmp_path / "into", "was")


def test_what_the_agent_knows_of_the_workspace_stays(
    engine: Engine, was: Path, tmp_path: Path
) -> None:
    """The next snapshot is an increment all the same, of the place restored into too."""
    snapshot = engine.snapshot([was])
    _restore(engine, snapshot, b"small", was / "recovered")
    let_settle()
    run = engine.begin([was])
    assert run.scan(1).unaccepted_count == 1
    with pytest.raises(WorkspaceBusy):
        engine.path_restore(snapshot, b"small", tmp_path / "into").begin()
    run.end(committed=False)


def test_what_is_not_in_the_snapshot_is_refused(engine: Engine, was: Path, tmp_path: Path) -> None:
    snapshot = engine.snapshot([was])
    for path, root in ((b"nowhere", 0), (b"sma", 0), (b"small/", 0), (b"small", 1), (b"../x", 0)):
        with pytest.raises(InvalidInput, match="has nothing at"):
            engine.path_restore(snapshot, path, tmp_path / "into", root=root).begin()
    (tmp_path / "file").touch()
    with pytest.raises(InvalidInput, match="is not a directory"):
        engine.path_restore(snapshot, b"small", tmp_path / "file").begin()
    assert not (tmp_path / "into").exists()


def test_a_damaged_path_is_not_moved_into_place(engine: Engine, was: Path, tmp_path: Path) -> None:
    snapshot = engine.snapshot([was])
    chunk_count = len(manifest_of(engine, snapshot).chunks)
    assert chunk_count > 1
    for found in list(engine.store.list(packs_prefix(WORKSPACE))):
        blob = bytearray(engine.store.get(found.key, max_bytes=1 << 30))
        blob[::100] = bytes(byte ^ 1 for byte in blob[::100])
        engine.store.put(found.key, bytes(blob))
    run = engine.path_restore(snapshot, b"small", tmp_path / "into")
    with pytest.raises(SnapshotDamaged, match="small"):
        _fetched(run)
    run.end()
    _nothing_else(tmp_path / "into")
