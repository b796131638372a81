"""What a restore plans and remembers."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.fixtures.manifests import entry, honest
from torpor.machine.pipeline.download import FetchPlan, RestoreJournal, Use, in_pieces
from torpor.shared.format.manifest import DIRECTORY, FILE, Chunk, Extent, Manifest, Pack
from torpor.shared.values import MIB

IDENTITY = b"i" * 32


def _packed(packs: int, chunks_each: int, plain: int) -> Manifest:
    """Many chunks, one file each, stored backwards in their packs."""
    chunks, entries = [], [entry(DIRECTORY, b"")]
    for number in range(packs * chunks_each):
        pack, place = divmod(number, chunks_each)
        offset = (chunks_each - 1 - place) * plain
        chunks.append(Chunk(number.to_bytes(32, "big"), plain, 0, pack, offset, plain))
        extents = (Extent(number, 0, plain),)
        entries.append(entry(FILE, b"%d" % number, size=plain, extents=extents))
    stored = [Pack(bytes([n]) * 16, chunks_each * plain, b"m" * 16) for n in range(packs)]
    return honest(packs=stored, chunks=chunks, entries=entries)


def test_every_use_of_a_chunk_is_written() -> None:
    plan = FetchPlan(honest(), 32, set())
    assert plan.uses == [
        [Use(2, 0, 0, 100, True), Use(4, 30, 0, 100, False)],
        [Use(3, 0, 150, 50, True)],
    ]
    assert plan.parts == [[b"p" * 16]]
    assert plan.chunks_of(b"p" * 16) == [0, 1]
    assert plan.chunks_of(b"unknown") == []


def test_chunks_are_fetched_in_the_order_in_which_they_lie() -> None:
    plan = FetchPlan(_packed(1, 5, 10), 32, set())
    assert plan.chunks_of(bytes(16)) == [4, 3, 2, 1, 0]


def test_what_is_done_is_not_fetched_again() -> None:
    plan = FetchPlan(honest(), 32, {0})
    assert plan.chunks_of(b"p" * 16) == [1]
    assert (plan.plain_bytes([b"p" * 16]), plan.stored_bytes([b"p" * 16])) == (200, 200)
    assert FetchPlan(honest(), 32, {0, 1}).parts == []


def test_what_nothing_uses_is_not_fetched() -> None:
    unused = honest(entries=[e for e in honest().entries if e.path != b"part"])
    assert FetchPlan(unused, 32, set()).chunks_of(b"p" * 16) == [0]


@settings(max_examples=50, deadline=None, database=None)
@given(packs=st.integers(1, 40), max_parts=st.integers(1, 64))
def test_every_pack_is_in_one_part(packs: int, max_parts: int) -> None:
    plan = FetchPlan(_packed(packs, 4, 16 * MIB), max_parts, set())
    assert sorted(p for part in plan.parts for p in part) == [bytes([n]) * 16 for n in range(packs)]
    assert 1 <= len(plan.parts) <= max_parts
    assert all(plan.parts)


def test_which_files_are_written_in_pieces() -> None:
    pieces = {e.path for e in honest().entries if in_pieces(e)}
    assert pieces == {b"holed"}
    hole = entry(FILE, b"x", size=5, extents=(Extent(-1, 0, 5),))
    assert in_pieces(hole)
    assert not in_pieces(msgspec.structs.replace(hole, size=0, extents=()))


# -- the journal


def test_a_restore_remembers_what_is_on_the_disk(tmp_path: Path) -> None:
    journal = RestoreJournal(tmp_path / "j", IDENTITY)
    assert journal.done() is None
    journal.begin()
    assert journal.done() == set()
    for number in (7, 0, 1 << 31):
        journal.add(number)
    again = RestoreJournal(tmp_path / "j", IDENTITY)
    assert again.done() == {0, 7, 1 << 31}
    again.begin()
    assert again.done() == {0, 7, 1 << 31}
    again.clear()
    assert again.done() is None


@pytest.mark.parametrize("torn", [1, 2, 3])
def test_a_torn_number_is_not_believed(tmp_path: Path, torn: int) -> None:
    journal = RestoreJournal(tmp_path / "j", IDENTITY)
    journal.begin()
    journal.add(5)
    journal.add(6)
    data = (tmp_path / "j").read_bytes()
    (tmp_path / "j").write_bytes(data[:-torn])
    assert journal.done() == {5}
    journal.begin()
    journal.add(9)
    assert journal.done() == {5, 9}


def test_another_restore_s_journal_is_not_believed(tmp_path: Path) -> None:
    journal = RestoreJournal(tmp_path / "j", IDENTITY)
    journal.begin()
    journal.add(5)
    other = RestoreJournal(tmp_path / "j", b"o" * 32)
    assert other.done() is None
    other.begin()
    assert other.done() == set()
    assert journal.done() is None


@pytest.mark.parametrize("length", [0, 1, 31])
def test_a_journal_without_a_whole_beginning_is_not_believed(tmp_path: Path, length: int) -> None:
    (tmp_path / "j").write_bytes(IDENTITY[:length])
    assert RestoreJournal(tmp_path / "j", IDENTITY).done() is None
