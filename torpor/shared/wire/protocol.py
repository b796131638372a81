"""The lines between control side and agent, without any I/O.

See docs/contributing/agent-protocol.md.
"""

from __future__ import annotations

import hashlib
import json
from typing import Any, Final

import msgspec

from torpor.shared.errors import InvalidInput
from torpor.shared.values import MIB, learned
from torpor.shared.wire.request import Event, Request

PROTOCOL: Final = 1
MAX_LINE_BYTES: Final = 16 * MIB
MAX_VALUES: Final = 1_000_000
"""The most values in one line of a machine: they take at most 0.3 GiB of memory, where the line has
16 MiB. The longest line that an agent sends, 4.5 hours of sampler figures, has 250,000 values."""
MAX_ID_CHARS: Final = 200
EVENTS_PER_S: Final = 4
PING_S: Final = 15.0
"""How often an idle control side sends ``{"ping": true}``."""
SILENCE_S: Final = 90.0
"""A control side that was silent for this long is gone, whatever TCP reports."""


class Envelope(msgspec.Struct, frozen=True):
    """A received request; ``digest`` is the SHA-256 of its line."""

    id: str
    op: str
    args: dict[str, Any]
    digest: str

    def __repr__(self) -> str:
        """Without the arguments: they may hold grants and keys."""
        return f"Envelope({self.op} {self.id})"


class Cancel(msgspec.Struct, frozen=True):
    """Ask the agent to end a request with RunCancelled."""

    id: str


class Ping(msgspec.Struct, frozen=True):
    """Tells the agent that the control side is still connected."""


class Hello(msgspec.Struct, frozen=True):
    """The agent's first line. ``busy``: a run is active, so this agent must not be replaced."""

    protocol: int
    agent: str
    machine: str
    clock_unix: float
    busy: bool


class Said(msgspec.Struct, frozen=True, omit_defaults=True):
    """One line from the agent: a hello, a pong, or a request's event, result or error. An error
    without an id ends the connection, or says why no agent can be reached."""

    id: str | None = None
    hello: Hello | None = None
    event: Event | None = None
    result: Any = None
    error: dict[str, str] | None = None
    pong: bool = False


def parse_line(line: bytes) -> Envelope | Cancel | Ping:
    """Parse a control side's line; InvalidInput, without the line in it, if it is malformed."""
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
    return Envelope(_request_id(message.get("id")), op, args, hashlib.sha256(line).hexdigest())


def parse_said(line: bytes) -> Said | None:
    """Parse an agent's line; None for a line that is no message, such as a login shell's."""
    try:
        return msgspec.convert(parse_json(line), learned(Said))
    except ValueError:  # a ValidationError is a ValueError
        return None


def parse_json(text: bytes) -> Any:
    """JSON that a machine sent; ValueError where it is none, holds more than MAX_VALUES values, or
    is nested too deeply."""
    values = sum(map(text.count, (b",", b"[", b"{")))
    if values > MAX_VALUES:
        raise ValueError(f"JSON of more than {MAX_VALUES} values")
    try:
        return json.loads(text, parse_constant=_no_number)
    except RecursionError:
        raise ValueError("JSON that is nested too deeply") from None


def _no_number(text: str) -> float:
    raise ValueError(f"{text} is no number in JSON")


def request_line(request_id: str, request: Request[Any]) -> bytes:
    """A request as a line; InvalidInput if it is longer than MAX_LINE_BYTES."""
    return encode_line({"id": request_id, "op": request.op, "args": request})


def cancel_line(request_id: str) -> bytes:
    return encode_line({"cancel": request_id})


PING_LINE: Final = b'{"ping":true}\n'


def encode_line(message: dict[str, Any] | Said) -> bytes:
    """A message as a line; InvalidInput if it is longer than MAX_LINE_BYTES or not JSON.

    Names on a disk may be any bytes: the text of a path may hold lone surrogates, which only the
    standard library's JSON writes and reads.
    """
    try:
        plain = msgspec.to_builtins(message)
        text = json.dumps(plain, separators=(",", ":"), allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidInput(f"a message cannot be written as JSON: {type(error).__name__}") from None
    line = text.encode("utf-8", "surrogatepass") + b"\n"
    if len(line) > MAX_LINE_BYTES:
        raise InvalidInput(
            f"a message of {len(line)} bytes is over the limit of {MAX_LINE_BYTES} bytes a line"
        )
    return line


def _request_id(value: object) -> str:
    if not isinstance(value, str) or not 0 < len(value) <= MAX_ID_CHARS:
        raise InvalidInput(f"a request's id must be text of 1 to {MAX_ID_CHARS} characters")
    return value
