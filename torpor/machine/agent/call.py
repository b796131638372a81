"""How the agent serves a request: what a handler gets, and the table of handlers."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol, TypeVar

import msgspec

from torpor.shared.errors import InvalidInput, RunCancelled
from torpor.shared.wire.protocol import EVENTS_PER_S
from torpor.shared.wire.request import Event, Request, parse_request

A = TypeVar("A", bound=msgspec.Struct)
Q = TypeVar("Q", bound=Request[Any])


class Call:
    """A request with its arguments, and the ways to answer it, for its handler. Thread-safe."""

    def __init__(self, request_id: str, home: Path, send: Callable[[Event], None]) -> None:
        self.request_id = request_id
        self.home = home
        self._send = send
        self._cancelled = threading.Event()
        self._lock = threading.Lock()
        self._emitted_at = -1.0

    def emit(self, event: Event) -> None:
        """Report progress. Sends at most EVENTS_PER_S a second, drops the others, and never waits
        for a reader."""
        now = time.monotonic()
        with self._lock:
            if self._emitted_at >= 0 and now - self._emitted_at < 1 / EVENTS_PER_S:
                return
            self._emitted_at = now
        self._send(event)

    def say(self, event: Event) -> None:
        """Report an event that is rare and must not be dropped. Never waits for a reader,
        either."""
        self._send(event)

    def moved(self, size: int) -> None:
        """Report how many plain bytes the request has moved so far."""
        self.emit(Event(size))

    def cancel(self) -> None:
        self._cancelled.set()

    def pause(self, seconds: float) -> None:
        """Wait; raise RunCancelled if the request is cancelled meanwhile."""
        self._cancelled.wait(seconds)
        self.check()

    def cancelled(self) -> bool:
        return self._cancelled.is_set()

    def check(self) -> None:
        """Raise RunCancelled if the request was cancelled."""
        if self._cancelled.is_set():
            raise RunCancelled(f"request {self.request_id} was cancelled")


class Operations:
    """The agent's table: which handler serves which type of request."""

    def __init__(self) -> None:
        self._kinds: dict[str, type[Request[Any]]] = {}
        self._handlers: dict[type[Request[Any]], Callable[[Any, Call], Any]] = {}

    def add(self, kind: type[Q], handler: Callable[[Q, Call], msgspec.Struct]) -> None:
        self._kinds[kind.op] = kind
        self._handlers[kind] = handler

    def parse(self, op: str, args: dict[str, Any]) -> Request[Any]:
        """A request as its type; InvalidInput for an unknown operation or arguments that do not
        fit."""
        kind = self._kinds.get(op)
        if kind is None:
            raise InvalidInput(f"this agent knows no operation {op[:80]!r}")
        return parse_request(kind, args)

    def serve(self, request: Request[A], call: Call) -> A:
        answer: A = self._handlers[type(request)](request, call)
        return answer


class Runs(Protocol):
    """What the daemon needs to know about the agent's runs. Thread-safe."""

    def active(self) -> bool:
        """Whether a run holds a workspace now."""

    def abandon(self, run: str, reason: str) -> None:
        """End a run that lost its control side. Returns soon; a run that has ended is fine."""

    def close(self) -> None:
        """End all runs: the agent leaves."""
