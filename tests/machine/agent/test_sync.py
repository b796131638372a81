"""Syncs step by step: what is fetched, what is refused, what is never touched."""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import re
import shutil
import struct
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.fixtures.engine import WORKSPACE, Engine
from tests.fixtures.memory_store import MemoryStore
from tests.fixtures.snapshots import Two, reads_nothing
from tests.fixtures.trees import Facts, content, differences, facts, kept, let_settle
from torpor.machine.agent.state import WorkspaceState
from torpor.machine.tree.staging import copy_range
from torpor.shared.errors import (
    AgentLost,
    InvalidInput,
    StillChanging,
    StoreUnavailable,
    TorporError,
    UnsavedWork,
    WorkspaceInvalid,
)
from torpor.shared.format.manifest import Entry
from torpor.shared.format.names import manifest_key
from torpor.shared.transfer import retries
from torpor.shared.values import MIB, SnapshotId
from torpor.shared.wire.restore import Checked
from torpor.shared.wire.sync import CheckSync, FinishSync, SyncPart


def _snapshot(two: Two) -> SnapshotId:
    let_settle()
    return two.engine.snapshot([two.root])


# -- what comes over


def test_only_what_differs_is_fetched(two: Two) -> None:
    inode = (two.root / "big").stat().st_ino
    done = two.sync()
    changed_chunk, small = 4 * MIB, 3600
    assert 0 < done.stored_bytes < changed_chunk + small
    assert done.copied_bytes == 0  # what is new goes into big itself
    assert (two.root / "big").stat().st_ino == inode
    assert (done.written, done.removed, done.last) == (3, 1, two.first)
    assert reads_nothing(two.engine, two.root)


def test_what_was_renamed_or_copied_is_not_fetched(engine: Engine, was: Path) -> None:
    first = engine.snapshot([was])
    (was / "d").rename(was / "e")
    (was / "big").rename(was / "e/big")
    shutil.copy2(was / "small", was / "e/copy")
    let_settle()
    second, after = engine.snapshot([was]), kept(was)
    engine.sync(first)
    done = engine.sync(second)
    assert differences(after, facts(was)) == []
    assert done.stored_bytes == 0


def test_a_machine_that_lost_its_index_keeps_what_is_right(two: Two, tmp_path: Path) -> None:
    other = Engine(two.engine.store, tmp_path / "other")
    with pytest.raises(UnsavedWork, match=r"not as in any snapshot: .*big"):
        other.begin_sync(two.second)
    done = other.sync(two.second, discard_local=True)
    assert differences(two.after, facts(two.root)) == []
    assert done.stored_bytes < 4 * MIB + 4000
    assert done.last is None
    other.runs.close()


def test_a_directory_that_is_not_there_is_made(two: Two) -> None:
    shutil.rmtree(two.root)
    with pytest.raises(UnsavedWork, match=r"big \(removed\)"):
        two.engine.begin_sync(two.second)
    two.sync(discard_local=True)


# -- what is refused


@pytest.mark.rule(12)
@pytest.mark.parametrize(
    "work",
    ["edit", "edit and set the time back", "new file", "new directory", "chmod", "delete", "link"],
)
def test_unsaved_work_is_refused_by_name_and_nothing_is_touched(two: Two, work: str) -> None:
    victim = two.root / "d/same"
    was = victim.stat()
    if work.startswith("edit"):
        victim.write_bytes(content(9, 3000))
        if work.endswith("back"):
            os.utime(victim, ns=(was.st_atime_ns, was.st_mtime_ns))
    elif work == "chmod":
        victim.chmod(0o600)
    elif work == "delete":
        victim.unlink()
    elif work == "link":
        os.link(victim, two.root / "d/mine")
    elif work == "new file":
        (two.root / "d/mine").write_bytes(b"precious")
    else:
        (two.root / "d/mine").mkdir()
    there = facts(two.root)
    name = "mine" if work.startswith("new") or work == "link" else "same"
    with pytest.raises(UnsavedWork, match=rf"d/{name}.*save_first.*discard_local"):
        two.engine.begin_sync(two.second)
    assert differences(there, facts(two.root)) == []
    saved = _snapshot(two)  # saved, it is no obstacle any more
    two.sync()
    two.engine.sync(saved)
    assert differences(there, facts(two.root)) == []


