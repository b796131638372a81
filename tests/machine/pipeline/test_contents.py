"""Files come together from pieces that arrive in any order, twice, or not at all."""

from __future__ import annotations

import itertools
from array import array
from collections.abc import Iterator, Mapping
from typing import Any

import msgspec
import pytest

from torpor.machine.pipeline.contents import Contents
from torpor.machine.tree.names import SURE, KnownPath, Names, Signature, UnreadFiles
from torpor.machine.tree.plan import ChunkRange, Group, ReadUnit
from torpor.machine.tree.read import Read
from torpor.machine.tree.walk import Walk, settled
from torpor.shared.format.manifest import FILE, HOLE, Entries, Entry, Extent

NOW = 1_800_000_000 * 10**9
OLD = NOW - 10**10
GONE = Read(b"", stable=False, gone=True)


def _seen(*sizes: int, ctime: int = OLD + 1, mapped: str = "") -> Walk:
    names = Names(1)
    seen = Walk(names, UnreadFiles(names, Names(1)), [], NOW, NOW + 1, [], array("Q"))
    for n, size in enumerate(sizes):
        entry = Entry(FILE, 0, b"%d" % n, 0o600, 1, 2, 3, 0, xattrs=((b"user.x", b"y"),))
        signature = Signature(n, size, OLD + 1, ctime)
        is_sure = not mapped and settled(signature, NOW, NOW + 1)
        names.add(entry, signature.packed(), SURE if is_sure else 0)
        seen.unread.add(n, sparse=False, mapped=mapped)
    names.end_run(0, b"", [b"%d" % n for n in range(len(sizes))])
    return seen


def _read(length: int, *, stable: bool = True) -> Read:
    return Read(b"x" * length, stable)


class _HeldFiles(Mapping[bytes, KnownPath]):
    """What is held, by path."""

    def __init__(self, seen: Walk) -> None:
        self._names = seen.names

    def __getitem__(self, path: bytes) -> KnownPath:
        if (held := self._names.held(0, path)) is None:
            raise KeyError(path)
        return held

    def __iter__(self) -> Iterator[bytes]:
        paths = (entry.path for entry in self._names.entries)
        return (path for path in paths if self._names.held(0, path))

    def __len__(self) -> int:
        return self._names.held_count


def _contents(seen: Walk, jobs: list[ReadUnit]) -> tuple[Contents, _HeldFiles]:
    return Contents(seen, jobs), _HeldFiles(seen)


PIECES = [ChunkRange(0, 0, 8), ChunkRange(0, 8, 8), ChunkRange(0, 16, 4)]


def test_pieces_in_any_order_make_the_file() -> None:
    for order in itertools.permutations(range(3)):
        contents, held = _contents(_seen(20), list(PIECES))
        for number in order:
            assert held == {}
            contents.add_piece(PIECES[number], _read(PIECES[number].length), 70 + number)
        got = held[b"0"]
        assert got.signature == Signature(0, 20, OLD + 1, OLD + 1)
        assert got.entry.extents == (Extent(70, 0, 8), Extent(71, 0, 8), Extent(72, 0, 4))
        assert (got.entry.size, got.entry.changed, got.entry.mode) == (20, False, 0o600)
        assert got.entry.xattrs == ((b"user.x", b"y"),)


def test_what_lies_between_pieces_is_a_hole() -> None:
    jobs: list[ReadUnit] = [ChunkRange(0, 4, 2), ChunkRange(0, 10, 2)]
    contents, held = _contents(_seen(20), jobs)
    contents.add_piece(ChunkRange(0, 10, 2), _read(2), 1)
    contents.add_piece(ChunkRange(0, 4, 2), _read(2), 0)
    assert held[b"0"].entry.extents == (
        Extent(HOLE, 0, 4),
        Extent(0, 0, 2),
        Extent(HOLE, 0, 4),
        Extent(1, 0, 2),
        Extent(HOLE, 0, 8),
    )


def test_files_without_work_are_held_at_once() -> None:
    _, held = _contents(_seen(0, 50), [])
    assert held[b"0"].entry.extents == ()
    assert held[b"1"].entry.extents == (Extent(HOLE, 0, 50),)
    assert held[b"1"].signature is not None
    _, held = _contents(_seen(0, ctime=NOW), [])
    assert held[b"0"].signature is None  # written just now: look again


