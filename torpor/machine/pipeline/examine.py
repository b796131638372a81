"""Read whole packs; open, decode and hash every chunk in them. Write nothing.

Chunks go through the same steps as in a restore (download.py), without the disk.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from typing import Final, Literal, NamedTuple

from torpor.shared.codecs.codec import Buffer
from torpor.shared.errors import SnapshotDamaged, StoreCorrupt, StoreMissing, WrongKey
from torpor.shared.format.chunks import open_chunk
from torpor.shared.format.keys import Seal
from torpor.shared.format.manifest import Chunk
from torpor.shared.format.names import pack_id_of
from torpor.shared.transfer.transfer import Range, Transfer
from torpor.shared.values import MIB, Grant

_LOOKS: Final = 2
"""How often a faulty pack is read: a fault in transit disappears, a fault in the store stays."""
_SLICE_BYTES: Final = 4 * MIB
"""The largest slice in memory of bytes that no chunk uses; only the pack's MD5 covers them."""

Fault = Literal["", "missing", "cut short", "damaged"]


class PackResult(NamedTuple):
    """One pack. ``damaged`` are positions in the list of chunks that was asked for; a ``damaged``
    pack without any has its fault in bytes that no snapshot uses."""

    fault: Fault
    damaged: list[int]
    bytes: int  # that came


class _Piece(NamedTuple):
    wanted: Range
    chunk: int  # position, or -1


def examine_pack(
    grant: Grant,
    size: int,
    md5: bytes,
    chunks: Sequence[Chunk],
    seal: Seal,
    fetcher: Transfer,
    check: Callable[[], None],
) -> PackResult:
    """Read a pack of ``size`` bytes; ``chunks`` lie apart in it. ``check`` may raise RunCancelled.

    Raises the errors that say nothing about the pack: StoreUnavailable, StoreDenied, GrantExpired.
    """
    looks = (_look(grant, size, md5, chunks, seal, fetcher, check) for _ in range(_LOOKS))
    found = next(looks)
    for again in looks:
        if not found.fault or found.fault == "missing":
            break
        found = again
    return found


def _look(
    grant: Grant,
    size: int,
    md5: bytes,
    chunks: Sequence[Chunk],
    seal: Seal,
    fetcher: Transfer,
    check: Callable[[], None],
) -> PackResult:
    pack_id = pack_id_of(grant.key)
    pieces = list(_pieces(chunks, size))
    seen = hashlib.md5(usedforsecurity=False)
    damaged: list[int] = []
    came = 0
    try:
        with closing(fetcher.get_ranges(grant, [piece.wanted for piece in pieces])) as stream:
            for piece in pieces:
                check()
                data = next(stream)
                came += len(data)
                seen.update(data)
                if piece.chunk >= 0 and not _opens(chunks[piece.chunk], pack_id, data, seal):
                    damaged.append(piece.chunk)
    except StoreMissing:
        return PackResult("missing", list(range(len(chunks))), 0)
    except StoreCorrupt:
        return _what_is_left(grant, pack_id, chunks, seal, fetcher, check)
    return PackResult("damaged" if damaged or seen.digest() != md5 else "", sorted(damaged), came)


def _what_is_left(
    grant: Grant,
    pack_id: bytes,
    chunks: Sequence[Chunk],
    seal: Seal,
    fetcher: Transfer,
    check: Callable[[], None],
) -> PackResult:
    """Which chunks stand before the end of a pack that is too short, and are right."""
    lost = set(range(len(chunks)))
    came = 0
    for number in sorted(lost, key=lambda n: chunks[n].offset):
        check()
        chunk = chunks[number]
        try:
            with closing(fetcher.get_ranges(grant, [Range(chunk.offset, chunk.stored)])) as stream:
                data = next(stream)
        except (StoreCorrupt, StoreMissing):
            break  # and what comes after it is beyond the end too
        came += len(data)
        if _opens(chunk, pack_id, data, seal):
            lost.discard(number)
    return PackResult("cut short", sorted(lost), came)


def _opens(chunk: Chunk, pack_id: bytes, stored: Buffer, seal: Seal) -> bool:
    try:
        open_chunk(chunk, pack_id, stored, seal)
    except (SnapshotDamaged, WrongKey):
        return False
    return True


def _pieces(chunks: Sequence[Chunk], size: int) -> Iterator[_Piece]:
    """The pack from first byte to last: chunks, and slices of the bytes between them."""
    at = 0
    for number in sorted(range(len(chunks)), key=lambda n: chunks[n].offset):
        chunk = chunks[number]
        yield from _slices(at, chunk.offset)
        yield _Piece(Range(chunk.offset, chunk.stored), number)
        at = chunk.offset + chunk.stored
    yield from _slices(at, size)


def _slices(start: int, end: int) -> Iterator[_Piece]:
    for at in range(start, end, _SLICE_BYTES):
        yield _Piece(Range(at, min(_SLICE_BYTES, end - at)), -1)
