"""The interface of a codec."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torpor.shared.codecs.layout import Run
from torpor.shared.codecs.memory import Memory

Buffer = bytes | bytearray | memoryview


class Codec(Protocol):
    """The codec of one encoding of docs/format.md. Thread-safe, and pure: no I/O."""

    @property
    def name(self) -> str: ...

    @property
    def code(self) -> int:
        """The number in the manifest."""

    def encode(self, plain: Buffer, runs: Sequence[Run] = (), /) -> Buffer | None:
        """The stored form, which may be longer than ``plain``; None when nothing is gained.

        ``runs`` cover ``plain`` exactly; a codec that needs no layout does not look at them.
        """

    def decode(self, stored: Buffer, plain_bytes: int, into: Memory | None = None, /) -> Buffer:
        """Exactly ``plain_bytes`` bytes, or SnapshotDamaged. Never allocates more than that.

        They may lie in ``stored``, or in memory that ``into`` has lent.
        """
