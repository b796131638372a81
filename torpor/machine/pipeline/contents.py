"""Assembles the files of one pass from pieces that arrive in any order."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from itertools import accumulate, compress

from torpor.machine.tree.names import SmallFiles, Unread
from torpor.machine.tree.plan import ChunkRange, ReadUnit
from torpor.machine.tree.read import Read
from torpor.machine.tree.walk import Walk
from torpor.shared.format.manifest import HOLE, Content, Extent


class Contents:
    """Collects extents until a file is complete, then holds it. Thread-safe and idempotent.

    The names of the walk hold each file that was read: with its signature when the file is what the
    walk saw, without one (look again) when it changed or may have.
    """

    def __init__(
        self,
        seen: Walk,
        jobs: Sequence[ReadUnit],
    ) -> None:
        self._seen = seen
        self.gone: set[int] = set()
        """Positions of names that were no longer files when they were read."""
        self._lock = threading.Lock()
        self._missing: dict[int, set[int]] = {}
        self._extents: dict[int, dict[int, Extent]] = {}
        self._unstable: set[int] = set()
        empty = bytearray(b"\1") * len(seen.unread)  # empty, or nothing but a hole
        for job in jobs:
            if isinstance(job, ChunkRange):
                self._missing.setdefault(job.file, set()).add(job.offset)
            for number in (job.file,) if isinstance(job, ChunkRange) else job.files:
                empty[number] = 0
        for number in compress(range(len(empty)), empty):
            self._hold(number, seen.unread[number], {}, b"")

    def add_piece(self, piece: ChunkRange, read: Read, chunk: int) -> None:
        """A run of a big file is chunk number ``chunk`` (-1 when nothing could be read)."""
        with self._lock:
            if read.gone:
                self._drop(piece.file)
                return
            extents = self._extents.setdefault(piece.file, {})
            if read.data:
                extents[piece.offset] = Extent(chunk, 0, len(read.data))
            if not read.stable:
                self._unstable.add(piece.file)
            missing = self._missing.get(piece.file)
            if missing is None:
                return  # dropped, or done before
            missing.discard(piece.offset)
            if not missing:
                del self._missing[piece.file]
                self._hold(piece.file, self._seen.unread[piece.file], extents, b"")

    def add_small(
        self, number: int, file: Unread, read: Read, chunk: int, offset: int, digest: bytes
    ) -> None:
        """Add a whole small file, unread ``number``, at ``offset`` of chunk number ``chunk``."""
        with self._lock:
            if read.gone:
                self._drop(number)
                return
            if not read.stable:
                self._unstable.add(number)
            extents = {0: Extent(chunk, offset, len(read.data))} if read.data else {}
            self._hold(number, file, extents, digest)

    def add_unchanged(
        self, numbers: Sequence[int], files: SmallFiles, chunk: int, digests: Iterable[bytes]
    ) -> None:
        """Add whole small files that stand in a chunk one after the other, and are as they were
        seen."""
        sizes = files.sizes
        starts = accumulate(sizes[:-1], initial=0)
        with self._lock:
            before = self._unstable.intersection(numbers)  # by an earlier try of this part
            contents = [
                Content(size, (Extent(chunk, start, size),), digest, number in before)
                for number, size, start, digest in zip(numbers, sizes, starts, digests, strict=True)
            ]
            changed = [self._seen.unread.positions[number] for number in before]
            self._seen.names.hold(files.positions, contents, changed)

    def _hold(self, number: int, file: Unread, extents: dict[int, Extent], digest: bytes) -> None:
        size = file.signature.size
        changed = number in self._unstable
        content = Content(size, _without_gaps(extents, size), digest, changed)
        position = self._seen.unread.positions[number]
        self._seen.names.hold([position], [content], [position] if changed else [])

    def _drop(self, number: int) -> None:
        position = self._seen.unread.positions[number]
        self._missing.pop(number, None)
        self._seen.names.drop(position)
        self.gone.add(position)


def _without_gaps(extents: dict[int, Extent], size: int) -> tuple[Extent, ...]:
    """Extents in order, with holes wherever nothing was read, up to ``size``."""
    if len(extents) == 1 and (whole := extents.get(0)) and whole.length == size:
        return (whole,)  # as nearly every file
    filled = []
    at = 0
    for offset in sorted(extents):
        if offset > at:
            filled.append(Extent(HOLE, 0, offset - at))
        filled.append(extents[offset])
        at = offset + extents[offset].length
    if at < size:
        filled.append(Extent(HOLE, 0, size - at))
    return tuple(filled)
