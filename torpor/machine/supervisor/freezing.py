"""Whether the time that a market leaves suffices to freeze a job's command and to store that."""

from __future__ import annotations

from typing import Final

import msgspec

DUMP_BYTES_S: Final = 100e6
"""A slow disk that images are written to."""
UPLOAD_BYTES_S: Final = 30e6
"""Where the save before it moved too little to say."""
LEAST_BYTES: Final = 4 << 20
"""What a save must move to say how fast the machine stores."""
FIXED_S: Final = 3.0
"""For the walks, the manifest, and a look at the GPUs."""
MARGIN: Final = 1.5
NOTICES: Final = frozenset({"aws-spot", "gcp", "azure"})
"""Those after which the command runs on for a while: where the machine shuts down, the command is
being ended as well, and would go on elsewhere with its own end."""


class Freeze(msgspec.Struct, frozen=True):
    """How the command of ``job`` is frozen: into the folder ``images``, by the CRIU in the folder
    ``criu``."""

    job: str
    images: str
    criu: str


def why_too_late(held_bytes: int, stored_bytes_s: float, left_s: float) -> str:
    """Why a tree that holds so much memory is not frozen in the time that is left; empty where it
    is. ``stored_bytes_s``: how fast the last save stored, 0 where that is not known."""
    moved_s = held_bytes / DUMP_BYTES_S + held_bytes / (stored_bytes_s or UPLOAD_BYTES_S)
    needs_s = FIXED_S + MARGIN * moved_s
    if needs_s <= left_s:
        return ""
    return (
        f"it holds {held_bytes:,} bytes of memory, which take about {needs_s:.0f} s to freeze and "
        f"to store, and {max(0.0, left_s):.0f} s are left"
    )
