"""The demo's own comparison sees every kind of difference; its weights are truly BF16."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import numpy
import pytest

from deployments.example import as_bf16
from deployments.inventory import differences, inventory_of, sizes_of

HOLE_BYTES = 4 << 20


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    root = tmp_path / "tree"
    (root / "empty").mkdir(parents=True)
    (root / "file").write_bytes(b"content")
    (root / "link").symlink_to("file")
    os.link(root / "file", root / "second name")
    with (root / "sparse").open("wb") as file:
        file.truncate(HOLE_BYTES)
    os.setxattr(root / "empty", "user.note", b"1")
    return root


def _flip(root: Path) -> None:
    seen = (root / "file").stat()
    (root / "file").write_bytes(b"Content")
    os.utime(root / "file", ns=(seen.st_atime_ns, seen.st_mtime_ns))


def _fill(root: Path) -> None:
    seen = (root / "sparse").stat()
    (root / "sparse").write_bytes(bytes(HOLE_BYTES))
    os.utime(root / "sparse", ns=(seen.st_atime_ns, seen.st_mtime_ns))


def _unlink_name(root: Path) -> None:
    times = root.stat()
    seen = (root / "file").stat()
    (root / "second name").unlink()
    (root / "second name").write_bytes(b"content")
    (root / "second name").chmod(seen.st_mode & 0o7777)
    os.utime(root / "second name", ns=(seen.st_atime_ns, seen.st_mtime_ns))
    os.utime(root, ns=(times.st_atime_ns, times.st_mtime_ns))


def _late(root: Path) -> None:
    seen = (root / "file").stat()
    os.utime(root / "file", ns=(seen.st_atime_ns, seen.st_mtime_ns + 1))


def _retarget(root: Path) -> None:
    seen = (root / "link").lstat()
    (root / "link").unlink()
    (root / "link").symlink_to("fool")
    os.utime(root / "link", ns=(seen.st_atime_ns, seen.st_mtime_ns), follow_symlinks=False)


CHANGES: dict[str, Callable[[Path], None]] = {
    "content": _flip,
    "data": _fill,
    "names": _unlink_name,
    "mtime_ns": _late,
    "target": _retarget,
    "mode": lambda root: (root / "file").chmod(0o600),
    "xattrs": lambda root: os.setxattr(root / "empty", "user.note", b"2"),
    "is missing": lambda root: (root / "empty").rmdir(),
    "appeared": lambda root: (root / "new").mkdir(),
}


def test_the_same_tree_has_no_differences(tree: Path) -> None:
    seen = inventory_of(tree)
    assert differences(seen, inventory_of(tree)) == []
    assert sizes_of(seen) == {"file": len(b"content"), "sparse": HOLE_BYTES}
    assert set(seen) == {".", "empty", "file", "link", "second name", "sparse"}


@pytest.mark.parametrize("what", CHANGES)
def test_each_kind_of_change_is_named(what: str, tree: Path) -> None:
    before = inventory_of(tree)
    CHANGES[what](tree)
    lines = differences(before, inventory_of(tree))
    assert any(what in line for line in lines), lines


def test_weights_are_rounded_to_nearest_even() -> None:
    values = numpy.array([1.0, -2.0, 1.00390625, 1.01171875, 3.4e38, 0.0], dtype=numpy.float32)
    # 1 + 2^-8 lies half-way and goes down to even, 1 + 3 * 2^-8 half-way and goes up.
    assert [hex(v) for v in as_bf16(values)] == [
        "0x3f80", "0xc000", "0x3f80", "0x3f82", "0x7f80", "0x0",
    ]  # fmt: skip
