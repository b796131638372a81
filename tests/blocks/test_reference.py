"""How blocks are looked up."""

from __future__ import annotations

from typing import Any, Self

import pytest
from prefect.blocks.core import Block

from blocks.reference import load_named, loading_once
from deployments.server import Server
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


class Listed(Block):
    """A block of a real server that must not be asked for by its name."""

    text: str = ""

    @classmethod
    def load(cls, name: str, *told: Any, **more: Any) -> Self:
        raise ValueError(f"{name} was asked for by its name")


def test_all_blocks_of_a_type_are_asked_for_by_one_request(prefect_server: Server) -> None:
    """`torpor status` opens every workspace."""
    for name in ("a", "b"):
        Listed(text=name).save(name, overwrite=True)
    with loading_once(Listed):
        assert [load_named(Listed, name, of="test").text for name in "ab"] == ["a", "b"]
        Listed(text="new").save("b", overwrite=True)
        with loading_once():  # within a look
            assert load_named(Listed, "b", of="test").text == "b"
        with pytest.raises(InvalidInput, match="gone was asked for by its name"):
            load_named(Listed, "gone", of="test")
    with pytest.raises(InvalidInput, match="a was asked for by its name"):
        load_named(Listed, "a", of="test")


def test_a_block_that_many_name_is_asked_for_once_in_a_look() -> None:
    asked.clear()
    with loading_once():
        assert [load_named(Counted, "a", of="test").text for _ in range(3)] == ["a"] * 3
        for _ in range(2):
            with pytest.raises(InvalidInput, match="the server says no"):
                load_named(Counted, "gone", of="test")
    load_named(Counted, "a", of="test")
    assert asked == ["a", "gone", "gone", "a"]
