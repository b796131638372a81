"""The MD5 of packs while they are filled, several packs at a time."""

from __future__ import annotations

import hashlib
import threading
from typing import Final

from gpu_kernels import twin
from torpor.shared.values import MIB

_BLOCK: Final = 64  # bytes that MD5 takes at a time
_STEP_BLOCKS: Final = 2 * MIB // _BLOCK  # hashed between two looks at which packs have grown
_WORTH_BLOCKS: Final = MIB // 4 // _BLOCK  # a pack with less to hash is left alone


class PackDigests:
    """The packs that the parts of one run are filling. Thread-safe.

    MD5 runs at 0.75 GB/s on one stream, because each of its steps waits for the one before, and
    nearly as fast on eight at once. So the part that must hash a full pack also hashes what other
    parts have filled so far, and their packs are mostly hashed when they are full.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._open: set[PackDigest] = set()
        self._together = twin.md5_lanes()

    @property
    def together(self) -> int:
        """How many packs this CPU hashes at the price of one."""
        return self._together

    def begin(self, buffer: memoryview) -> PackDigest:
        """The digest of a pack that will be filled in ``buffer`` from its beginning."""
        digest = PackDigest(self, buffer)
        with self._lock:
            self._open.add(digest)
        return digest

    def _take_along(self, leader: PackDigest, taken: list[PackDigest]) -> None:
        """Lock other packs with something to hash, the fullest, as many as there are lanes; each
        that is locked stands in ``taken``."""
        with self._lock:
            others = [one for one in self._open if one is not leader]
        others.sort(key=lambda one: one.blocks_behind, reverse=True)
        for one in others:
            if len(taken) + 1 >= self._together or one.blocks_behind < _WORTH_BLOCKS:
                break
            if not one.lock.acquire(blocking=False):
                continue  # another thread hashes it now
            taken.append(one)
            if one.blocks_behind < _WORTH_BLOCKS:  # by now
                taken.pop().lock.release()

    def _forget(self, digest: PackDigest) -> None:
        with self._lock:
            self._open.discard(digest)


class PackDigest:
    """One pack's MD5. Its part's thread says how far the pack is ``filled``, in bytes, and never
    touches those bytes again before ``finish`` or ``drop``; any part's thread may hash them."""

    def __init__(self, of: PackDigests, buffer: memoryview) -> None:
        self.lock = threading.Lock()
        self.filled = 0
        self._of = of
        self._buffer = buffer
        self._state = bytearray(twin.MD5_START)
        self._hashed = 0

    @property
    def blocks_behind(self) -> int:
        """Whole blocks that are filled and not hashed yet."""
        return (self.filled - self._hashed) // _BLOCK

    def finish(self) -> bytes:
        """The MD5 of everything filled."""
        if self._of.together > 1:
            while self.blocks_behind:
                self._advance()
            with self.lock:
                rest = bytes(self._buffer[self._hashed : self.filled])
                twin.md5_advance([self._state], [memoryview(_padded(rest, self.filled))])
                digest = bytes(self._state)
        else:
            digest = hashlib.md5(self._buffer[: self.filled], usedforsecurity=False).digest()
        self.drop()
        return digest

    def drop(self) -> None:
        """Forget the pack; after this returns, no thread reads its buffer."""
        self._of._forget(self)
        with self.lock:
            self.filled = self._hashed = 0

    def _advance(self) -> None:
        """Hash up to a step, and as much of others' packs."""
        with self.lock:
            taken: list[PackDigest] = []
            try:
                self._of._take_along(self, taken)
                lanes = [self, *taken]
                blocks = min(_STEP_BLOCKS, *(lane.blocks_behind for lane in lanes))
                twin.md5_advance(
                    [lane._state for lane in lanes],
                    [lane._next(blocks * _BLOCK) for lane in lanes],
                )
                for lane in lanes:
                    lane._hashed += blocks * _BLOCK
            finally:
                for one in taken:
                    one.lock.release()

    def _next(self, size: int) -> memoryview:
        return self._buffer[self._hashed : self._hashed + size]


def _padded(rest: bytes, total: int) -> bytes:
    """The last bytes of a message of ``total`` bytes, with RFC 1321's padding: whole blocks."""
    padding = b"\x80" + bytes(-(len(rest) + 9) % _BLOCK)
    return rest + padding + (8 * total).to_bytes(8, "little")
