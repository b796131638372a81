"""Packs that this machine has stored and no manifest names yet.

Appended to after each pack that the store confirmed, so that work survives the agent: after a
crash files are read and hashed again, and what is in the store already is not sent again.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import msgspec
from blake3 import blake3

from torpor.machine.pipeline.chunks import Located
from torpor.shared.format.manifest import Pack
from torpor.shared.values import learned

MAX_AGE_S: Final = 24 * 3600
"""Older packs are not used: prune may delete packs that no manifest named for three days."""

_DIGEST = 16


class Record(msgspec.Struct, frozen=True, array_like=True):
    """One pack and its chunks."""

    pack: Pack
    located: list[Located]
    stored_unix: float


class Journal:
    """An append-only file; a torn or damaged tail is dropped. Thread-safe."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = threading.Lock()

    def append(self, pack: Pack, located: Sequence[Located]) -> None:
        body = msgspec.msgpack.encode(Record(pack, list(located), time.time()))
        frame = len(body).to_bytes(4, "little") + blake3(body).digest(length=_DIGEST) + body
        with self._lock:
            fd = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                os.write(fd, frame)
            finally:
                os.close(fd)

    def read(self) -> list[Record]:
        """Every whole record that is young enough; cuts a torn tail off the file."""
        try:
            data = self._path.read_bytes()
        except FileNotFoundError:
            return []
        records = []
        at = 0
        decoder = msgspec.msgpack.Decoder(learned(Record))
        oldest = time.time() - MAX_AGE_S
        while at + 4 + _DIGEST <= len(data):
            length = int.from_bytes(data[at : at + 4], "little")
            digest = data[at + 4 : at + 4 + _DIGEST]
            body = data[at + 4 + _DIGEST : at + 4 + _DIGEST + length]
            if len(body) < length or blake3(body).digest(length=_DIGEST) != digest:
                break  # half-written or damaged: do not trust the rest
            record = decoder.decode(body)
            if record.stored_unix >= oldest:
                records.append(record)
            at += 4 + _DIGEST + length
        if at < len(data):
            os.truncate(self._path, at)
        return records

    def clear(self) -> None:
        """Empty the journal: a manifest names everything, or the machine starts again."""
        self._path.unlink(missing_ok=True)