def test_an_accepted_loss_is_listed_by_name(two: Two) -> None:
    (two.root / "d/mine").write_bytes(b"not so precious")
    (two.root / "d/same").write_bytes(b"edited")
    done = two.sync(discard_local=True)
    assert (done.discarded, done.discarded_count) == (["d/mine", "d/same"], 2)


def test_work_that_the_target_holds_too_is_no_loss(two: Two) -> None:
    (two.root / "d/edited").write_bytes(content(5, 3500))
    stamp = two.after[b"d/edited"].mtime_ns
    os.utime(two.root / "d/edited", ns=(stamp, stamp))
    two.sync()


def test_what_only_a_deleted_snapshot_has_is_unsaved(two: Two) -> None:
    two.engine.store.delete([manifest_key(WORKSPACE, two.first)])
    with pytest.raises(UnsavedWork, match=r"big"):
        two.engine.begin_sync(two.second)


def test_a_fifo_in_the_way_is_named(two: Two) -> None:
    os.mkfifo(two.root / "d/new")
    with pytest.raises(UnsavedWork, match=r"d/new: FIFOs, sockets or devices"):
        two.engine.begin_sync(two.second)
    two.sync(discard_local=True)


@pytest.mark.parametrize("path", ["big", "gone", "d/edited", "d", "."])
@pytest.mark.parametrize(("flag", "shown"), [(0x10, "+i"), (0x20, "+a")])
def test_a_file_that_nobody_may_change_is_named_before_anything_changes(
    two: Two, monkeypatch: pytest.MonkeyPatch, path: str, flag: int, shown: str
) -> None:
    """As the kernel answers for a file with chattr +i, which only a few containers may set."""
    kept, real, rename = os.stat(two.root / path).st_ino, fcntl.ioctl, os.rename

    def ioctl(fd: int, number: int, value: bytes) -> bytes:
        if number == 0x80086601 and os.fstat(fd).st_ino == kept:
            return struct.pack("=Q", flag | 0x80000)  # and another flag
        return bytes(real(fd, number, value))

    def refused(*args: Any, **options: Any) -> None:
        raise PermissionError(errno.EPERM, os.strerror(errno.EPERM))

    monkeypatch.setattr(fcntl, "ioctl", ioctl)
    monkeypatch.setattr(os, "rename", refused)
    name = "the directory itself" if path == "." else path
    with pytest.raises(WorkspaceInvalid, match=re.escape(f"{name} (chattr {shown})")) as error:
        two.sync()
    assert "Nothing was changed" in str(error.value)
    assert differences(two.before, facts(two.root)) == []
    monkeypatch.setattr(fcntl, "ioctl", real)
    monkeypatch.setattr(os, "rename", rename)
    two.sync()


def test_half_a_restore_is_refused(two: Two, tmp_path: Path) -> None:
    run, _ = two.engine.begin_restore(two.first, [tmp_path / "back"])
    run.end()
    with pytest.raises(WorkspaceInvalid, match=r"a wake never finished. Wake it here again"):
        two.engine.begin_sync(two.second)


# -- excluded paths


@pytest.mark.rule(12)
def test_excluded_paths_are_never_touched(two: Two) -> None:
    (two.root / "d/cache").mkdir()
    (two.root / "d/cache/mine").write_bytes(b"mine")
    (two.root / "d/x.log").write_bytes(b"log")
    before = facts(two.root)
    done = two.engine.sync(two.second, exclude=["cache", "*.log"])
    now = facts(two.root)
    for name in (b"d/cache", b"d/cache/mine", b"d/x.log"):
        assert now.pop(name) == before[name]
    assert differences(two.after, now) == []
    assert done.left_out == 0


def test_excluded_names_of_a_snapshot_are_left_out(two: Two) -> None:
    done = two.engine.sync(two.second, exclude=["big", "new"])
    now = facts(two.root)
    assert now[b"big"] == two.before[b"big"]
    assert b"d/new" not in now
    assert done.left_out == 2
    assert now[b"d/edited"] == two.after[b"d/edited"]


