"""What a wake asks a market for."""

from __future__ import annotations

from tasks.restore import fitted
from tests.fixtures.manifests import entry, honest
from torpor.shared.format.manifest import DIRECTORY, FILE, HOLE, Entries, Entry, Extent
from torpor.shared.values import GIB, MIB, Want

CHUNKS = [honest().chunks[0]]


def _disk_gib(*entries: Entry) -> float:
    packed = Entries([entry(DIRECTORY, b""), *entries])  # as a manifest that was read has them
    return fitted(Want(), honest(entries=packed, chunks=CHUNKS)).disk_gib


def _map(data: int, hole: int) -> Entry:
    """A file that begins with so many bytes."""
    extents = tuple(Extent(0, 0, MIB) for _ in range(data // MIB))
    return entry(FILE, b"map", size=data + hole, extents=(*extents, Extent(HOLE, 0, hole)))


def test_a_hole_rents_no_disk() -> None:
    """The map of an LMDB database: 1 TiB by its size."""
    assert _disk_gib(_map(30 * MIB, 1 << 40)) < 0.1
    assert _disk_gib(_map(30 * MIB, 1 << 40)) == _disk_gib(_map(30 * MIB, 1 << 20))
    assert _disk_gib(entry(FILE, b"hole", size=GIB, extents=(Extent(HOLE, 0, GIB),))) < 0.1
    assert _disk_gib(_map(2048 * MIB, 1 << 20)) > 2.0


def test_many_small_files_rent_the_blocks_that_they_take() -> None:
    small = [
        entry(FILE, b"%06d" % number, size=1, extents=(Extent(0, 0, 1),), digest=b"d" * 16)
        for number in range(50_000)
    ]
    assert 50_000 * 4096 / GIB <= _disk_gib(*small) < 0.3
