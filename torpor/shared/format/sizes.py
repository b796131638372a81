"""How a writer cuts and shares out content. A reader depends on none of these sizes."""

from __future__ import annotations

from typing import Final

from torpor.shared.values import MIB

BIG_FILE_BYTES: Final = 1 * MIB
CHUNK_BYTES: Final = 4 * MIB
"""Big files are cut at multiples of this: per-chunk work has disappeared, a small change costs
little, and what eight workers hold besides their packs stays under 200 MiB."""
GROUP_BYTES: Final = 4 * MIB
"""Small files share chunks up to this: what a changed small file costs at most to fetch alone."""
PART_BYTES: Final = 64 * MIB
"""The default smallest part: below about one pack, a part is not worth a task run."""
