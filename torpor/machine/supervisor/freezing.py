"""Whether the time that a market leaves is long enough to freeze a job's command and to store the
images."""

from __future__ import annotations

from typing import Final

import msgspec

DUMP_BYTES_S: Final = 100e6
"""Assumed bytes a second of a slow disk, to which images are written."""
UPLOAD_BYTES_S: Final = 30e6
"""Assumed bytes a second of storing, where the save before moved too little to measure it."""
LEAST_BYTES: Final = 4 << 20
"""The least bytes that a save must move to show how fast the machine stores."""
FIXED_S: Final = 3.0
"""Seconds for the walks, the manifest, and a look at the GPUs."""
MARGIN: Final = 1.5
NOTICES: Final = frozenset({"aws-spot", "gcp", "azure"})
"""Kinds of notice after which the command runs on for a while. After others, the machine shuts down
and ends the command, too: a frozen command would go on elsewhere with its own end."""


class Freeze(msgspec.Struct, frozen=True):
    """How the command of ``job`` is frozen: into the folder ``images``, by the CRIU in the folder
    ``criu``."""

    job: str
    images: str
    criu: str


def why_too_late(held_bytes: int, stored_bytes_s: float, left_s: float) -> str:
    """Why a process tree with this much memory cannot be frozen in the time that is left; empty if
    it can. ``stored_bytes_s``: how fast the last save stored, 0 where that is not known."""
    moved_s = held_bytes / DUMP_BYTES_S + held_bytes / (stored_bytes_s or UPLOAD_BYTES_S)
    needs_s = FIXED_S + MARGIN * moved_s
    if needs_s <= left_s:
        return ""
    return (
        f"it holds {held_bytes:,} bytes of memory, which take about {needs_s:.0f} s to freeze and "
        f"to store, and {max(0.0, left_s):.0f} s are left"
    )
