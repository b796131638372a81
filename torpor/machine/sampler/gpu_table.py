"""The file with the newest figures of each GPU, which the agent reads: ``HOME/gpus.json``.

It is replaced as a whole, so a reader never sees half of one. It is not in the ring: only the
newest figures are asked for, and a lost one costs nothing but a point of a graph.
"""

from __future__ import annotations

import os
import stat
from contextlib import suppress
from pathlib import Path
from typing import Final

import msgspec

from torpor.shared.values import learned
from torpor.shared.wire.activity import GpuTable

GPU_TABLE: Final = "gpus.json"
_MOST_BYTES: Final = 64 * 1024


def write_gpu_table(home: Path, table: GpuTable) -> None:
    """Replace the table. If the disk is full, the earlier table stays and grows old. A pipe or a
    link in the file's place is not written to: a pipe would block the sampler, and a link leads
    elsewhere."""
    fresh = home / f".{GPU_TABLE}"
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    with suppress(OSError):
        fd = os.open(fresh, flags, 0o600)
        with open(fd, "wb") as file:
            file.write(msgspec.json.encode(table))
        os.replace(fresh, home / GPU_TABLE)


def read_gpu_table(home: Path) -> GpuTable | None:
    """The newest table; None where there is none that can be read. Never raises, whatever the file
    is: verdicts on idleness rest on the activity that is read with it."""
    try:
        fd = os.open(home / GPU_TABLE, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        with open(fd, "rb") as file:
            if not stat.S_ISREG(os.fstat(fd).st_mode):  # reading a pipe would block
                return None
            return msgspec.json.decode(file.read(_MOST_BYTES), type=learned(GpuTable))
    except Exception:  # noqa: BLE001 - a table that is nested a thousandfold is a RecursionError
        return None
