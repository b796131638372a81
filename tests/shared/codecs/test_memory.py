"""Memory that is used again."""

from __future__ import annotations

from torpor.shared.codecs.memory import ReusedMemory


def test_the_same_memory_is_lent_until_a_larger_buffer_is_asked_for() -> None:
    memory = ReusedMemory()
    first = memory(4)
    first[:4] = b"here"
    assert memory(2)[:2] == b"he"
    larger = memory(5)
    larger[:5] = b"other"
    assert first[:4] == b"here"
    assert memory(4)[:5] == b"other"
