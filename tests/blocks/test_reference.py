"""How blocks are looked up."""

from __future__ import annotations

from typing import Any, Self

import pytest
from prefect.blocks.core import Block

from blocks.reference import load_named, loading_once
from torpor.shared.errors import InvalidInput


class Counted(Block):
    """A block of a server that counts how often it is asked."""

    text: str = ""

    @classmethod
    def load(cls, name: str, *told: Any, **more: Any) -> Self:
        asked.append(name)
        if name == "gone":
            raise ValueError("the server says no")
        return cls(text=name)


asked: list[str] = []


def test_a_block_that_many_name_is_asked_for_once_in_a_look() -> None:
    asked.clear()
    with loading_once():
        assert [load_named(Counted, "a", of="test").text for _ in range(3)] == ["a"] * 3
        for _ in range(2):
            with pytest.raises(InvalidInput, match="the server says no"):
                load_named(Counted, "gone", of="test")
    load_named(Counted, "a", of="test")
    assert asked == ["a", "gone", "gone", "a"]
