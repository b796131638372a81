"""Files are cut where the format says, and shared out evenly."""

from __future__ import annotations

import os
from array import array
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from torpor.machine.tree.names import Names, Signature, UnreadFiles
from torpor.machine.tree.plan import (
    ChunkRange,
    Group,
    ReadUnit,
    cut,
    part_ends,
    share_out,
)
from torpor.shared.format.manifest import FILE, MAX_CHUNK_BYTES, Entry
from torpor.shared.format.sizes import BIG_FILE_BYTES, CHUNK_BYTES, GROUP_BYTES, PART_BYTES


def _unread(*sizes: int, sparse: bool = False) -> UnreadFiles:
    names = Names(1)
    unread = UnreadFiles(names, Names(1))
    for number, size in enumerate(sizes):
        entry = Entry(FILE, 0, b"%d" % number, 0o644, 0, 0, 0, 0)
        names.add(entry, Signature(number, size, 0, 0).packed(), 0)
        unread.add(number, sparse=sparse, mapped="")
    return unread


def _cut(*sizes: int) -> list[ReadUnit]:
    return cut(_unread(*sizes), [b"/nowhere"])


def test_big_files_are_cut_at_multiples() -> None:
    size = 2 * CHUNK_BYTES + 5
    assert _cut(size) == [
        ChunkRange(0, 0, CHUNK_BYTES),
        ChunkRange(0, CHUNK_BYTES, CHUNK_BYTES),
        ChunkRange(0, 2 * CHUNK_BYTES, 5),
    ]
    assert _cut(BIG_FILE_BYTES) == [ChunkRange(0, 0, BIG_FILE_BYTES)]
    assert _cut(BIG_FILE_BYTES - 1) == [Group(array("L", [0]), BIG_FILE_BYTES - 1)]


def test_a_sparse_file_is_cut_where_its_data_is(tmp_path: Path) -> None:
    with (tmp_path / "0").open("wb") as f:
        f.truncate(10 * CHUNK_BYTES)
        os.pwrite(f.fileno(), b"x" * 8192, 3 * CHUNK_BYTES - 4096)
    unread = _unread(10 * CHUNK_BYTES, sparse=True)
    assert cut(unread, [os.fsencode(tmp_path)]) == [
        ChunkRange(0, 3 * CHUNK_BYTES - 4096, 4096),
        ChunkRange(0, 3 * CHUNK_BYTES, 4096),
    ]


@settings(max_examples=100)
@given(
    sizes=st.lists(
        st.one_of(
            st.integers(0, BIG_FILE_BYTES),
            st.integers(BIG_FILE_BYTES - 1, 4 * CHUNK_BYTES),
            st.just(PART_BYTES),
        ),
        max_size=40,
    ),
    max_parts=st.integers(1, 64),
)
def test_every_byte_is_in_one_job_and_every_job_in_one_part(
    sizes: list[int], max_parts: int
) -> None:
    jobs = _cut(*sizes)
    covered = dict.fromkeys(range(len(sizes)), 0)
    for job in jobs:
        if isinstance(job, ChunkRange):
            assert job.offset == covered[job.file]
            covered[job.file] += job.length
            assert 0 < job.length <= CHUNK_BYTES <= MAX_CHUNK_BYTES
        else:
            assert job.length == sum(sizes[file] for file in job.files) <= GROUP_BYTES
            for file in job.files:
                covered[file] += sizes[file]
    assert list(covered.values()) == sizes

    parts = share_out(jobs, max_parts, PART_BYTES)
    assert [job for part in parts for job in part] == jobs
    assert all(parts)
    total = sum(sizes)
    assert len(parts) <= max(1, min(max_parts, -(-total // PART_BYTES)))
    fair = total / max(1, min(max_parts, -(-total // PART_BYTES)))
    for part in parts:  # about even, so no part is late
        assert sum(job.length for job in part) <= 1.2 * fair + 2 * CHUNK_BYTES


@pytest.mark.parametrize("parts", [1, 2, 3, 4, 7, 8, 32, 64])
def test_parts_are_even_and_the_last_ones_smaller_and_smaller(parts: int) -> None:
    ends = part_ends(parts * PART_BYTES, parts, PART_BYTES)
    assert ends[-1] == parts * PART_BYTES
    sizes = [end - start for start, end in zip([0, *ends], ends, strict=False)]
    tail = max(1, parts // 4)
    even = sizes[: parts - tail + 1]
    assert max(even) - min(even) <= 1
    assert max(even) <= 1.2 * PART_BYTES
    last = sizes[parts - tail :]
    assert last == sorted(set(last), reverse=True)