def test_a_part_that_comes_again_changes_nothing() -> None:
    contents, held = _contents(_seen(20), list(PIECES))
    for piece in PIECES:
        contents.add_piece(piece, _read(piece.length), 1)
    before = held[b"0"]
    for piece in PIECES:
        contents.add_piece(piece, _read(piece.length), 1)
    assert held[b"0"] == before


def test_one_unstable_piece_marks_the_file() -> None:
    for number in range(3):
        contents, held = _contents(_seen(20), list(PIECES))
        for n, piece in enumerate(PIECES):
            contents.add_piece(piece, _read(piece.length, stable=n != number), n)
        assert held[b"0"].entry.changed
        assert held[b"0"].signature is None


@pytest.mark.parametrize("may_change", [{"ctime": NOW}, {"mapped": "process 1 (init)"}])
def test_what_may_change_unseen_is_looked_at_again(may_change: dict[str, Any]) -> None:
    contents, held = _contents(_seen(20, **may_change), list(PIECES))
    for n, piece in enumerate(PIECES):
        contents.add_piece(piece, _read(piece.length), n)
    assert not held[b"0"].entry.changed
    assert held[b"0"].signature is None


def test_a_file_that_shrank_is_filled_up_and_marked() -> None:
    contents, held = _contents(_seen(20), list(PIECES))
    contents.add_piece(PIECES[0], _read(8), 0)
    contents.add_piece(PIECES[1], _read(3, stable=False), 1)
    contents.add_piece(PIECES[2], _read(0, stable=False), -1)
    entry = held[b"0"].entry
    assert entry.extents == (Extent(0, 0, 8), Extent(1, 0, 3), Extent(HOLE, 0, 9))
    assert (entry.size, entry.changed) == (20, True)


def test_a_file_that_went_is_left_out_whatever_comes_later() -> None:
    contents, held = _contents(_seen(20), list(PIECES))
    contents.add_piece(PIECES[0], _read(8), 0)
    contents.add_piece(PIECES[1], GONE, -1)
    contents.add_piece(PIECES[2], _read(4), 2)
    assert held == {}


def test_small_files_share_a_chunk() -> None:
    seen = _seen(5, 7, 3)
    contents, held = _contents(seen, [Group([0, 1, 2], 15)])
    contents.add_small(0, seen.unread[0], _read(5), 9, 0, b"a" * 16)
    contents.add_small(1, seen.unread[1], GONE, 9, 5, b"")
    contents.add_small(2, seen.unread[2], _read(2, stable=False), 9, 5, b"c" * 16)
    assert held.keys() == {b"0", b"2"}
    assert held[b"0"].entry.extents == (Extent(9, 0, 5),)
    assert held[b"0"].entry.digest == b"a" * 16
    assert held[b"0"].signature is not None
    assert held[b"2"].entry.extents == (Extent(9, 5, 2), Extent(HOLE, 0, 1))
    assert held[b"2"].entry.changed
    assert held[b"2"].signature is None


@pytest.mark.parametrize("ctime", [OLD + 1, NOW])
def test_small_files_held_at_once_are_as_those_held_one_by_one(ctime: int) -> None:
    digests = [b"a" * 16, b"b" * 16, b"c" * 16]
    held = []
    for at_once in (True, False):
        seen = _seen(5, 7, 3, ctime=ctime)
        contents, files = _contents(seen, [Group([0, 1, 2], 15)])
        contents.add_small(1, seen.unread[1], _read(6, stable=False), 8, 0, b"")  # a first try
        if at_once:
            small = seen.unread.together([0, 1, 2])
            assert small is not None
            contents.add_unchanged([0, 1, 2], small, 9, digests)
        else:
            for number, (at, size) in enumerate([(0, 5), (5, 7), (12, 3)]):
                contents.add_small(number, seen.unread[number], _read(size), 9, at, digests[number])
        held.append(dict(files))
    assert held[0] == held[1]
    assert [file.entry.changed for file in held[0].values()] == [False, True, False]
    assert [file.signature is None for file in held[0].values()] == [
        ctime == NOW, True, ctime == NOW,
    ]  # fmt: skip


def test_files_of_which_there_is_more_to_say_are_not_taken_together() -> None:
    roots = _seen(5, 7)
    roots.names.entries = Entries(
        msgspec.structs.replace(entry, root=root) for root, entry in enumerate(roots.names.entries)
    )
    assert roots.unread.together([0, 1]) is None
    assert _seen(5, 7, mapped="process 1 (init)").unread.together([0, 1]) is None
    known = UnreadFiles(_seen(5).names, _seen(5).names)
    known.add(0, sparse=False, mapped="")
    assert known.together([0]) is None
