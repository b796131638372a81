"""The encodings that a manifest may name: one row each, and nothing else may stand in a snapshot.

What reads chunks, the checks of manifests, the benchmarks and the table in docs/format.md follow
these rows. Every encoding is decoded on any machine, without a GPU.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final, Literal, NamedTuple

from torpor.shared.codecs.codec import Buffer, Codec
from torpor.shared.codecs.memory import Memory
from torpor.shared.codecs.planes import PLANES, RANS
from torpor.shared.codecs.stock import LZ4, RAW, ZSTD
from torpor.shared.errors import SnapshotDamaged


class Encoding(NamedTuple):
    """A codec, and who writes it. ``needs_layout``: only chunks of numbers gain from it."""

    codec: Codec
    needs_layout: bool
    written_by: Literal["CPU", "GPU"]

    @property
    def code(self) -> int:
        return self.codec.code

    @property
    def name(self) -> str:
        return self.codec.name


_ROWS: Final = (
    Encoding(RAW, needs_layout=False, written_by="CPU"),
    Encoding(LZ4, needs_layout=False, written_by="CPU"),
    Encoding(ZSTD, needs_layout=False, written_by="CPU"),
    Encoding(PLANES, needs_layout=True, written_by="CPU"),
    Encoding(RANS, needs_layout=True, written_by="GPU"),
)

ENCODINGS: Final[Mapping[int, Encoding]] = MappingProxyType({row.code: row for row in _ROWS})
"""Each encoding by its code in the manifest."""


def is_of_gpu(code: int) -> bool:
    """Whether a GPU wrote chunks of this encoding, and reads them faster than a CPU."""
    return code in ENCODINGS and ENCODINGS[code].written_by == "GPU"


def decode_chunk(code: int, stored: Buffer, plain_bytes: int, into: Memory | None = None) -> Buffer:
    """The plain bytes, or SnapshotDamaged; see Codec.decode."""
    encoding = ENCODINGS.get(code)
    if encoding is None:
        raise SnapshotDamaged(f"a chunk has unknown encoding {code}: use a newer torpor")
    return encoding.codec.decode(stored, plain_bytes, into)
