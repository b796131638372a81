"""The operations of a sync (docs/agent-protocol.md)."""

from __future__ import annotations

from typing import Any

from torpor.machine.agent.requests import (
    Check,
    FetchPart,
    OfRun,
    OfSnapshot,
    checked,
    key_of,
    parsed,
)
from torpor.machine.agent.runs import RunRegistry
from torpor.machine.agent.sync import SyncRun
from torpor.shared.values import SnapshotId
from torpor.shared.wire.protocol import Call, Operation


class _Begin(OfSnapshot):
    exclude: list[str]
    stored: list[SnapshotId]
    discard_local: bool


class _Stage(OfRun):
    max_parts: int


def sync_operations(runs: RunRegistry) -> dict[str, Operation]:
    """The agent's table of operations over ``runs``, as far as syncs go."""

    def begin(args: _Begin, call: Call) -> dict[str, Any]:
        run, _ = runs.add(SyncRun, args.run, args.workspace)
        with run.starting(call):
            return run.begin(
                args.wanted(), key_of(args.key), args.exclude, args.stored, args.discard_local, call
            )

    def stage(args: _Stage, call: Call) -> dict[str, Any]:
        run = runs.get(SyncRun, args.run)
        with run.serving(call), run.alone(call):
            return run.stage(args.max_parts, call)

    def part(args: FetchPart, call: Call) -> dict[str, Any]:
        run = runs.get(SyncRun, args.run)
        with run.serving(call), run.writing(call), runs.worker(lambda: run.check(call)):
            return run.part(args.part, [checked(grant) for grant in args.packs], call)

    def finish(args: OfRun, call: Call) -> dict[str, Any]:
        run = runs.get(SyncRun, args.run)
        with run.serving(call), run.written(call):
            return run.finish(call)

    def check(args: Check, call: Call) -> dict[str, Any]:
        run = runs.get(SyncRun, args.run)
        with run.serving(call), run.written(call):
            return run.compare(args.full, call)

    def end(args: OfRun, call: Call) -> dict[str, Any]:
        run = runs.get(SyncRun, args.run)
        with run.serving(call):
            run.end("finished")
        return {}

    return {
        "sync.begin": parsed(_Begin, begin),
        "sync.stage": parsed(_Stage, stage),
        "sync.part": parsed(FetchPart, part),
        "sync.finish": parsed(OfRun, finish),
        "sync.check": parsed(Check, check),
        "sync.end": parsed(OfRun, end),
    }
