"""The messages between control side and agent (docs/agent-protocol.md), without any I/O."""

from __future__ import annotations

import hashlib
import json
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Protocol

from torpor.shared.errors import InvalidInput, RunCancelled
from torpor.shared.values import MIB

PROTOCOL: Final = 1
MAX_LINE_BYTES: Final = 16 * MIB
MAX_ID_CHARS: Final = 200
EVENTS_PER_S: Final = 4
PING_S: Final = 15.0
"""How often a control side that has nothing to say says ``{"ping": true}``."""
SILENCE_S: Final = 90.0
"""A peer that was not heard for so long is gone, whatever TCP believes."""


@dataclass(frozen=True)
class Hello:
    """The agent's first line. ``busy``: a run is active, so this agent must not be replaced."""

    protocol: int
    agent: str
    machine: str
    python: str
    platform: str
    cpus: int
    memory_bytes: int
    clock_unix: float
    busy: bool

    def to_wire(self) -> dict[str, Any]:
        return {"hello": dict(vars(self))}

    @staticmethod
    def from_wire(message: Mapping[str, Any]) -> Hello:
        """Parse a hello line; InvalidInput where it is none. Unknown fields are left out."""
        hello = message.get("hello")
        if not isinstance(hello, dict):
            raise InvalidInput("the agent's first line is no hello")
        try:
            return Hello(
                protocol=int(hello["protocol"]),
                agent=str(hello["agent"]),
                machine=str(hello["machine"]),
                python=str(hello["python"]),
                platform=str(hello["platform"]),
                cpus=int(hello["cpus"]),
                memory_bytes=int(hello["memory_bytes"]),
                clock_unix=float(hello["clock_unix"]),
                busy=bool(hello["busy"]),
            )
        except (KeyError, TypeError, ValueError) as error:
            raise InvalidInput(f"the agent's hello does not parse: {error!r}") from error


@dataclass(frozen=True)
class Request:
    """One request. ``args`` may hold grants and keys, so it stays out of the repr."""

    id: str
    op: str
    args: dict[str, Any] = field(repr=False)
    digest: str = field(repr=False)


@dataclass(frozen=True)
class Cancel:
    id: str


@dataclass(frozen=True)
class Ping:
    pass


def parse_line(line: bytes) -> Request | Cancel | Ping:
    """What a control side said; InvalidInput (never with the line in it) where it cannot be."""
    try:
        message = json.loads(line)
    except (ValueError, RecursionError):
        raise InvalidInput(f"a line of {len(line)} bytes is not JSON") from None
    if not isinstance(message, dict):
        raise InvalidInput("a message must be a JSON object")
    if "ping" in message:
        return Ping()
    if "cancel" in message:
        return Cancel(_request_id(message["cancel"]))
    op, args = message.get("op"), message.get("args", {})
    if not isinstance(op, str) or not isinstance(args, dict):
        raise InvalidInput("a request must have `op` (text) and `args` (an object)")
    return Request(_request_id(message.get("id")), op, args, hashlib.sha256(line).hexdigest())


def encode_line(message: Mapping[str, Any]) -> bytes:
    """A message as its line; InvalidInput where it is over MAX_LINE_BYTES or is not JSON."""
    try:
        text = json.dumps(message, separators=(",", ":"), allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidInput(f"a message cannot be written as JSON: {type(error).__name__}") from None
    line = text.encode("utf-8", "surrogatepass") + b"\n"
    if len(line) > MAX_LINE_BYTES:
        raise InvalidInput(
            f"a message of {len(line)} bytes is over the limit of {MAX_LINE_BYTES} bytes a line"
        )
    return line


class Call:
    """What an operation knows of the request that it serves. Every method is thread-safe."""

    def __init__(
        self, request: Request, home: Path, send: Callable[[dict[str, Any]], None]
    ) -> None:
        self.request = request.id
        self.home = home
        self._send = send
        self._cancelled = threading.Event()
        self._lock = threading.Lock()
        self._emitted_at = -1.0

    def emit(self, event: dict[str, Any]) -> None:
        """Report progress. At most EVENTS_PER_S a second go out; the others are dropped, and
        none ever waits for a reader."""
        now = time.monotonic()
        with self._lock:
            if self._emitted_at >= 0 and now - self._emitted_at < 1 / EVENTS_PER_S:
                return
            self._emitted_at = now
        self._send(event)

    def cancel(self) -> None:
        self._cancelled.set()

    def cancelled(self) -> bool:
        return self._cancelled.is_set()

    def check(self) -> None:
        """Raise RunCancelled once somebody asked for the request to end."""
        if self._cancelled.is_set():
            raise RunCancelled(f"request {self.request} was cancelled")


Operation = Callable[[dict[str, Any], Call], dict[str, Any]]
"""Serves one kind of request: the arguments and the call in, the result out (JSON both ways)."""


class Runs(Protocol):
    """The runs that this agent holds, as the daemon needs to know of them. Thread-safe."""

    def active(self) -> bool:
        """Whether a run holds a workspace now."""

    def abandon(self, run: str, reason: str) -> None:
        """End one run: nobody is there to finish it. Returns soon; an ended one is fine."""

    def close(self) -> None:
        """The agent leaves: give everything back."""


def _request_id(value: object) -> str:
    if not isinstance(value, str) or not 0 < len(value) <= MAX_ID_CHARS:
        raise InvalidInput(f"a request's id must be text of 1 to {MAX_ID_CHARS} characters")
    return value
