"""The operations of docs/agent-protocol.md: parse, call, answer."""

from __future__ import annotations

import os
import shutil
from typing import Any

import msgspec

from torpor.machine.agent.environment import record_environment
from torpor.machine.agent.examine import ExamineRequest, examine
from torpor.machine.agent.requests import checked, parsed
from torpor.machine.agent.restore_operations import restore_operations
from torpor.machine.agent.runs import RunRegistry
from torpor.machine.agent.snapshot_operations import snapshot_operations
from torpor.machine.agent.sync_operations import sync_operations
from torpor.machine.tree.walk import absolute_root
from torpor.shared import content
from torpor.shared.transfer import line
from torpor.shared.values import Grant
from torpor.shared.wire.protocol import Call, Operation


class _Probe(msgspec.Struct):
    roots: list[str]


class _MakeContent(msgspec.Struct):
    name: str
    bytes: int
    seed: int


class _RemoveContent(msgspec.Struct):
    name: str
    place_too: bool


class _Line(msgspec.Struct):
    puts: list[Grant]
    gets: list[Grant]
    object_bytes: int
    connections: int


def operations(runs: RunRegistry) -> dict[str, Operation]:
    """The agent's table of operations over ``runs``."""
    return {
        "probe": parsed(_Probe, _probe),
        "content.make": parsed(_MakeContent, _make_content),
        "content.remove": parsed(_RemoveContent, _remove_content),
        "line": parsed(_Line, _line),
        "verify.packs": parsed(ExamineRequest, lambda args, call: examine(args, call, runs)),
        **snapshot_operations(runs),
        **restore_operations(runs),
        **sync_operations(runs),
    }


def _probe(args: _Probe, call: Call) -> dict[str, Any]:
    """What is at each root, how much space is left, and what the machine is."""
    roots = []
    for root in args.roots:
        path = absolute_root(root)
        roots.append({"path": root, "absolute": path, **_kind(path)})
    return {
        "roots": roots,
        "disk_free_bytes": shutil.disk_usage(os.path.expanduser("~")).free,
        "environment": record_environment(),
    }


def _make_content(args: _MakeContent, call: Call) -> dict[str, Any]:
    return content.make(args.name, args.bytes, args.seed, call.check)._asdict()


def _remove_content(args: _RemoveContent, call: Call) -> dict[str, Any]:
    content.remove(args.name, place_too=args.place_too)
    return {}


def _line(args: _Line, call: Call) -> dict[str, Any]:
    puts = [checked(grant) for grant in args.puts]
    gets = [checked(grant) for grant in args.gets]
    return line.move(puts, gets, args.object_bytes, args.connections, call.cancelled)._asdict()


def _kind(path: str) -> dict[str, Any]:
    try:
        if not os.path.isdir(path):
            return {"kind": "file" if os.path.lexists(path) else "missing", "empty": False}
        with os.scandir(path) as names:
            return {"kind": "directory", "empty": next(names, None) is None}
    except PermissionError:
        return {"kind": "unreadable", "empty": False}
