"""What changes while a snapshot is made is read again, or flagged, or both; also what a program
stores through a mapping."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.fixtures.activity import sampled
from tests.fixtures.engine import Engine
from tests.fixtures.mapper import Mapper, stored
from tests.fixtures.snapshots import (
    comes_back,
    commit,
    commit_at_rest,
    manifest_of,
    scan_and_store,
    store_rest,
)
from tests.fixtures.trees import content, let_settle
from torpor.machine.agent.known import KnownFiles
from torpor.machine.tree import mappings
from torpor.machine.tree.names import Names
from torpor.machine.tree.walk import Walk
from torpor.shared.errors import WorkspaceInvalid
from torpor.shared.values import MIB
from torpor.shared.wire.brought import MakePaths
from torpor.shared.wire.snapshot import Confirm, Confirmed

Change = Callable[[Path], object]


def _append(path: Path) -> None:
    with path.open("ab") as file:
        file.write(b"more")


def _rewrite(path: Path) -> None:
    path.write_bytes(bytes(path.stat().st_size))


def _replace(path: Path) -> None:
    new = path.with_name("new")
    new.write_bytes(b"x" * path.stat().st_size)
    os.replace(new, path)


def _after_unlink(make: Change) -> Change:
    def change(path: Path) -> None:
        path.unlink()
        make(path)

    return change


CHANGED: dict[str, Change] = {
    "appended": _append,
    "truncated": lambda path: os.truncate(path, 1000),
    "rewritten": _rewrite,
    "replaced": _replace,
    "chmodded": lambda path: path.chmod(0o600),
}
GONE: dict[str, Change] = {
    "deleted": lambda path: path.unlink(),
    "a fifo": _after_unlink(os.mkfifo),
    "a symlink": _after_unlink(lambda path: path.symlink_to("d/other")),
    "a directory": _after_unlink(lambda path: path.mkdir()),
}


@pytest.mark.rule(4)
@pytest.mark.parametrize("name", ["small", "big"])
@pytest.mark.parametrize("change", CHANGED)
def test_a_file_that_changes_between_walk_and_read_is_flagged_and_read_again(
    engine: Engine, was: Path, name: str, change: str
) -> None:
    run = engine.begin([was])
    seen = run.walk()
    CHANGED[change](was / name)
    store_rest(engine, run, seen)
    flagged, committed = commit(run)
    assert committed.unaccepted == [name]
    entries = manifest_of(engine, flagged).entries
    assert [e.path for e in entries if e.changed] == [name.encode()]
    run.end(committed=True)

    # the index does not believe it either: the next snapshot reads it, and it alone
    let_settle()
    run = engine.begin([was])
    again = run.walk()
    assert (again.unaccepted_count, again.unaccepted) == (1, [name])
    store_rest(engine, run, again)
    snapshot = commit_at_rest(run)
    run.end(committed=True)
    comes_back(engine, snapshot, was)


@pytest.mark.parametrize("name", ["small", "big"])
@pytest.mark.parametrize("change", GONE)
def test_a_file_that_goes_between_walk_and_read_is_left_out(
    engine: Engine, was: Path, name: str, change: str
) -> None:
    run = engine.begin([was])
    seen = run.walk()
    GONE[change](was / name)
    store_rest(engine, run, seen)
    snapshot, _ = commit(run)
    assert name.encode() not in [e.path for e in manifest_of(engine, snapshot).entries]
    assert run.confirm().unaccepted_count >= 1
    let_settle()
    again = run.walk()
    store_rest(engine, run, again)
    comes_back(engine, commit_at_rest(run), was)


def test_a_rewrite_right_after_reading_is_found_by_the_next_pass(engine: Engine, was: Path) -> None:
    fresh = was / "fresh"
    fresh.write_bytes(b"one")
    run = engine.begin([was])
    seen = run.walk()
    store_rest(engine, run, seen)
    before = fresh.stat()
    fd = os.open(fresh, os.O_WRONLY)
    os.pwrite(fd, b"two", 0)
    os.close(fd)
    os.utime(fresh, ns=(0, before.st_mtime_ns))
    again = run.walk()
    assert "fresh" in again.unaccepted
    store_rest(engine, run, again)
    let_settle()
    scan_and_store(run)
    comes_back(engine, commit_at_rest(run), was)


@pytest.mark.rule(4)
def test_names_that_may_change_are_accepted_and_no_others(engine: Engine, was: Path) -> None:
    (was / "d/app.log").write_bytes(b"line\n" * 100)
    let_settle()
    run = engine.begin([was], "*.log")
    seen = run.walk()
    assert sorted(seen.unaccepted) == ["big", "d/other", "small"]
    assert seen.unaccepted_count == 3
    assert seen.unread == 5 * MIB + 3000 + 2000 + 500
    _append(was / "d/app.log")
    _append(was / "small")
    store_rest(engine, run, seen)
    committed = commit(run)[1]
    assert (committed.unaccepted, committed.accepted) == (["small"], ["d/app.log"])
    assert run.confirm() == Confirmed(1, ["small"], 1, ["d/app.log"])
    both = Confirmed(0, [], 2, ["small", "d/app.log"])
    assert engine.call(Confirm(run.run, ["*.log", "small"])) == both


# -- the last look

CONFIRMED: dict[str, tuple[Callable[[Path], object], str]] = {
    "content": (lambda was: _append(was / "small"), "small"),
    "content, same time": (lambda was: _keeping_time(was / "small", _rewrite), "small"),
    "new file": (lambda was: (was / "new").write_text("x"), "new"),
    "new directory": (lambda was: (was / "d/new").mkdir(), "d/new"),
    "new symlink": (lambda was: (was / "new").symlink_to("x"), "new"),
    "deleted": (lambda was: (was / "d/other").unlink(), "d/other"),
    "mode": (lambda was: (was / "d").chmod(0o711), "d"),
    "replaced, same time": (lambda was: _keeping_time(was / "small", _replace), "small"),
    "touched": (lambda was: _keeping_time(was / "small", lambda path: None), "small"),
    "linked": (lambda was: os.link(was / "small", was / "also"), "also"),
    "moved": (lambda was: (was / "small").rename(was / "d/small"), "d/small"),
}


def _keeping_time(path: Path, change: Change) -> None:
    st = path.stat()
    change(path)
    os.utime(path, ns=(st.st_atime_ns, st.st_mtime_ns))


@pytest.mark.rule(4)
@pytest.mark.parametrize("change", CONFIRMED)
def test_the_last_look_finds_what_changed_since_the_commit(
    engine: Engine, was: Path, change: str
) -> None:
    run = engine.begin([was])
    scan_and_store(run)
    run.store(1)
    commit(run)
    assert run.confirm() == Confirmed(0, [])
    make, name = CONFIRMED[change]
    make(was)
    found = run.confirm()
    assert name in found.unaccepted
    assert found.unaccepted_count == len(found.unaccepted)


@pytest.mark.rule(3)
def test_a_workspace_that_became_empty_is_no_snapshot(engine: Engine, was: Path) -> None:
    run = engine.begin([was])
    scan_and_store(run)
    os.rename(was, was.with_name("unmounted"))
    was.mkdir()
    assert run.store(1).unaccepted_count == 0
    with pytest.raises(WorkspaceInvalid, match="has become empty while it was read"):
        commit(run)
    assert engine.snapshots() == []


@pytest.mark.rule(22)
def test_a_directory_that_torpor_made_and_that_held_a_file_in_an_earlier_pass_is_not_empty(
    engine: Engine, tmp_path: Path
) -> None:
    made = tmp_path / "made"
    engine.call(MakePaths([str(made)]))
    sampled(engine.home)
    run = engine.begin([made])
    (made / "note").touch()
    scan_and_store(run)
    (made / "note").unlink()
    assert run.store(1).unaccepted_count == 0
    with pytest.raises(WorkspaceInvalid, match="has become empty while it was read"):
        commit(run)
    run.end(committed=False)
    (made / "work").write_bytes(b"mine" * 1000)
    run = engine.begin([made])
    scan_and_store(run)  # and the control side is gone
    run.end(committed=False)
    (made / "work").unlink()
    with pytest.raises(WorkspaceInvalid, match="is empty: there is nothing to keep"):
        engine.begin([made])
    assert engine.snapshots() == []


def test_small_files_that_were_only_touched_are_read_and_not_stored_again(
    engine: Engine, tmp_path: Path
) -> None:
    root = tmp_path / "touched"
    root.mkdir()
    for number in range(9):
        (root / f"{number}").write_bytes(bytes([number]) * (1000 + number))
    let_settle()
    engine.snapshot([root])
    os.utime(root / "3")
    (root / "5").chmod(0o600)
    (root / "7").write_bytes(b"other" * 50)
    let_settle()
    run = engine.begin([root])
    assert scan_and_store(run) == 250
    snapshot, _ = commit(run)
    run.end(committed=True)
    comes_back(engine, snapshot, root)


# -- programs that store through a mapping


@pytest.mark.rule(4)
@pytest.mark.parametrize("size", [3000, 5 * MIB])
def test_the_last_store_of_a_program_that_ends_after_the_read_is_kept(
    engine: Engine, tmp_path: Path, size: int
) -> None:
    """It stores while the disk is walked, and once more after the file was read."""
    was = tmp_path / "was"
    for number in range(200):  # the walk takes a while until it looks at the file
        (was / f"{number:03}").mkdir(parents=True)
    file = was / "199/mapped"
    file.write_bytes(content(1, size))
    let_settle()
    run = engine.begin([was])
    with Mapper(file) as program:
        with program.busy():
            seen = run.walk()
        let_settle()
        store_rest(engine, run, seen)
        last = program.end()
    while (seen := run.walk()).packs:
        let_settle()
        store_rest(engine, run, seen)
    snapshot, _ = commit(run)
    assert run.confirm().unaccepted == []
    run.end(committed=True)
    engine.restore(snapshot, [tmp_path / "back"])
    assert stored(tmp_path / "back/199/mapped") == last


@pytest.mark.rule(4)
def test_a_store_after_the_last_read_is_seen_by_the_last_look(engine: Engine, was: Path) -> None:
    run = engine.begin([was])
    with Mapper(was / "big") as program:
        program.store()
        let_settle()
        scan_and_store(run)
        assert run.store(1).unaccepted == []
        commit(run)
        program.store()
    assert run.confirm().unaccepted == ["big"]
    run.end(committed=True)


def test_a_name_that_the_manifest_lacks_is_seen_by_the_last_look(
    engine: Engine, was: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    complete = KnownFiles.complete

    def lacking(known: KnownFiles, seen: Walk, gone: set[int]) -> Names:
        names = complete(known, seen, gone)
        return names.without({names.find(0, b"big")})

    run = engine.begin([was])
    scan_and_store(run)
    monkeypatch.setattr(KnownFiles, "complete", lacking)
    commit(run)
    assert run.confirm().unaccepted == ["big"]


@pytest.mark.rule(4)
def test_who_alone_keeps_a_file_from_counting_as_unchanged_is_named(
    engine: Engine, was: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In each walk: the machine is kept until that process has ended."""
    monkeypatch.setattr(mappings, "shows_stores", lambda place: False)
    run = engine.begin([was])
    with Mapper(was / "big") as program:
        let_settle()
        says = re.escape(f"big ({program.name} has it mapped for writing") + ", .*: end that .*"
        scan_and_store(run)
        (again,) = run.store(1).unaccepted
        commit(run)
        (last,) = run.confirm().unaccepted
    for name in (again, last):
        assert re.fullmatch(says, name)
    run.end(committed=False)
