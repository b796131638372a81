"""How a writer cuts and shares out content. A reader depends on none of these sizes."""

from __future__ import annotations

from typing import Final

from torpor.shared.format.keys import SEAL_BYTES
from torpor.shared.values import MIB

BIG_FILE_BYTES: Final = 1 * MIB
CHUNK_BYTES: Final = 4 * MIB
"""Big files are cut at multiples of this size: large enough that the work for each chunk is
negligible, small enough that a small change costs little and eight workers hold under 200 MiB
besides their packs."""
GROUP_BYTES: Final = 4 * MIB
"""Small files share chunks up to this size, which is the most that fetching one changed small file
costs."""
PART_BYTES: Final = 64 * MIB
"""The default smallest part: below about one pack, a part is not worth a task run."""
PACK_BYTES: Final = 64 * MIB
"""The most bytes of a pack. So 100 GB make fewer than 2,000 objects, and each part at work holds
one pack in memory."""


def packs_needed(plain_bytes: int) -> int:
    """The most packs that a part of ``plain_bytes`` makes: if no chunk is known or compresses."""
    fullest = PACK_BYTES - CHUNK_BYTES - SEAL_BYTES  # a pack closed early is at least this full
    return -(-plain_bytes // fullest) + 1
