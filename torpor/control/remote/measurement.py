"""Lines and encodings, as a machine's agent measures them."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence

from torpor.control.remote.agent import Agent
from torpor.shared.transfer.throughput import Moved
from torpor.shared.values import GpuUse, Grant
from torpor.shared.wire.machine import Encodings, MeasureEncodings, MeasureThroughput


def line_of(
    agent: Agent, authority: str
) -> Callable[[Sequence[Grant], Sequence[Grant], int, int], Moved]:
    """A function that moves random bytes between the machine and a store of that ``authority``, and
    times it."""

    def move(
        puts: Sequence[Grant], gets: Sequence[Grant], object_bytes: int, connections: int
    ) -> Moved:
        batch = MeasureThroughput(list(puts), list(gets), object_bytes, connections, authority)
        rate = agent.call(batch, request_id=_request_id("line"))
        return Moved(rate.up_s, rate.down_s)

    return move


def encodings_of(agent: Agent, content_bytes: int, rounds: int, gpu: GpuUse) -> Encodings:
    """Every encoding of the format on the built-in content, on the machine's cores and its GPU."""
    asked = MeasureEncodings(content_bytes, rounds, secrets.randbits(31), gpu)
    return agent.call(asked, request_id=_request_id("encodings"))


def _request_id(what: str) -> str:
    return f"{what}-{secrets.token_hex(8)}"
