"""What every request of the agent has in common (docs/contributing/agent-protocol.md)."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Final, Generic, TypeVar, get_args

import msgspec

from torpor.shared.errors import InvalidInput, MachineError
from torpor.shared.values import Away, SnapshotId, WorkspaceName, learned

MOST: Final = 1 << 53
"""The highest count, size or offset that a machine may send: a float holds it exactly."""
Count = Annotated[int, msgspec.Meta(ge=0, le=MOST)]
Snapshot = Annotated[SnapshotId, msgspec.Meta(pattern=r"\A\d{8}T\d{6}Z-[0-9a-f]{8}\Z")]
"""The name of a snapshot, sent by a machine."""
Words = Annotated[str, msgspec.Meta(max_length=300_000)]
"""Text for people, sent by a machine: long enough for the longest path with each byte escaped."""
Names = Annotated[list[Words], msgspec.Meta(max_length=100)]
"""The first names of many. An agent sends at most 21; 100 are accepted."""

A = TypeVar("A")
Q = TypeVar("Q", bound="Request[Any]")


class Request(msgspec.Struct, Generic[A], frozen=True):
    """One operation of the agent: its arguments as fields, its answer's type as ``A``.

    Each operation is a direct subclass that sets ``op`` and names its answer in its base:
    ``class StorePasses(OfRun[PassesOutcome])``.
    """

    op: ClassVar[str] = ""

    def __repr__(self) -> str:
        """Without the arguments: they may hold grants and keys."""
        return f"{type(self).__name__}()"

    @classmethod
    def answer_type(cls) -> type[A]:
        answer: type[A] = get_args(vars(cls)["__orig_bases__"][0])[0]
        return answer


class OfRun(Request[A], Generic[A], frozen=True):
    """A request that belongs to a run."""

    run: str


class BeginsRun(OfRun[A], Generic[A], frozen=True):
    """A request that begins a run, which holds the workspace on the machine. ``authority``: the
    certificates (PEM) of the authorities that its store needs beside the public ones."""

    workspace: WorkspaceName
    authority: str


class Nothing(msgspec.Struct, frozen=True):
    """An answer without fields."""


class Event(msgspec.Struct, frozen=True):
    """Progress of a request: how many plain bytes it has moved so far. ``away``: the request waits
    for its store. ``pass_number``: the number of its pass over the workspace, from 1; ``total``:
    the bytes that the pass stores, 0 while it only looks for them."""

    bytes: Count
    away: Away | None = None
    pass_number: Count = 0
    total: Count = 0


def parse_request(kind: type[Q], args: dict[str, Any]) -> Q:
    """Typed arguments; InvalidInput if they do not fit. Ignores unknown fields."""
    try:
        request: Q = msgspec.convert(args, learned(kind))
    except msgspec.ValidationError as error:
        raise InvalidInput(f"{kind.op} does not fit the agent's protocol: {error}") from None
    return request


def parse_answer(kind: type[Request[A]], result: dict[str, Any]) -> A:
    """A typed answer; MachineError if it does not fit. Ignores unknown fields."""
    try:
        return msgspec.convert(result, learned(kind.answer_type()))
    except msgspec.ValidationError as error:
        raise MachineError(
            f"the answer to {kind.op} does not fit the agent's protocol: {error}"
        ) from None
