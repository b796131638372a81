"""The operations of a restore, of a whole snapshot or of one path (docs/agent-protocol.md)."""

from __future__ import annotations

from typing import Any

from torpor.machine.agent.paths import PathRun
from torpor.machine.agent.peers import PeerGrant
from torpor.machine.agent.requests import (
    Check,
    FetchPart,
    OfRun,
    OfSnapshot,
    checked,
    key_of,
    parsed,
)
from torpor.machine.agent.restore import RestoreRun
from torpor.machine.agent.runs import RunRegistry
from torpor.shared.format.sizes import PART_BYTES
from torpor.shared.wire.protocol import Call, Operation


class _Begin(OfSnapshot):
    roots: list[str] | None
    max_parts: int
    part_bytes: int = PART_BYTES
    resume: bool = False


class _Path(OfSnapshot):
    root_number: int
    path: str  # hexadecimal: a name may be any bytes
    into: str
    aside: bool
    max_parts: int
    part_bytes: int


class _Part(FetchPart):
    peer: PeerGrant | None = None


class _Serve(OfRun):
    host: str
    most_bytes: int


def restore_operations(runs: RunRegistry) -> dict[str, Operation]:
    """The agent's table of operations over ``runs``, as far as restores go."""

    def begin(args: _Begin, call: Call) -> dict[str, Any]:
        run, _ = runs.add(RestoreRun, args.run, args.workspace)
        with run.starting(call):
            return run.begin(
                args.wanted(),
                key_of(args.key),
                args.roots,
                args.max_parts,
                args.part_bytes,
                args.resume,
                call,
            )

    def path(args: _Path, call: Call) -> dict[str, Any]:
        run, _ = runs.add(PathRun, args.run, args.workspace)
        with run.starting(call):
            return run.begin_path(
                args.wanted(),
                key_of(args.key),
                (args.root_number, bytes.fromhex(args.path)),
                args.into,
                args.aside,
                args.max_parts,
                args.part_bytes,
                call,
            )

    def part(args: _Part, call: Call) -> dict[str, Any]:
        run = runs.get(RestoreRun, args.run)
        with run.serving(call), run.writing(call), runs.worker(lambda: run.check(call)):
            return run.part(args.part, [checked(g) for g in args.packs], args.peer, call)

    def serve(args: _Serve, call: Call) -> dict[str, Any]:
        run = runs.get(RestoreRun, args.run)
        with run.serving(call):
            return run.serve(args.host, args.most_bytes)

    def finish(args: OfRun, call: Call) -> dict[str, Any]:
        run = runs.get(RestoreRun, args.run)
        with run.serving(call), run.written(call):
            return run.finish()

    def check(args: Check, call: Call) -> dict[str, Any]:
        run = runs.get(RestoreRun, args.run)
        with run.serving(call), run.written(call):
            return run.compare(args.full, call)

    def end(args: OfRun, call: Call) -> dict[str, Any]:
        run = runs.get(RestoreRun, args.run)
        with run.serving(call):
            run.end("finished")
        return {}

    return {
        "restore.begin": parsed(_Begin, begin),
        "restore.path": parsed(_Path, path),
        "restore.part": parsed(_Part, part),
        "restore.serve": parsed(_Serve, serve),
        "restore.finish": parsed(OfRun, finish),
        "restore.check": parsed(Check, check),
        "restore.end": parsed(OfRun, end),
    }
