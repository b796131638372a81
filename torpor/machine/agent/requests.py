"""From a request's JSON to typed arguments."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import msgspec

from torpor.machine.agent.manifests import Wanted
from torpor.shared.errors import InvalidInput
from torpor.shared.values import Grant, SnapshotId, WorkspaceName, object_key
from torpor.shared.wire.protocol import Call, Operation

A = TypeVar("A", bound=msgspec.Struct)


class OfRun(msgspec.Struct):
    """Asks for something of a run that has begun."""

    run: str


class Check(OfRun):
    """Compare what was written; ``full``: every byte."""

    full: bool


class FetchPart(OfRun):
    """Fetch what the packs hold."""

    part: int
    packs: list[Grant]


class OfSnapshot(OfRun):
    """Begins a run that brings a snapshot, or some of it, onto this machine. ``root`` and ``key``
    in hexadecimal."""

    workspace: WorkspaceName
    snapshot: SnapshotId
    root: str
    grant: Grant
    manifest_bytes: int
    key: str | None

    def wanted(self) -> Wanted:
        return Wanted(
            self.workspace,
            self.snapshot,
            bytes.fromhex(self.root),
            checked(self.grant),
            self.manifest_bytes,
        )


def parsed(kind: type[A], serve: Callable[[A, Call], dict[str, Any]]) -> Operation:
    """An operation whose arguments are a ``kind``; InvalidInput where they are not."""

    def operation(args: dict[str, Any], call: Call) -> dict[str, Any]:
        try:
            typed = msgspec.convert(args, kind)
        except msgspec.ValidationError as exc:
            raise InvalidInput(f"a request does not fit the agent's protocol: {exc}") from None
        return serve(typed, call)

    return operation


def checked(grant: Grant) -> Grant:
    """A grant for an object that torpor writes or reads; InvalidInput for any other."""
    object_key(grant.key)
    return grant


def key_of(text: str | None) -> bytes | None:
    """The workspace's key, where the store has one."""
    return None if text is None else bytes.fromhex(text)
