"""What a file's content is, and how much of it an open file holds."""

from __future__ import annotations

import errno
import os
from collections.abc import Container, Iterator, Sequence
from typing import Final, NamedTuple

from torpor.shared.format.keys import Seal
from torpor.shared.format.manifest import HOLE, Chunk, Entry
from torpor.shared.values import MIB

_READ_BYTES: Final = MIB
"""Read at once, into the same memory: it is still in the core's cache when it is hashed."""


class ContentKey(NamedTuple):
    """Equal for files of equal content that were cut in the same way, in whatever snapshot."""

    size: int
    digest: bytes  # the digest of the whole file, or empty
    # if there is no digest: names (empty for a hole) and lengths of its chunks
    runs: tuple[tuple[bytes, int], ...]


def content_of(entry: Entry, chunks: Sequence[Chunk]) -> ContentKey:
    """The content of a file's entry, by its hashes."""
    if entry.digest:
        return ContentKey(entry.size, entry.digest, ())
    names = (b"" if e.chunk == HOLE else chunks[e.chunk].name for e in entry.extents)
    lengths = (extent.length for extent in entry.extents)
    return ContentKey(entry.size, b"", tuple(zip(names, lengths, strict=True)))


def right_extents(
    fd: int,
    entry: Entry,
    chunks: Sequence[Chunk],
    seal: Seal,
    among: Container[int] | None = None,
) -> set[int]:
    """Positions of the extents of ``entry`` that the open file holds in their places, ``among``
    some positions or all. All or none if one digest covers the content. May raise OSError.
    """
    everything = set(range(len(entry.extents)))
    if entry.digest:
        hasher = seal.hasher()
        for data in _runs(fd, 0, entry.size):
            hasher.update(data)
        return everything if hasher.digest(length=16) == entry.digest else set()
    right = set()
    at = 0
    for number, extent in enumerate(entry.extents):
        if among is not None and number not in among:
            is_right = False
        elif extent.chunk == HOLE:
            is_right = _is_hole(fd, at, extent.length)
        else:
            hasher = seal.hasher()
            for data in _runs(fd, at, extent.length):
                hasher.update(data)
            is_right = hasher.digest() == chunks[extent.chunk].name
        if is_right:
            right.add(number)
        at += extent.length
    return right


def _runs(fd: int, offset: int, length: int) -> Iterator[memoryview]:
    """Bytes of a file in bounded pieces, each there until the next; fewer than asked for if it ends
    before."""
    memory = memoryview(bytearray(min(length, _READ_BYTES)))
    while length > 0:
        count = os.preadv(fd, [memory[:length]], offset)
        if not count:
            return
        yield memory[:count]
        offset += count
        length -= count


def _is_hole(fd: int, offset: int, length: int) -> bool:
    """Whether the range holds only zeros, found without reading holes, which may be huge."""
    end = offset + length
    while offset < end:
        try:
            offset = os.lseek(fd, offset, os.SEEK_DATA)
        except OSError as exc:
            if exc.errno != errno.ENXIO:
                raise
            return os.fstat(fd).st_size >= end  # a hole up to the end of the file
        if offset >= end:
            return True
        stop = min(end, os.lseek(fd, offset, os.SEEK_HOLE))
        if any(data.tobytes().count(0) != len(data) for data in _runs(fd, offset, stop - offset)):
            return False
        offset = stop
    return True
