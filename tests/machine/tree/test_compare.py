"""The check after a restore sees every difference, by every attribute."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
import pytest

from tests.fixtures.manifests import PLAIN, entry
from torpor.machine.pipeline.download import in_pieces
from torpor.machine.tree.attributes import Attributes
from torpor.machine.tree.compare import Comparison, compare_tree
from torpor.machine.tree.write import TreeWriter
from torpor.shared.errors import RunCancelled
from torpor.shared.format.manifest import (
    DIRECTORY,
    FILE,
    HARDLINK,
    HOLE,
    SYMLINK,
    Chunk,
    Entry,
    Extent,
)

BIG = b"content of a chunk " * 1000
SMALL = b"small"
CHUNKS = [
    Chunk(PLAIN.name(BIG), len(BIG), 0, 0, 0, len(BIG)),
    Chunk(PLAIN.name(SMALL * 2), 10, 0, 0, len(BIG), 10),
]
HOLED = len(BIG) + (1 << 40)
ENTRIES = [
    entry(DIRECTORY, b"", mode=0o755),
    entry(DIRECTORY, b"d", mode=0o755),
    entry(FILE, b"d/big", size=len(BIG), extents=(Extent(0, 0, len(BIG)),)),
    entry(FILE, b"d/small", size=5, extents=(Extent(1, 5, 5),), digest=PLAIN.digest(SMALL)),
    entry(FILE, b"empty", xattrs=((b"user.x", b"y"),)),
    entry(FILE, b"holed", size=HOLED, extents=(Extent(0, 0, len(BIG)), Extent(HOLE, 0, 1 << 40))),
    entry(SYMLINK, b"link", target=b"d"),
    entry(HARDLINK, b"same", target=b"d/small"),
]

pytestmark = pytest.mark.usefixtures("each_language")


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    target = tmp_path / "target"
    writer = TreeWriter([os.fsencode(target)])
    writer.prepare(ENTRIES, in_pieces, afresh=True)
    writer.write_files([(ENTRIES[2], 0), (ENTRIES[3], len(BIG))], BIG + SMALL)
    writer.write_at(ENTRIES[5], 0, BIG)
    writer.finish(ENTRIES, in_pieces)
    writer.close()
    return target


def _compare(
    tree: Path,
    entries: Sequence[Entry] = ENTRIES,
    targets: Sequence[Path] = (),
    *,
    full: bool = True,
    attributes: Attributes | None = None,
    progress: Callable[[int], None] = lambda size: None,
    check: Callable[[], None] = lambda: None,
) -> Comparison:
    return compare_tree(
        entries,
        CHUNKS,
        [os.fsencode(target) for target in targets or [tree]],
        PLAIN,
        full=full,
        attributes=attributes or Attributes(),
        progress=progress,
        check=check,
    )


@pytest.mark.parametrize("full", [True, False])
def test_a_right_tree_is_right_and_its_holes_are_not_read(tree: Path, full: bool) -> None:
    read: list[int] = []
    result = _compare(tree, full=full, progress=read.append)
    assert result.differences == []
    assert read[-1:] == ([2 * len(BIG) + (1 << 40) + 5] if full else [])
    assert all(result.signatures)


@pytest.mark.parametrize("how", ["No such file or directory", "Not a directory"])
def test_each_name_of_a_target_that_is_gone_differs(tree: Path, how: str) -> None:
    """Also where it is not the first target, whose names are right."""
    tree.rename(gone := tree.with_name("gone"))
    if how == "Not a directory":
        tree.symlink_to(gone)
    others = [msgspec.structs.replace(entry, root=1) for entry in ENTRIES]
    result = _compare(gone, [*ENTRIES, *others], [gone, tree])
    assert {number for number, _ in result.found} == {*range(len(ENTRIES), 2 * len(ENTRIES))}
    assert result.differences[1] == f"{tree}/d: {how}"
    assert all(result.signatures[: len(ENTRIES)])


def test_a_size_that_a_manifest_only_claims_takes_no_memory(tree: Path) -> None:
    """One digest covers it: a file of that kind is small, but for a hostile manifest."""
    huge = msgspec.structs.replace(ENTRIES[3], size=1 << 50)
    entries = [*ENTRIES[:3], huge, *ENTRIES[4:]]
    assert any("has 5 bytes, not" in words for words in _compare(tree, entries).differences)


def _keeping_times(path: Path, change: Callable[[], object]) -> None:
    st = path.lstat()
    parent = path.parent.lstat()
    change()
    if path.is_symlink() or path.exists():
        os.utime(path, ns=(0, st.st_mtime_ns), follow_symlinks=False)
    os.utime(path.parent, ns=(0, parent.st_mtime_ns))


def _poke(path: Path, offset: int, data: bytes) -> None:
    fd = os.open(path, os.O_WRONLY)
    os.pwrite(fd, data, offset)
    os.close(fd)


def _replace(path: Path, make: Callable[[], object]) -> None:
    path.unlink()
    make()


WRONG: dict[str, tuple[str, Callable[[Path], object], str]] = {
    "missing": ("empty", lambda p: p.unlink(), "No such file"),
    "missing-file": ("d/big", lambda p: p.unlink(), "No such file"),
    "a-directory": ("empty", lambda p: _replace(p, p.mkdir), "is of another kind"),
    "a-fifo": ("empty", lambda p: _replace(p, lambda: os.mkfifo(p)), "is of another kind"),
    "a-symlink": ("empty", lambda p: _replace(p, lambda: p.symlink_to("d")), "of another kind"),
    "longer": ("d/big", lambda p: os.truncate(p, len(BIG) + 1), "has 19001 bytes, not 19000"),
    "mode": ("d", lambda p: p.chmod(0o700), "has mode 700, not 755"),
    "set-uid": ("d/big", lambda p: p.chmod(0o4644), "has mode 4644, not 644"),
    "target": ("link", lambda p: _replace(p, lambda: p.symlink_to("e")), "points elsewhere"),
    "not-the-same": (
        "same", lambda p: _replace(p, lambda: p.write_bytes(SMALL)), "is not the same file as its",
    ),
    "xattr-gone": ("empty", lambda p: os.removexattr(p, "user.x"), "lacks extended attributes"),
    "xattr-other": ("empty", lambda p: os.setxattr(p, "user.x", b"z"), "lacks extended attributes"),
}  # fmt: skip
CONTENT: dict[str, tuple[str, Callable[[Path], object], str]] = {
    "a-byte-of-a-chunk": ("d/big", lambda p: _poke(p, 7, b"!"), "content differs at 0"),
    "a-byte-of-a-small-file": ("d/small", lambda p: _poke(p, 4, b"!"), "content differs"),
    "a-byte-in-a-hole": ("holed", lambda p: _poke(p, 1 << 39, b"!"), "content differs at"),
}


@pytest.mark.parametrize("wrong", [*WRONG, *CONTENT])
def test_every_difference_is_found_and_named(tree: Path, wrong: str) -> None:
    name, change, says = (WRONG | CONTENT)[wrong]
    _keeping_times(tree / name, lambda: change(tree / name))
    result = _compare(tree)
    difference, *_ = [d for d in result.differences if d.startswith(f"{tree / name}: ")]
    assert says in difference
    number = [e.path for e in ENTRIES].index(name.encode())
    assert result.signatures[number] is None
    if wrong in CONTENT:
        assert _compare(tree, full=False).differences == []


def test_a_time_that_is_off_by_a_nanosecond_is_found(tree: Path) -> None:
    os.utime(tree / "link", ns=(0, 10**18 + 1), follow_symlinks=False)
    (difference,) = _compare(tree, full=False).differences
    assert "has mtime 1000000000000000001, not 1000000000000000000" in difference


def test_owners_count_where_they_were_restored(tree: Path) -> None:
    if os.geteuid() != 0:
        return  # only root can give a file away
    os.chown(tree / "d", 12, 34)
    (difference,) = _compare(tree).differences
    assert "belongs to 12:34, not 0:0" in difference


def test_zeros_on_the_disk_are_as_good_as_a_hole(tree: Path) -> None:
    for offset in (1 << 30, HOLED - 4096):
        _keeping_times(tree / "holed", lambda at=offset: _poke(tree / "holed", at, bytes(4096)))
    assert _compare(tree).differences == []


def test_attributes_that_could_not_be_set_are_excused_and_no_others(tree: Path) -> None:
    os.removexattr(tree / "empty", "user.x")
    here, other = Attributes(), Attributes()
    here.refused_xattrs.add((0, b"empty", b"user.x"))
    other.refused_xattrs.add((0, b"empty", b"user.z"))
    assert _compare(tree, attributes=here).differences == []
    assert _compare(tree, attributes=other).differences != []


def test_a_check_can_be_cancelled(tree: Path) -> None:
    def cancelled() -> None:
        raise RunCancelled("enough")

    with pytest.raises(RunCancelled):
        _compare(tree, check=cancelled)


@pytest.mark.parametrize("drops", [True, False])
def test_a_full_comparison_says_what_it_read_from_memory(
    tree: Path, monkeypatch: pytest.MonkeyPatch, drops: bool
) -> None:
    """What the disk holds is not known of a file that the kernel still holds in memory."""
    dropped: set[int] = set()

    def advise(fd: int, start: int, length: int, advice: int) -> None:
        assert (start, length, advice) == (0, 0, os.POSIX_FADV_DONTNEED)
        dropped.add(os.fstat(fd).st_ino)

    def read(fd: int, buffers: list[bytearray], at: int, flags: int) -> int:
        assert (os.fstat(fd).st_ino in dropped, flags) == (True, os.RWF_NOWAIT)
        if drops:
            raise BlockingIOError
        return 1

    monkeypatch.setattr(os, "posix_fadvise", advise)
    monkeypatch.setattr(os, "preadv", read)
    result = _compare(tree)
    assert (result.differences, result.from_memory) == ([], 0 if drops else 3)
    assert _compare(tree, full=False).from_memory == 0
