"""Finds full disks of this host."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterable
from pathlib import Path
from typing import Final

from torpor.shared.values import MIB

LEAST_FREE_BYTES: Final = 512 * MIB
"""Free bytes below which a disk counts as full: a database and logs that grow for a week, and
SQLite's own copies, still fit."""
LEAST_FREE_INODES: Final = 1000


def full_disks(folders: Iterable[Path]) -> list[str]:
    """A sentence for each disk that has too little room. Each disk is named once.

    A folder that does not exist counts for the nearest one above it that does.
    """
    said: dict[int, str] = {}
    for folder in folders:
        there = next(place for place in (folder, *folder.parents) if place.exists())
        disk = os.statvfs(there)
        free = disk.f_bavail * disk.f_frsize
        # 0: the file system does not count inodes
        inodes = disk.f_favail if disk.f_files else LEAST_FREE_INODES
        if free < LEAST_FREE_BYTES or inodes < LEAST_FREE_INODES:
            what = f"{free} bytes" if free < LEAST_FREE_BYTES else f"{inodes} inodes"
            least = LEAST_FREE_BYTES if free < LEAST_FREE_BYTES else LEAST_FREE_INODES
            said[there.stat().st_dev] = (
                f"disk full: {there} on {socket.gethostname()} has {what} free, and torpor needs "
                f"{least}: make room on its disk"
            )
    return [*said.values()]
