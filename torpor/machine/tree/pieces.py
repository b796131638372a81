"""Files that are written run by run: whether this process wrote all of one, and nobody else any.

After each run, the time of the file's last change is set to what it becomes in the end. So the time
moves when anybody else writes to the file, which is seen before the next run is written and before
the file is finished.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from torpor.machine.tree.batch import SIGNATURE_BYTES, Stat, packed_signature
from torpor.shared.format.manifest import HOLE, Entry

_PAST_NS: Final = 3 * 10**9
"""As in disk.c: more than the coarsest time of a file system, 2 s."""


def signature_of_complete(st: os.stat_result, size: int) -> bytes:
    """The signature of a file that is complete (32 bytes), where any later write is sure to change
    it: a write sets the time of the last change to now. Zeros where that time is not past, or where
    the file has another size or another name."""
    past = st.st_mtime_ns < time.time_ns() - _PAST_NS
    if not past or st.st_size != size or st.st_nlink != 1:
        return bytes(SIGNATURE_BYTES)
    return packed_signature(*Stat.of(st)[:4])


class Pieces:
    """One file that is written run by run. Thread-safe."""

    def __init__(self, entry: Entry, fd: int) -> None:
        """``fd``: the file, new and without content."""
        self._entry = entry
        self._lock = threading.Lock()
        self._left: set[tuple[int, int]] = set()
        at = 0
        for extent in entry.extents:
            if extent.chunk != HOLE:
                self._left.add((at, extent.length))
            at += extent.length
        self._set_time(fd)
        self._signature = signature_of_complete(os.fstat(fd), entry.size)
        self._is_ours = any(self._signature)

    @contextmanager
    def writing(self, fd: int, offset: int, length: int) -> Iterator[None]:
        """Write one run to the open file meanwhile."""
        with self._lock:
            self._look(fd)
            yield
            self._set_time(fd)
            self._left.discard((offset, length))

    def is_whole(self, fd: int) -> bool:
        """Whether every run was written here, and nothing else to the open file."""
        with self._lock:
            self._look(fd)
            return self._is_ours and not self._left

    def _look(self, fd: int) -> None:
        """Compare inode, size and the time of the last change; the other time moves with each run
        that is written here."""
        now = signature_of_complete(os.fstat(fd), self._entry.size)
        self._is_ours = self._is_ours and now[:24] == self._signature[:24]

    def _set_time(self, fd: int) -> None:
        os.utime(fd, ns=(self._entry.mtime_ns, self._entry.mtime_ns))