def test_a_directory_that_goes_stays_for_what_is_excluded_in_it(engine: Engine, was: Path) -> None:
    first = engine.snapshot([was], ["*.log"])
    (was / "extra").mkdir()
    (was / "extra/file").write_bytes(b"goes")
    let_settle()
    engine.snapshot([was], ["*.log"])
    (was / "extra/mine.log").write_bytes(b"stays")
    done = engine.sync(first, exclude=["*.log"])
    assert (was / "extra/mine.log").read_bytes() == b"stays"
    assert not (was / "extra/file").exists()
    assert done.warnings == ["'extra' stays: it holds something that is excluded or new"]


def test_an_excluded_name_under_a_directory_that_becomes_a_file_is_named(
    engine: Engine, was: Path
) -> None:
    first = engine.snapshot([was], ["*.log"])
    (was / "small").unlink()
    (was / "small").mkdir()
    let_settle()
    engine.snapshot([was], ["*.log"])
    (was / "small/mine.log").write_bytes(b"stays")
    before = facts(was)
    with pytest.raises(InvalidInput, match=r"small/mine.log on the machine is excluded"):
        engine.begin_sync(first, exclude=["*.log"], discard_local=True)
    assert differences(before, facts(was)) == []


def test_a_link_whose_first_name_is_excluded_comes_as_a_file(engine: Engine, was: Path) -> None:
    first = engine.snapshot([was])
    (was / "a.log").write_bytes(content(7, 2000))
    os.link(was / "a.log", was / "d/kept")
    let_settle()
    second = engine.snapshot([was])
    engine.sync(first)
    engine.sync(second, exclude=["*.log"])
    assert (was / "d/kept").read_bytes() == content(7, 2000)
    assert not (was / "a.log").exists()


def test_a_hard_link_outside_the_workspace_keeps_its_content(two: Two, tmp_path: Path) -> None:
    """An inode that has a name outside of the tree is replaced, never written to."""
    (two.root / "d/same").chmod(0o604)
    let_settle()
    third = _snapshot(two)
    two.engine.sync(two.first)
    os.link(two.root / "d/same", tmp_path / "outside")
    outside = os.lstat(tmp_path / "outside")
    two.engine.sync(third)
    now = os.lstat(tmp_path / "outside")
    assert (now.st_ino, now.st_mode) == (outside.st_ino, outside.st_mode)
    assert (two.root / "d/same").stat().st_mode & 0o777 == 0o604


# -- who works there meanwhile


@pytest.mark.rule(12)
def test_a_file_that_is_edited_after_the_look_is_left_as_it_is(two: Two) -> None:
    run = two.engine.staged_sync(two.second)
    (two.root / "d/edited").write_bytes(b"precious")
    with pytest.raises(StillChanging, match=r"'d/edited' was changed on the machine"):
        run.finish()
    run.end()
    assert (two.root / "d/edited").read_bytes() == b"precious"
    done = two.engine.sync(two.second)  # completes the rest, and keeps it
    assert done.kept == ["d/edited"]
    assert (two.root / "d/edited").read_bytes() == b"precious"
    now = facts(two.root)
    assert now.pop(b"d/edited").content != two.after[b"d/edited"].content
    assert differences({p: f for p, f in two.after.items() if p != b"d/edited"}, now) == []
    saved = _snapshot(two)  # and the next snapshot has it
    back = two.root.with_name("back")
    two.engine.restore(saved, [back])
    assert (back / "d/edited").read_bytes() == b"precious"


def test_a_file_that_is_made_after_the_look_is_left_as_it_is(two: Two) -> None:
    run = two.engine.staged_sync(two.second)
    (two.root / "d/new").write_bytes(b"precious")
    with pytest.raises(StillChanging, match=r"'d/new' was made on the machine"):
        run.finish()
    assert (two.root / "d/new").read_bytes() == b"precious"


def test_a_source_that_changes_before_it_is_copied_stops_the_sync(
    engine: Engine, was: Path
) -> None:
    first = engine.snapshot([was])
    (was / "big").rename(was / "moved")
    let_settle()
    engine.snapshot([was])
    run = engine.begin_sync(first)
    (was / "moved").write_bytes(b"at work")
    before = facts(was)
    with pytest.raises(StillChanging, match="'moved' changed on the machine"):
        run.stage()
    assert differences(_files(before), _files(facts(was))) == []


