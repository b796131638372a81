"""A machine's agent, as the control side talks to it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, TypeVar

from torpor.shared.wire.protocol import Hello
from torpor.shared.wire.request import Event, Request

A = TypeVar("A")


class Agent(Protocol):
    """Serves requests, many at once. Thread-safe; a Session is one over SSH."""

    @property
    def hello(self) -> Hello:
        """The agent's latest hello."""

    def call(
        self,
        request: Request[A],
        *,
        request_id: str,
        on_event: Callable[[Event], None] | None = None,
        within_s: float | None = None,
    ) -> A:
        """Ask and wait for the answer; ``on_event`` is called in this thread.

        ``request_id`` names the work: the same id again gets the same answer. Raises the agent's
        error, or AgentLost where the agent stays away, or was attached for ``within_s`` and did not
        answer. Whatever ends the wait without an answer cancels the request.
        """

    def cancel(self, request_id: str) -> None:
        """Ask the agent to end a request; its call then raises RunCancelled. Idempotent."""
