"""What a machine's agent does for a benchmark: content to measure with, and its line to a store."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence

from torpor.control.remote.seam import Agent
from torpor.shared.transfer.line import Moved
from torpor.shared.values import Grant
from torpor.shared.wire.machine import MakeContent, MeasureLine, RemoveContent


def make_content(agent: Agent, name: str, total_bytes: int, seed: int) -> None:
    """Make ``path_of(name)`` again on the machine; the same seed gives the same content."""
    agent.call(MakeContent(name, total_bytes, seed), request_id=_request_id("content"))


def remove_content(agent: Agent, name: str, *, place_too: bool = False) -> None:
    """Remove it from the machine, if it is there; ``place_too``: also its parent folder."""
    agent.call(RemoveContent(name, place_too), request_id=_request_id("content"))


def line_of(
    agent: Agent, authority: str
) -> Callable[[Sequence[Grant], Sequence[Grant], int, int], Moved]:
    """A function that moves random bytes between the machine and a store of that ``authority``, and
    times it."""

    def move(
        puts: Sequence[Grant], gets: Sequence[Grant], object_bytes: int, connections: int
    ) -> Moved:
        batch = MeasureLine(list(puts), list(gets), object_bytes, connections, authority)
        rate = agent.call(batch, request_id=_request_id("line"))
        return Moved(rate.up_s, rate.down_s)

    return move


def _request_id(what: str) -> str:
    return f"{what}-{secrets.token_hex(8)}"
