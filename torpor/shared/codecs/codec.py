"""What an encoding is."""

from __future__ import annotations

from typing import Protocol

Buffer = bytes | bytearray | memoryview


class Codec(Protocol):
    """One encoding of docs/format.md. Thread-safe, and pure: no I/O."""

    @property
    def name(self) -> str: ...

    @property
    def code(self) -> int:
        """The number in the manifest."""

    def encode(self, plain: Buffer) -> Buffer:
        """The stored form, which may be longer than ``plain``; the caller then stores raw."""

    def decode(self, stored: Buffer, plain_bytes: int) -> Buffer:
        """Exactly ``plain_bytes`` bytes, or SnapshotDamaged. Never allocates more than that."""