@pytest.mark.rule(7, 12)
@pytest.mark.parametrize("when", ["staged", "fetched"])
def test_nothing_is_written_through_a_symlink(two: Two, tmp_path: Path, when: str) -> None:
    elsewhere = tmp_path / "elsewhere"
    shutil.copytree(two.root, elsewhere)
    before = facts(elsewhere)
    run = two.engine.begin_sync(two.second)
    if when == "fetched":
        for part in run.stage().parts:
            run.sync_part(part)
    (two.root / "d").rename(tmp_path / "moved-away")
    (two.root / "d").symlink_to(elsewhere / "d")
    with pytest.raises(TorporError, match=r"something else writes into the target|changed"):
        for part in run.stage().parts:
            run.sync_part(part)
        run.finish()
    assert differences(before, facts(elsewhere)) == []


# -- big files


@pytest.mark.parametrize("how", ["open", "mapped"])
def test_a_process_with_a_big_file_open_keeps_the_old_one(two: Two, how: str) -> None:
    old = (two.root / "big").read_bytes()
    with ExitStack() as stack:
        file = stack.enter_context((two.root / "big").open("rb"))
        if how == "mapped":
            opened = file
            file = stack.enter_context(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
            opened.close()
        two.sync()
        assert file.read() == old


@pytest.mark.parametrize("when", ["before", "half", "after"])
def test_a_patch_that_was_cut_short_is_completed_without_the_store(
    two: Two, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    _cut_a_patch_short(two, monkeypatch, when)
    assert not (two.root / "big").exists()  # never half of it under its name
    done = two.sync()
    assert (done.stored_bytes, done.copied_bytes, done.kept) == (0, 0, [])


@pytest.mark.parametrize("discard_local", [False, True])
def test_what_came_in_the_place_of_a_file_that_was_being_patched_counts(
    two: Two, monkeypatch: pytest.MonkeyPatch, discard_local: bool
) -> None:
    _cut_a_patch_short(two, monkeypatch, "half")
    (two.root / "big").write_bytes(b"precious")
    done = two.engine.sync(two.second, discard_local=discard_local)
    if discard_local:
        assert differences(two.after, facts(two.root)) == []
    else:
        assert done.kept == ["big"]
        assert (two.root / "big").read_bytes() == b"precious"
    assert not any(b".torpor-" in path for path in facts(two.root))


def _cut_a_patch_short(two: Two, monkeypatch: pytest.MonkeyPatch, when: str) -> None:
    """Stop a sync in the middle of patching ``big``; the agent is gone afterwards."""

    def cut_short(source: int, offset: int, fd: int, at: int, length: int, entry: Entry) -> None:
        if when != "before":
            copy_range(source, offset, fd, at, length, entry)
        if when == "half":
            os.pwrite(fd, bytes(5000), at + 17)
        raise OSError(errno.EIO, "as if the power went")

    run = two.engine.staged_sync(two.second)
    with monkeypatch.context() as broken:
        broken.setattr("torpor.machine.tree.patch.copy_range", cut_short)
        with pytest.raises(OSError, match="as if the power went"):
            run.finish()
    two.engine.restart()


# -- the store goes away, and other syncs


@pytest.mark.rule(12)
def test_a_store_that_fails_on_the_way_leaves_the_old_files_whole(
    two: Two, memory_store: MemoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(retries, "FIRST_WAIT_S", 0.001)
    run = two.engine.begin_sync(two.second)
    planned = run.stage()
    grants = [[two.engine.grant("GET", key) for key in part.packs] for part in planned.parts]
    memory_store.fails = StoreUnavailable("away")
    with pytest.raises(StoreUnavailable):
        for granted in grants:
            two.engine.call(SyncPart(run.run, granted))
    memory_store.fails = None
    with pytest.raises(InvalidInput, match="sync all parts before finish"):
        run.finish()
    run.end()
    assert differences(_files(two.before), _files(facts(two.root))) == []
    assert two.sync().kept == []


def _files(tree: dict[bytes, Facts]) -> dict[bytes, Facts]:
    """A tree without what a sync stages beside it, which moves the directories' times."""
    return {p: f for p, f in tree.items() if b".torpor-" not in p and f.kind != "directory"}


def test_what_was_staged_is_not_fetched_again(two: Two) -> None:
    two.engine.staged_sync(two.second)
    two.engine.restart()
    done = two.sync()
    assert (done.stored_bytes, done.copied_bytes) == (0, 0)


@pytest.mark.parametrize("then", ["a snapshot", "a sync to another snapshot"])
def test_what_was_only_staged_is_cleared_away(two: Two, then: str) -> None:
    (two.root / "d/third").write_bytes(b"third")
    third = _snapshot(two)
    two.engine.begin_sync(two.second).stage()
    two.engine.restart()
    assert any(b".torpor-" in path for path in facts(two.root))
    if then == "a snapshot":
        _snapshot(two)
        assert WorkspaceState(two.engine.home, WORKSPACE).sync_record() is None
    else:
        two.engine.sync(third)
    assert not any(b".torpor-" in path for path in facts(two.root))


def test_half_a_sync_is_completed_before_another_one_begins(two: Two) -> None:
    third = _half_a_sync(two)
    with pytest.raises(WorkspaceInvalid, match=f"only half of snapshot {two.second}"):
        two.engine.begin_sync(third)
    with pytest.raises(WorkspaceInvalid, match=f"only half of snapshot {two.second}"):
        two.engine.begin([two.root])
    with pytest.raises(InvalidInput, match="is not empty"):
        two.engine.begin_restore(two.first, [two.root], resume=True)
    with pytest.raises(WorkspaceInvalid, match=f"only half of snapshot {two.second}"):
        two.engine.begin_restore(two.first, [two.root.with_name("elsewhere")])
    two.engine.sync(two.second)
    two.engine.sync(third)


def test_half_a_sync_whose_directory_was_emptied_is_woken_over(two: Two) -> None:
    _half_a_sync(two)
    shutil.rmtree(two.root)
    two.engine.restore(two.first, [two.root])
    assert differences(two.before, facts(two.root)) == []
    _snapshot(two)


def test_half_a_sync_may_be_given_up_where_its_loss_is_accepted(two: Two) -> None:
    third = _half_a_sync(two)
    two.engine.sync(third, discard_local=True)
    assert (two.root / "d/third").read_bytes() == b"third"
    assert WorkspaceState(two.engine.home, WORKSPACE).sync_record() is None


def test_a_record_that_is_damaged_is_taken_for_half_a_sync(two: Two) -> None:
    record = two.engine.home / "workspaces" / WORKSPACE / "sync"
    record.write_bytes(b"torn")
    with pytest.raises(WorkspaceInvalid, match="only half of snapshot unknown"):
        two.engine.begin([two.root])
    two.sync(discard_local=True)


def _half_a_sync(two: Two) -> SnapshotId:
    """Leave a sync to ``second`` behind that stopped in the middle; returns a third snapshot."""
    (two.root / "d/third").write_bytes(b"third")
    third = _snapshot(two)
    run = two.engine.staged_sync(two.second)
    moved = two.root / "d/new"
    moved.write_bytes(b"in the way")
    with pytest.raises(StillChanging):
        run.finish()
    moved.unlink()
    two.engine.restart()
    return third


def test_nothing_is_fetched_or_changed_before_the_new_files_are_staged(two: Two) -> None:
    run = two.engine.begin_sync(two.second).run
    for request in (SyncPart(run, []), FinishSync(run), CheckSync(run, full=False)):
        with pytest.raises(AgentLost, match="has not staged the new files"):
            two.engine.call(request)
    assert differences(two.before, facts(two.root)) == []


def test_repeated_calls_change_nothing(two: Two) -> None:
    run = two.engine.begin_sync(two.second)
    assert run.begin() == run.begin()
    planned = run.stage()
    assert run.stage() == planned
    for part in planned.parts * 2:
        run.sync_part(part)
    assert run.finish() == run.finish()
    assert run.check(full=True) == run.check(full=True) == Checked([], 0)
    run.end()
    assert differences(two.after, facts(two.root)) == []
