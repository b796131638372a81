"""Memory that is used again, for buffers of which one thread needs one at a time."""

from __future__ import annotations

from collections.abc import Callable

Memory = Callable[[int], memoryview]
"""Lends a writable buffer of at least so many bytes, with any content."""


class ReusedMemory:
    """Lends the same memory for each buffer, until the next is asked for. Not thread-safe.

    Python clears a new ``bytearray`` and lets no other thread run meanwhile: 28 % of the time in
    which the threads of a restore held the interpreter's lock.
    """

    def __init__(self) -> None:
        self._held = bytearray()

    def __call__(self, size: int) -> memoryview:
        if len(self._held) < size:
            self._held = bytearray(size)
        return memoryview(self._held)
