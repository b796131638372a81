"""What a restore plans and remembers."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.fixtures.manifests import entry, honest
from torpor.machine.pipeline.download import (
    FIRST_PARTS,
    FetchPlan,
    Lot,
    RestoreJournal,
    in_pieces,
)
from torpor.shared.errors import InvalidInput
from torpor.shared.format.manifest import DIRECTORY, FILE, Chunk, Extent, Manifest, Pack
from torpor.shared.transfer.transfer import GAP_BYTES
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
    assert [[*plan.users(chunk)] for chunk in range(2)] == [[2, 4], [3]]
    assert plan.parts == [[Lot(b"p" * 16, 0)]]
    assert plan.chunks_of(b"p" * 16) == [0, 1]
    assert plan.chunks_of(b"unknown") == []


def test_chunks_are_fetched_in_the_order_in_which_they_lie() -> None:
    plan = FetchPlan(_packed(1, 5, 10), 32, set())
    assert plan.chunks_of(bytes(16)) == [4, 3, 2, 1, 0]


def test_what_is_done_is_not_fetched_again() -> None:
    plan = FetchPlan(honest(), 32, {0})
    assert plan.chunks_of(b"p" * 16) == [1]
    (part,) = plan.parts
    assert (plan.plain_bytes(part), plan.stored_bytes(part)) == (200, 200)
    assert FetchPlan(honest(), 32, {0, 1}).parts == []


def test_what_nothing_uses_is_not_fetched() -> None:
    unused = honest(entries=[e for e in honest().entries if e.path != b"part"])
    assert FetchPlan(unused, 32, set()).chunks_of(b"p" * 16) == [0]


# -- what comes first


@settings(max_examples=50)
@given(
    packs=st.integers(1, 12),
    max_parts=st.integers(1, 64),
    first=st.dictionaries(st.integers(1, 48), st.integers(0, 3)),
    done=st.sets(st.integers(0, 47)),
)
def test_what_comes_first_is_in_parts_of_its_own_in_the_user_s_order(
    packs: int, max_parts: int, first: dict[int, int], done: set[int]
) -> None:
    manifest = _packed(packs, 4, 16 * MIB)
    done = {number for number in done if number < len(manifest.chunks)}
    first = {entry: rank for entry, rank in first.items() if entry < len(manifest.entries)}
    plan = FetchPlan(manifest, max_parts, set(done), first=first)
    assert all(plan.parts)
    kinds = [{lot.piece > 0 for lot in part} for part in plan.parts]
    assert kinds == sorted(kinds, key=lambda kind: kind == {False})
    assert all(kind in ({True}, {False}) for kind in kinds)
    assert len(plan.parts) <= max(2, max_parts)
    lots = [lot for part in plan.parts for lot in part]
    fetched = [number for lot in lots for number in plan.chunks_of(*lot)]
    assert sorted(fetched) == sorted({*range(len(manifest.chunks))} - done)  # each of them once
    early = [lot for lot in lots if lot.piece]
    assert {n for lot in early for n in plan.chunks_of(*lot)} == {e - 1 for e in first} - done
    best = [min(first[n + 1] for n in plan.chunks_of(*lot)) for lot in early]
    assert best == sorted(best)


def test_which_chunks_come_first_does_not_depend_on_what_is_done() -> None:
    """An agent that was restarted means the same by the parts of the plan of the lost one."""
    manifest = _packed(2, 4, 16 * MIB)
    whole = FetchPlan(manifest, 32, set(), first={1: 0, 2: 0})
    assert [whole.chunks_of(bytes(16), piece) for piece in (1, 2, 3)] == [[1], [0], []]
    assert whole.chunks_of(bytes(16)) == [3, 2]
    rest = FetchPlan(manifest, 32, {1, 2}, first={1: 0, 2: 0})
    assert [rest.chunks_of(bytes(16), piece) for piece in (1, 2, 3)] == [[], [0], []]
    assert rest.chunks_of(bytes(16)) == [3]


def test_what_comes_first_is_enough_for_all_workers() -> None:
    """A quarter of sixteen packs, which lies in four of them."""
    first = dict.fromkeys(range(1, 65), 0)
    plan = FetchPlan(_packed(16, 16, 4 * MIB), 32, set(), first=first)
    early = [part for part in plan.parts if part[0].piece]
    assert len(early) == FIRST_PARTS
    assert max(plan.plain_bytes(part) for part in early) <= 24 * MIB


def test_a_small_hole_between_what_comes_first_is_fetched_with_it() -> None:
    """One request reads through it in any case."""
    plan = FetchPlan(_packed(1, 10, GAP_BYTES), 32, set(), first={1: 0, 3: 0, 6: 0})
    assert plan.chunks_of(bytes(16), 1) == [5, 2, 1, 0]


def test_the_little_that_is_left_of_a_pack_is_not_another_request() -> None:
    first = dict.fromkeys(range(1, 33), 0)
    plan = FetchPlan(_packed(1, 33, MIB), 32, set(), first=first)
    assert plan.chunks_of(bytes(16)) == []
    del first[1]
    plan = FetchPlan(_packed(1, 33, MIB), 32, set(), first=first)
    assert plan.chunks_of(bytes(16)) == [32, 0]


def test_parts_of_what_comes_first_cannot_be_finished_before_they_are_there() -> None:
    plan = FetchPlan(_packed(2, 4, 10), 32, set(), first={1: 0})
    with pytest.raises(InvalidInput, match="run r still lacks 1 chunks: wait"):
        plan.check_fetched("run r", "wait", first=True)
    plan.done.add(0)
    plan.check_fetched("run r", "wait", first=True)
    with pytest.raises(InvalidInput, match="lacks 7 chunks"):
        plan.check_fetched("run r", "wait")


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
