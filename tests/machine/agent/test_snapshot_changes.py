"""What changes while a snapshot is made is read again, or flagged, or both."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.fixtures.engine import WORKSPACE, Engine
from tests.fixtures.snapshots import comes_back, manifest_of, store_parts
from tests.fixtures.trees import let_settle
from torpor.shared.errors import (
    WorkspaceInvalid,
)
from torpor.shared.format.names import new_pack_key

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


@pytest.mark.parametrize("name", ["small", "big"])
@pytest.mark.parametrize("change", CHANGED)
def test_a_file_that_changes_between_walk_and_read_is_flagged_and_read_again(
    engine: Engine, was: Path, name: str, change: str
) -> None:
    run = engine.begin([was])
    scan = engine.scan(run, 1)
    CHANGED[change](was / name)
    store_parts(engine, run, 1, scan)
    flagged, committed = engine.commit(run)
    assert committed["unaccepted"] == [name]
    assert committed["unaccepted"] == [name]
    entries = manifest_of(engine, flagged).entries
    assert [e.path for e in entries if e.changed] == [name.encode()]
    engine.call("snapshot.end", run=run, committed=True)

    # the index does not believe it either: the next snapshot reads it, and it alone
    let_settle()
    run = engine.begin([was])
    again = engine.scan(run, 1)
    assert (again["read_files"], again["unaccepted"]) == (1, [name])
    store_parts(engine, run, 1, again)
    assert engine.scan(run, 2)["read_files"] == 0
    snapshot, committed = engine.commit(run)
    assert committed["unaccepted_count"] == 0
    engine.call("snapshot.end", run=run, committed=True)
    comes_back(engine, snapshot, was)


@pytest.mark.parametrize("name", ["small", "big"])
@pytest.mark.parametrize("change", GONE)
def test_a_file_that_goes_between_walk_and_read_is_left_out(
    engine: Engine, was: Path, name: str, change: str
) -> None:
    run = engine.begin([was])
    scan = engine.scan(run, 1)
    GONE[change](was / name)
    store_parts(engine, run, 1, scan)
    snapshot, _ = engine.commit(run)
    assert name.encode() not in [e.path for e in manifest_of(engine, snapshot).entries]
    assert engine.call("snapshot.confirm", run=run, accepted=[])["unaccepted_count"] >= 1
    let_settle()
    again = engine.scan(run, 2)
    store_parts(engine, run, 2, again)
    assert engine.scan(run, 3)["read_files"] == 0
    snapshot, committed = engine.commit(run)
    assert committed["unaccepted_count"] == 0
    comes_back(engine, snapshot, was)


def test_a_rewrite_right_after_reading_is_found_by_the_next_pass(engine: Engine, was: Path) -> None:
    fresh = was / "fresh"
    fresh.write_bytes(b"one")
    run = engine.begin([was])
    scan = engine.scan(run, 1)
    store_parts(engine, run, 1, scan)
    before = fresh.stat()
    fd = os.open(fresh, os.O_WRONLY)
    os.pwrite(fd, b"two", 0)
    os.close(fd)
    os.utime(fresh, ns=(0, before.st_mtime_ns))
    again = engine.scan(run, 2)
    assert "fresh" in again["unaccepted"]
    store_parts(engine, run, 2, again)
    let_settle()
    store_parts(engine, run, 3, engine.scan(run, 3))
    assert engine.scan(run, 4)["read_files"] == 0
    snapshot, _ = engine.commit(run)
    comes_back(engine, snapshot, was)


def test_names_that_may_change_are_accepted_and_no_others(engine: Engine, was: Path) -> None:
    (was / "d/app.log").write_bytes(b"line\n" * 100)
    let_settle()
    run = engine.begin([was])
    scan = engine.scan(run, 1, accepted=["*.log"])
    assert sorted(scan["unaccepted"]) == ["big", "d/other", "small"]
    assert (scan["read_files"], scan["unaccepted_count"]) == (4, 3)
    _append(was / "d/app.log")
    _append(was / "small")
    store_parts(engine, run, 1, scan)
    committed = engine.call(
        "snapshot.commit",
        run=run,
        snapshot="20261120T234913Z-00000001",
        parent=None,
        created_unix=1,
        statistics={},
        accepted=["*.log"],
        grant=engine.grant("PUT", new_pack_key(WORKSPACE)),
    )
    assert committed["unaccepted"] == ["small"]
    confirmed = engine.call("snapshot.confirm", run=run, accepted=["*.log", "small"])
    assert confirmed["unaccepted_count"] == 0
    confirmed = engine.call("snapshot.confirm", run=run, accepted=["*.log"])
    assert confirmed["unaccepted"] == ["small"]


# -- the last look

CONFIRMED: dict[str, tuple[Callable[[Path], object], str]] = {
    "content": (lambda was: _append(was / "small"), "small"),
    "content, same time": (lambda was: _rewrite_keeping_time(was / "small"), "small"),
    "new file": (lambda was: (was / "new").write_text("x"), "new"),
    "new directory": (lambda was: (was / "d/new").mkdir(), "d/new"),
    "new symlink": (lambda was: (was / "new").symlink_to("x"), "new"),
    "deleted": (lambda was: (was / "d/other").unlink(), "d/other"),
    "mode": (lambda was: (was / "d").chmod(0o711), "d"),
    "moved": (lambda was: (was / "small").rename(was / "d/small"), "d/small"),
}


def _rewrite_keeping_time(path: Path) -> None:
    st = path.stat()
    _rewrite(path)
    os.utime(path, ns=(st.st_atime_ns, st.st_mtime_ns))


@pytest.mark.parametrize("change", CONFIRMED)
def test_the_last_look_finds_what_changed_since_the_commit(
    engine: Engine, was: Path, change: str
) -> None:
    run = engine.begin([was])
    store_parts(engine, run, 1, engine.scan(run, 1))
    engine.scan(run, 2)
    engine.commit(run)
    same = engine.call("snapshot.confirm", run=run, accepted=[])
    assert same == {"unaccepted_count": 0, "unaccepted": []}
    make, name = CONFIRMED[change]
    make(was)
    found = engine.call("snapshot.confirm", run=run, accepted=[])
    assert name in found["unaccepted"]
    assert found["unaccepted_count"] == len(found["unaccepted"])


def test_a_workspace_that_became_empty_is_no_snapshot(engine: Engine, was: Path) -> None:
    run = engine.begin([was])
    store_parts(engine, run, 1, engine.scan(run, 1))
    os.rename(was, was.with_name("unmounted"))
    was.mkdir()
    assert engine.scan(run, 2)["read_files"] == 0
    with pytest.raises(WorkspaceInvalid, match="has become empty while it was read"):
        engine.commit(run)
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
    (report,) = store_parts(engine, run, 1, engine.scan(run, 1))
    assert report["new_bytes"] == 250
    snapshot, _ = engine.commit(run)
    engine.call("snapshot.end", run=run, committed=True)
    comes_back(engine, snapshot, root)
