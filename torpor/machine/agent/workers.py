"""How many parts an agent works at the same time."""

from __future__ import annotations

import os
from typing import Final

from torpor.machine.agent.memory_room import Room
from torpor.shared.format.sizes import CHUNK_BYTES, PACK_BYTES
from torpor.shared.values import MIB

WORKERS: Final = max(4, min(8, 2 * (os.cpu_count() or 1)))
"""Parts worked at the same time. Each holds at most a pack (64 MiB) and three chunks: 8 of them
stay under 0.75 GiB, and their connections fill what one connection cannot. Two for each core:
what two cores encode, four connections carry, and more would only hold memory."""
_BASE_BYTES: Final = 128 * MIB
"""What an agent holds before its first part, with the names of some ten thousand files."""
_WORKER_BYTES: Final = PACK_BYTES + 4 * CHUNK_BYTES


def workers_in(found: Room | None) -> int:
    """How many parts may be worked at the same time, at least one."""
    if found is None:
        return WORKERS
    return max(1, min(WORKERS, (found.left - _BASE_BYTES) // _WORKER_BYTES))
