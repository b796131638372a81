"""The operations of a sync (docs/agent-protocol.md)."""

from __future__ import annotations

from typing import Any

import msgspec

from torpor.agent.manifests import Wanted
from torpor.agent.protocol import Call, Operation
from torpor.agent.requests import checked, key_of, parsed
from torpor.agent.runs import RunRegistry
from torpor.agent.sync import SyncRun
from torpor.values import Grant, SnapshotId, WorkspaceName


class _Begin(msgspec.Struct):
    run: str
    workspace: WorkspaceName
    snapshot: SnapshotId
    root: str
    grant: Grant
    manifest_bytes: int
    key: str | None
    exclude: list[str]
    stored: list[SnapshotId]
    discard_local: bool


class _Stage(msgspec.Struct):
    run: str
    max_parts: int


class _Part(msgspec.Struct):
    run: str
    part: int
    packs: list[Grant]


class _OfRun(msgspec.Struct):
    run: str


class _Check(msgspec.Struct):
    run: str
    full: bool


def sync_operations(runs: RunRegistry) -> dict[str, Operation]:
    """The agent's table of operations over ``runs``, as far as syncs go."""

    def begin(args: _Begin, call: Call) -> dict[str, Any]:
        run, _ = runs.add(SyncRun, args.run, args.workspace)
        wanted = Wanted(
            args.workspace,
            args.snapshot,
            bytes.fromhex(args.root),
            checked(args.grant),
            args.manifest_bytes,
        )
        with run.serving(call), run.beginning:
            try:
                return run.begin(
                    wanted, key_of(args.key), args.exclude, args.stored, args.discard_local, call
                )
            except BaseException:
                run.end("it could not begin")
                raise

    def stage(args: _Stage, call: Call) -> dict[str, Any]:
        run = runs.get(SyncRun, args.run)
        with run.serving(call), run.beginning:
            return run.stage(args.max_parts, call)

    def part(args: _Part, call: Call) -> dict[str, Any]:
        run = runs.get(SyncRun, args.run)
        with run.serving(call), runs.worker(lambda: run.check(call)), run.writing(call):
            return run.part(args.part, [checked(grant) for grant in args.packs], call)

    def finish(args: _OfRun, call: Call) -> dict[str, Any]:
        run = runs.get(SyncRun, args.run)
        with run.serving(call), run.written(call):
            return run.finish(call)

    def check(args: _Check, call: Call) -> dict[str, Any]:
        run = runs.get(SyncRun, args.run)
        with run.serving(call), run.written(call):
            return run.compare(args.full, call)

    def end(args: _OfRun, call: Call) -> dict[str, Any]:
        run = runs.get(SyncRun, args.run)
        with run.serving(call):
            run.end("finished")
        return {}

    return {
        "sync.begin": parsed(_Begin, begin),
        "sync.stage": parsed(_Stage, stage),
        "sync.part": parsed(_Part, part),
        "sync.finish": parsed(_OfRun, finish),
        "sync.check": parsed(_Check, check),
        "sync.end": parsed(_OfRun, end),
    }
