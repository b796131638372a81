"""Who stores which chunk, and what a manifest may name."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.fixtures.manifests import entry
from torpor.machine.pipeline.chunks import ChunkPlace, ChunkTable
from torpor.shared.errors import AgentLost
from torpor.shared.format.manifest import FILE, HOLE, Chunk, Entries, Entry, Extent, Pack

PACK = Pack(b"p" * 16, 1000, b"m" * 16)
OTHER = Pack(b"q" * 16, 500, b"n" * 16)


def _place(pack: Pack, offset: int = 0) -> ChunkPlace:
    return ChunkPlace(pack.id, 0, offset, 10)


def _using(*chunks: int) -> Entry:
    return entry(FILE, b"f", size=10 * len(chunks), extents=tuple(Extent(c, 0, 10) for c in chunks))


def test_a_chunk_is_stored_by_the_first_who_meets_it() -> None:
    table = ChunkTable()
    assert table.claim(b"a", 10) == (0, True)
    assert table.claim(b"a", 10) == (0, False)
    assert table.claim(b"b", 10) == (1, True)
    table.settle(PACK, [(0, _place(PACK))])
    assert table.claim(b"a", 10) == (0, False)
    assert table.has_place(0)
    assert not table.has_place(1)


def test_many_threads_give_each_chunk_one_owner() -> None:
    table = ChunkTable()
    names = [bytes([n % 50]) for n in range(5000)]
    with ThreadPoolExecutor(8) as threads:
        claims = list(threads.map(lambda name: table.claim(name, 10), names))
    assert sum(must_store for _, must_store in claims) == 50
    assert len(set(zip(names, (number for number, _ in claims), strict=True))) == 50


def test_a_claim_given_back_goes_to_another_part() -> None:
    table = ChunkTable()
    number, _ = table.claim(b"a", 10)
    table.release([number])
    assert table.claim(b"a", 10) == (number, True)


def test_adopted_chunks_keep_their_numbers() -> None:
    table = ChunkTable()
    chunks = [Chunk(b"a", 10, 0, 1, 0, 10), Chunk(b"b", 10, 2, 0, 5, 7)]
    table.adopt(chunks, [PACK, OTHER])
    assert table.claim(b"b", 10) == (1, False)
    _, compacted, packs = table.compact(Entries([_using(0, 1)]), [0, 1])
    assert [(c.name, packs[c.pack].id) for c in compacted] == [(b"a", OTHER.id), (b"b", PACK.id)]
    with pytest.raises(RuntimeError):
        table.adopt(chunks, [PACK, OTHER])


def test_a_manifest_never_names_a_chunk_that_was_not_stored() -> None:
    table = ChunkTable()
    table.claim(b"a", 10)
    with pytest.raises(AgentLost, match="was never stored: make another pass"):
        table.compact(Entries([_using(0)]), [0])


def test_a_manifest_names_what_is_used_and_nothing_else() -> None:
    table = ChunkTable()
    for name in (b"a", b"b", b"c"):
        table.claim(name, 10)
    table.settle(PACK, [(0, _place(PACK)), (2, _place(PACK, 20))])
    table.settle(OTHER, [(1, _place(OTHER))])
    using = entry(
        FILE,
        b"f",
        size=25,
        extents=(Extent(2, 0, 10), Extent(HOLE, 0, 5), Extent(0, 0, 10)),
        digest=b"d" * 16,
        changed=True,
        xattrs=((b"user.x", b"y"),),
    )
    (entry_now,), chunks, packs = table.compact(Entries([using]), [0, 2])
    assert [c.name for c in chunks] == [b"a", b"c"]
    assert packs == [PACK]
    assert entry_now.extents == (Extent(1, 0, 10), Extent(HOLE, 0, 5), Extent(0, 0, 10))
    for field in Entry.__struct_fields__:
        if field != "extents":
            assert getattr(entry_now, field) == getattr(using, field)
