"""The memory in which packs are filled."""

from __future__ import annotations

from pathlib import Path

from torpor.machine.pipeline.buffers import PackBuffers
from torpor.shared.values import MIB


def _mapped(size: int) -> int:
    """How many anonymous mappings of this process have room for ``size`` bytes and more."""
    count = 0
    for line in Path("/proc/self/maps").read_text().splitlines():
        first, last = (int(end, 16) for end in line.split()[0].split("-"))
        count += last - first >= size
    return count


def test_a_buffer_is_used_again_and_two_at_once_are_apart() -> None:
    buffers = PackBuffers(MIB)
    with buffers.lent() as first:
        first[:4] = b"here"
        with buffers.lent() as other:
            other[:4] = b"else"
        assert bytes(first[:4]) == b"here"
    with buffers.lent() as again:
        assert bytes(again[:4]) in (b"here", b"else")


def test_memory_is_given_back() -> None:
    size = 600 * MIB
    before = _mapped(size)
    buffers = PackBuffers(size)
    with buffers.lent() as large:
        large[-1] = 1
        assert _mapped(size) == before + 1
    assert _mapped(size) == before + 1  # kept for the next pack
    del large
    buffers.drop()
    assert _mapped(size) == before
