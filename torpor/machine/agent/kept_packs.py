"""Fetched and verified chunks of packs, kept on disk to pass on to other machines.

A file for each pack, in a folder of the workspace's state, every chunk at its own offset. Bounded,
and removed when the run ends. Chunks are kept as they are stored: sealed if they are sealed there.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import threading
from pathlib import Path

from torpor.shared.codecs.codec import Buffer
from torpor.shared.transfer.transfer import GAP_BYTES


class KeptPacks:
    """At most ``most_bytes`` in ``folder``. Thread-safe."""

    def __init__(self, folder: Path, most_bytes: int) -> None:
        self._folder = folder
        self._room = most_bytes
        self._lock = threading.Lock()
        self._runs: dict[bytes, dict[int, int]] = {}  # by pack: where a chunk begins and ends
        folder.mkdir(mode=0o700)

    def keep(self, pack: bytes, offset: int, stored: Buffer) -> None:
        """Keep one verified chunk, while there is room. A full disk only ends the keeping."""
        with self._lock:
            if offset in self._runs.get(pack, {}) or len(stored) > self._room:
                return
            self._room -= len(stored)
        try:
            fd = os.open(self._path(pack), os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                written = os.pwrite(fd, stored, offset)
            finally:
                os.close(fd)
        except OSError:
            written = 0
        with self._lock:
            if written < len(stored):
                self._room = 0
                return
            self._runs.setdefault(pack, {})[offset] = offset + len(stored)

    def holds(self, pack: bytes, offset: int) -> bool:
        """Whether the chunk at that offset is kept."""
        with self._lock:
            return offset in self._runs.get(pack, {})

    def open(self, pack: bytes, start: int, end: int) -> int | None:
        """A descriptor to read those bytes from, or None if some are not kept. Gaps of at most
        GAP_BYTES between chunks count as kept: a reader fetches them but does not use them."""
        with self._lock:
            runs = sorted(self._runs.get(pack, {}).items())
        at = start
        for begin, finish in runs:
            if finish > at and begin <= at + GAP_BYTES:
                at = finish
        if at < end or start >= end:
            return None
        try:
            return os.open(self._path(pack), os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            return None

    def remove(self) -> None:
        """Forget and delete everything. Idempotent."""
        with self._lock:
            self._room = 0
            self._runs.clear()
        with contextlib.suppress(OSError):
            shutil.rmtree(self._folder)

    def _path(self, pack: bytes) -> Path:
        return self._folder / pack.hex()
