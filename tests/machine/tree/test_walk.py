"""The walk finds every name, and what is new among them."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.fixtures.trees import let_settle
from torpor.machine.tree.walk import (
    RACY_COARSE_NS,
    RACY_NS,
    Held,
    Signature,
    Walk,
    compile_excludes,
    resolve_roots,
    settled,
    walk,
)
from torpor.shared.errors import RunCancelled, WorkspaceInvalid
from torpor.shared.format.manifest import DIRECTORY, FILE, HARDLINK, SYMLINK


def _walk(root: Path, held: dict[bytes, Held] | None = None, exclude: Sequence[str] = ()) -> Walk:
    return walk([os.fsencode(root)], [held or {}], compile_excludes(exclude), lambda: None)


def _held(seen: Walk) -> dict[bytes, Held]:
    """As after all of ``seen`` was read."""
    pairs = zip(seen.entries, seen.signatures, strict=True)
    return {entry.path: Held(signature, entry) for entry, signature in pairs}


def _unread(root: Path, held: dict[bytes, Held]) -> set[bytes]:
    return {u.entry.path for u in _walk(root, held).unread}


def test_a_directory_stands_before_what_it_holds(tmp_path: Path) -> None:
    for name in ("b/c/d", "a/z", "b.txt", "b/a"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    seen = _walk(tmp_path)
    paths = [entry.path for entry in seen.entries]
    assert paths[0] == b""
    assert sorted(paths) == [b"", b"a", b"a/z", b"b", b"b.txt", b"b/a", b"b/c", b"b/c/d"]
    for path in paths[1:]:
        assert paths.index(path.rpartition(b"/")[0]) < paths.index(path)
    assert paths == [entry.path for entry in _walk(tmp_path).entries]  # and always in this order


def test_every_kind_is_recognized(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    os.link(tmp_path / "file", tmp_path / "link")
    (tmp_path / "symlink").symlink_to("file")
    (tmp_path / "dangling").symlink_to("nowhere")
    (tmp_path / "directory-link").symlink_to("/etc")
    (tmp_path / "directory").mkdir()
    os.mkfifo(tmp_path / "fifo")
    with socket.socket(socket.AF_UNIX) as one:
        one.bind(os.path.relpath(tmp_path / "socket"))
    seen = _walk(tmp_path)
    assert {e.path: (e.kind, e.target) for e in seen.entries} == {
        b"": (DIRECTORY, b""),
        b"file": (FILE, b""),
        b"link": (HARDLINK, b"file"),
        b"symlink": (SYMLINK, b"file"),
        b"dangling": (SYMLINK, b"nowhere"),
        b"directory-link": (SYMLINK, b"/etc"),
        b"directory": (DIRECTORY, b""),
    }
    assert {(s.path, s.kind) for s in seen.skipped} == {(b"fifo", "fifo"), (b"socket", "socket")}
    assert [u.entry.path for u in seen.unread] == [b"file"]


def test_devices_are_named_as_skipped(tmp_path: Path) -> None:
    if os.geteuid() != 0:
        return  # only root can make one
    os.mknod(tmp_path / "null", 0o20666, os.makedev(1, 3))
    os.mknod(tmp_path / "disk", 0o60600, os.makedev(7, 250))
    kinds = {(s.path, s.kind) for s in _walk(tmp_path).skipped}
    assert kinds == {(b"null", "character device"), (b"disk", "block device")}


def test_what_is_held_is_not_read_again(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("a")
    (tmp_path / "d").mkdir()
    (tmp_path / "d/b").write_text("b")
    (tmp_path / "l").symlink_to("a")
    os.link(tmp_path / "a", tmp_path / "z")
    let_settle()
    first = _walk(tmp_path)
    assert {u.entry.path for u in first.unread} == {b"a", b"d/b"}
    again = _walk(tmp_path, _held(first))
    assert again.unread == []
    assert all(new is old for new, old in zip(again.entries, first.entries, strict=True))


@pytest.mark.parametrize(
    "change",
    ["content", "same size", "same size and time", "mode", "replaced", "linked", "touched"],
)
def test_every_change_is_seen(tmp_path: Path, change: str) -> None:
    file = tmp_path / "file"
    file.write_bytes(b"before")
    (tmp_path / "other").write_bytes(b"stays")
    let_settle()
    held = _held(_walk(tmp_path))
    was = file.stat()
    if change == "content":
        file.write_bytes(b"now longer")
    elif change.startswith("same size"):
        file.write_bytes(b"after!")
        if change.endswith("time"):
            os.utime(file, ns=(was.st_atime_ns, was.st_mtime_ns))
    elif change == "mode":
        file.chmod(0o600)
    elif change == "replaced":
        (tmp_path / "new").write_bytes(b"before")
        os.utime(tmp_path / "new", ns=(was.st_atime_ns, was.st_mtime_ns))
        os.replace(tmp_path / "new", file)
    elif change == "linked":
        os.link(file, tmp_path / "also")
    else:
        os.utime(file, ns=(was.st_atime_ns, was.st_mtime_ns))
    unread = _unread(tmp_path, held)
    assert b"other" not in unread
    assert unread == ({b"also"} if change == "linked" else {b"file"})


def test_links_follow_when_their_first_name_goes(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("x")
    os.link(tmp_path / "a", tmp_path / "b")
    os.link(tmp_path / "a", tmp_path / "c")
    let_settle()
    held = _held(_walk(tmp_path))
    os.unlink(tmp_path / "a")
    seen = _walk(tmp_path, held)
    kinds = {e.path: (e.kind, e.target) for e in seen.entries[1:]}
    assert kinds == {b"b": (FILE, b""), b"c": (HARDLINK, b"b")}
    assert [u.entry.path for u in seen.unread] == [b"b"]


def test_a_name_that_now_stands_before_its_link_is_the_file(tmp_path: Path) -> None:
    (tmp_path / "b").write_text("x")
    let_settle()
    held = _held(_walk(tmp_path))
    os.link(tmp_path / "b", tmp_path / "a")
    kinds = {e.path: (e.kind, e.target) for e in _walk(tmp_path, held).entries[1:]}
    assert kinds == {b"a": (FILE, b""), b"b": (HARDLINK, b"a")}


# -- the racy rule


def test_what_was_touched_just_now_is_looked_at_again(tmp_path: Path) -> None:
    (tmp_path / "fresh").write_text("x")
    (tmp_path / "d").mkdir()
    held = _held(_walk(tmp_path))
    assert held[b"fresh"].signature is None
    assert held[b"d"].signature is None
    assert _unread(tmp_path, held) == {b"fresh"}
    let_settle()
    held = _held(_walk(tmp_path))
    assert held[b"fresh"].signature is not None
    assert _unread(tmp_path, held) == set()


@pytest.mark.parametrize(
    ("age_ns", "mtime_ns", "is_settled"),
    [
        (RACY_NS - 1, 17, False),
        (RACY_NS, 17, False),
        (RACY_NS + 1, 17, True),
        (0, 17, False),
        (-RACY_NS - 1, 17, True),  # a clock that was set back: a write now would set it to now
        (10**9, 0, False),  # whole seconds only: the clock may tick as rarely as that
        (RACY_COARSE_NS + 1, 0, True),
    ],
)
def test_settled_is_by_ctime_alone(age_ns: int, mtime_ns: int, is_settled: bool) -> None:
    now = 1_800_000_000 * 10**9
    ctime = now - age_ns
    looked = now
    if mtime_ns == 0:
        ctime -= ctime % 10**9  # a coarse clock
        looked = ctime + age_ns
    assert settled(Signature(1, 1, mtime_ns, ctime), looked) is is_settled


# -- exclusions


@pytest.mark.parametrize(
    ("pattern", "path", "is_excluded"),
    [
        ("*.pyc", b"a/b/c.pyc", True),
        ("*.pyc", b"c.pyc.txt", False),
        ("cache", b"a/cache", True),
        ("cache", b"a/caches", False),
        ("cache/", b"cache", True),
        ("/cache", b"cache", True),
        ("a/cache", b"a/cache", True),
        ("a/cache", b"b/a/cache", False),
        ("a/*.log", b"a/deep/x.log", True),
        ("*.log", b"new\nline.log", True),
        ("*", b"\xff\xfe", True),
        ("[ab]?", b"a1", True),
        ("[ab]?", b"c1", False),
    ],
)
def test_patterns(pattern: str, path: bytes, is_excluded: bool) -> None:
    excluded = compile_excludes([pattern])
    assert excluded is not None
    assert excluded(path) is is_excluded


def test_no_pattern_excludes_nothing() -> None:
    assert compile_excludes([]) is None


def test_what_is_below_an_excluded_directory_is_not_looked_at(tmp_path: Path) -> None:
    (tmp_path / "out/deep").mkdir(parents=True)
    (tmp_path / "out/deep/file").write_text("x")
    (tmp_path / "in").write_text("x")
    assert [e.path for e in _walk(tmp_path, exclude=["out"]).entries] == [b"", b"in"]


# -- roots


def test_a_root_through_a_symlink_is_its_directory(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "real/x").write_text("x")
    (tmp_path / "link").symlink_to("real")
    assert resolve_roots([str(tmp_path / "link")]) == [os.fsencode(tmp_path / "real")]


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("missing", "does not exist on the machine"),
        ("file", "is a file, not a directory"),
        ("empty", "is empty: there is nothing to keep"),
    ],
)
def test_a_root_that_cannot_be_is_refused(tmp_path: Path, name: str, says: str) -> None:
    (tmp_path / "file").write_text("x")
    (tmp_path / "empty").mkdir()
    with pytest.raises(WorkspaceInvalid, match=says) as refused:
        resolve_roots([str(tmp_path / name)])
    assert str(tmp_path / name) in str(refused.value)


@pytest.mark.parametrize("root", ["/", "~", "/etc/.."])
def test_a_whole_machine_is_no_workspace(root: str) -> None:
    with pytest.raises(WorkspaceInvalid, match="name a directory inside it"):
        resolve_roots([root])


def test_roots_inside_each_other_are_refused(tmp_path: Path) -> None:
    (tmp_path / "a/b").mkdir(parents=True)
    (tmp_path / "a/b/x").write_text("x")
    (tmp_path / "ab").mkdir()
    (tmp_path / "ab/x").write_text("x")
    with pytest.raises(WorkspaceInvalid, match="overlap"):
        resolve_roots([str(tmp_path / "a/b"), str(tmp_path / "a")])
    with pytest.raises(WorkspaceInvalid, match="overlap"):
        resolve_roots([str(tmp_path / "a"), str(tmp_path / "a")])
    assert len(resolve_roots([str(tmp_path / "a"), str(tmp_path / "ab")])) == 2


def test_a_walk_can_be_cancelled(tmp_path: Path) -> None:
    for number in range(20):
        (tmp_path / str(number)).mkdir()
    looks = 0

    def check() -> None:
        nonlocal looks
        looks += 1
        if looks == 5:
            raise RunCancelled("enough")

    with pytest.raises(RunCancelled):
        walk([os.fsencode(tmp_path)], [{}], None, check)


def test_ten_thousand_unchanged_names_are_quick(tmp_path: Path) -> None:
    for directory in range(100):
        (tmp_path / str(directory)).mkdir()
        for number in range(100):
            os.close(os.open(tmp_path / str(directory) / str(number), os.O_CREAT | os.O_WRONLY))
    let_settle()
    held = _held(_walk(tmp_path))
    started = time.process_time()
    assert _walk(tmp_path, held).unread == []
    assert time.process_time() - started < 1.0  # 0.1 s on an idle core
