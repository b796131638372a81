"""Assembles the files of one pass from pieces that arrive in any order."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import msgspec

from torpor.machine.tree.plan import Job, Piece
from torpor.machine.tree.read import Read
from torpor.machine.tree.walk import Held, Walk
from torpor.shared.format.manifest import HOLE, Extent


class Contents:
    """Collects extents until a file is complete, then holds it. Thread-safe and idempotent.

    ``held`` of the walk (one dict a root) gets an entry for each file that was read: with its
    signature when the file is what the walk saw, without one (look again) when it changed or may
    have.
    """

    def __init__(
        self,
        seen: Walk,
        jobs: Sequence[Job],
    ) -> None:
        self._seen = seen
        self.gone: set[tuple[int, bytes]] = set()
        """Names (root and path) that were no longer files when they were read."""
        self._lock = threading.Lock()
        self._missing: dict[int, set[int]] = {}
        self._extents: dict[int, dict[int, Extent]] = {}
        self._unstable: set[int] = set()
        for job in jobs:
            if isinstance(job, Piece):
                self._missing.setdefault(job.file, set()).add(job.offset)
        with_work = {f for j in jobs for f in ((j.file,) if isinstance(j, Piece) else j.files)}
        for number in range(len(seen.unread)):
            if number not in with_work:  # empty, or nothing but a hole
                self._hold(number, {}, b"")

    def add_piece(self, piece: Piece, read: Read, chunk: int) -> None:
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
                self._hold(piece.file, extents, b"")

    def add_small(self, number: int, read: Read, chunk: int, offset: int, digest: bytes) -> None:
        """Add a whole small file at ``offset`` of chunk number ``chunk``."""
        with self._lock:
            if read.gone:
                self._drop(number)
                return
            if not read.stable:
                self._unstable.add(number)
            extents = {0: Extent(chunk, offset, len(read.data))} if read.data else {}
            self._hold(number, extents, digest)

    def _hold(self, number: int, extents: dict[int, Extent], digest: bytes) -> None:
        file = self._seen.unread[number]
        size = file.signature.size
        entry = file.entry
        changed = number in self._unstable
        self._seen.held[entry.root][entry.path] = Held(
            file.signature if self._seen.rests(file) and not changed else None,
            msgspec.structs.replace(
                entry,
                size=size,
                extents=_without_gaps(extents, size),
                digest=digest,
                changed=changed,
            ),
        )

    def _drop(self, number: int) -> None:
        entry = self._seen.unread[number].entry
        self._missing.pop(number, None)
        self._seen.held[entry.root].pop(entry.path, None)
        self.gone.add((entry.root, entry.path))


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
