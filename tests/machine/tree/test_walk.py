"""The walk finds every name, and what is new among them."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Sequence
from datetime import datetime, timezone
from pathlib import Path

import pytest

from tests.fixtures.trees import let_settle
from tests.fixtures.walks import as_read
from torpor.machine.tree.names import Names, Signature
from torpor.machine.tree.walk import (
    RACY_COARSE_NS,
    RACY_NS,
    Walk,
    compile_excludes,
    resolve_roots,
    settled,
    walk,
)
from torpor.shared.errors import RunCancelled, WorkspaceInvalid
from torpor.shared.format.manifest import FILE, HARDLINK


def _walk(root: Path, held: Names | None = None, exclude: Sequence[str] = ()) -> Walk:
    return walk([os.fsencode(root)], held or Names(1), compile_excludes(exclude), lambda: None)


def _unread(root: Path, held: Names) -> set[bytes]:
    return {u.entry.path for u in _walk(root, held).unread}


@pytest.mark.parametrize("year", [1601, 2700])
def test_a_time_that_no_manifest_holds_is_refused_in_words(year: int) -> None:
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        (Path(folder) / "old").touch()
        second = int(datetime(year, 1, 1, tzinfo=timezone.utc).timestamp())
        os.utime(Path(folder) / "old", ns=(second * 10**9,) * 2)
        with pytest.raises(WorkspaceInvalid, match=r"old was last written before 1677 or after"):
            _walk(Path(folder))


def test_devices_are_named_as_skipped(tmp_path: Path) -> None:
    if os.geteuid() != 0:
        return  # only root can make one
    os.mknod(tmp_path / "null", 0o20666, os.makedev(1, 3))
    os.mknod(tmp_path / "disk", 0o60600, os.makedev(7, 250))
    kinds = {(s.path, s.kind) for s in _walk(tmp_path).skipped}
    assert kinds == {(b"null", "character device"), (b"disk", "block device")}


def test_a_name_whose_path_is_too_long_is_refused(tmp_path: Path) -> None:
    """Its extended attributes could not be asked for, and would be lost without a word."""
    place = os.open(tmp_path, os.O_RDONLY)
    left = 4096 - len(os.fsencode(tmp_path)) - 1
    while left > 210:
        name = b"d" * 200
        os.mkdir(name, dir_fd=place)
        below = os.open(name, os.O_RDONLY, dir_fd=place)
        os.close(place)
        place, left = below, left - 201
    os.close(os.open(b"f" * (left - 1), os.O_CREAT | os.O_WRONLY, dir_fd=place))
    assert len(_walk(tmp_path).unread) == 1
    os.close(os.open(b"f" * left, os.O_CREAT | os.O_WRONLY, dir_fd=place))
    os.close(place)
    with pytest.raises(WorkspaceInvalid, match=r"/f+ cannot be read: File name too long"):
        _walk(tmp_path)


def test_links_follow_when_their_first_name_goes(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("x")
    os.link(tmp_path / "a", tmp_path / "b")
    os.link(tmp_path / "a", tmp_path / "c")
    let_settle()
    held = as_read(_walk(tmp_path))
    os.unlink(tmp_path / "a")
    seen = _walk(tmp_path, held)
    kinds = {e.path: (e.kind, e.target) for e in seen.names.entries[1:]}
    assert kinds == {b"b": (FILE, b""), b"c": (HARDLINK, b"b")}
    assert [u.entry.path for u in seen.unread] == [b"b"]


def test_a_name_that_now_stands_before_its_link_is_the_file(tmp_path: Path) -> None:
    (tmp_path / "b").write_text("x")
    let_settle()
    held = as_read(_walk(tmp_path))
    os.link(tmp_path / "b", tmp_path / "a")
    kinds = {e.path: (e.kind, e.target) for e in _walk(tmp_path, held).names.entries[1:]}
    assert kinds == {b"a": (FILE, b""), b"b": (HARDLINK, b"a")}


# -- the racy rule


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


# -- roots


def test_a_root_through_a_symlink_is_its_directory(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "real/x").write_text("x")
    (tmp_path / "link").symlink_to("real")
    assert resolve_roots([str(tmp_path / "link")]) == [os.fsencode(tmp_path / "real")]


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
        walk([os.fsencode(tmp_path)], Names(1), None, check)


def test_ten_thousand_unchanged_names_are_quick(tmp_path: Path) -> None:
    for directory in range(100):
        (tmp_path / str(directory)).mkdir()
        for number in range(100):
            os.close(os.open(tmp_path / str(directory) / str(number), os.O_CREAT | os.O_WRONLY))
    let_settle()
    held = as_read(_walk(tmp_path))
    calls = 0

    def called(*_: object) -> None:
        nonlocal calls
        calls += 1

    sys.setprofile(called)
    try:
        unread = _walk(tmp_path, held).unread
    finally:
        sys.setprofile(None)
    assert not unread
    assert calls < 10_000 * 10  # Python's own, and its returns
