"""The operations of a snapshot (docs/agent-protocol.md)."""

from __future__ import annotations

from typing import Any

import msgspec

from torpor.machine.agent.hook import run_hook
from torpor.machine.agent.requests import OfRun, checked, key_of, parsed
from torpor.machine.agent.runs import RunRegistry
from torpor.machine.agent.snapshot import Known, SnapshotRun
from torpor.shared.format.sizes import PART_BYTES
from torpor.shared.values import Compression, Grant, ObjectKey, SnapshotId, WorkspaceName
from torpor.shared.wire.protocol import Call, Operation


class _KnownSnapshot(msgspec.Struct):
    root: str
    bytes: int
    grant: Grant


class _Begin(OfRun):
    workspace: WorkspaceName
    roots: list[str]
    exclude: list[str]
    key: str | None
    known: list[_KnownSnapshot]
    compression: Compression = Compression()


class _Scan(OfRun):
    number: int = msgspec.field(name="pass")
    max_parts: int
    resumed: list[ObjectKey]
    lost: list[ObjectKey]
    accepted: list[str]
    part_bytes: int = PART_BYTES


class _Part(OfRun):
    number: int = msgspec.field(name="pass")
    part: int
    packs: list[Grant]


class _Hook(OfRun):
    argv: list[str]
    timeout_s: float


class _Commit(OfRun):
    snapshot: SnapshotId
    parent: SnapshotId | None
    created_unix: int
    statistics: dict[str, int]
    accepted: list[str]
    grant: Grant


class _Reread(OfRun):
    packs: list[Grant]


class _Confirm(OfRun):
    accepted: list[str]


class _End(OfRun):
    committed: bool


def snapshot_operations(runs: RunRegistry) -> dict[str, Operation]:
    """The agent's table of operations over ``runs``, as far as snapshots go."""

    def begin(args: _Begin, call: Call) -> dict[str, Any]:
        run, _ = runs.add(SnapshotRun, args.run, args.workspace)
        with run.starting(call):
            known = [Known(bytes.fromhex(k.root), k.bytes, checked(k.grant)) for k in args.known]
            return run.begin(args.roots, args.exclude, key_of(args.key), known, args.compression)

    def scan(args: _Scan, call: Call) -> dict[str, Any]:
        run = runs.get(SnapshotRun, args.run)
        with run.serving(call), run.alone(call):
            return run.scan(
                args.number,
                args.max_parts,
                args.part_bytes,
                args.resumed,
                args.lost,
                args.accepted,
                call,
            )

    def part(args: _Part, call: Call) -> dict[str, Any]:
        run = runs.get(SnapshotRun, args.run)
        with run.serving(call), runs.worker(lambda: run.check(call)):
            return run.part(args.number, args.part, [checked(g) for g in args.packs], call)

    def hook(args: _Hook, call: Call) -> dict[str, Any]:
        run = runs.get(SnapshotRun, args.run)
        with run.serving(call), run.alone(call):
            return run_hook(args.argv, args.timeout_s, lambda: run.check(call))

    def packs(args: OfRun, call: Call) -> dict[str, Any]:
        run = runs.get(SnapshotRun, args.run)
        with run.serving(call), run.alone(call):
            return run.packs()

    def commit(args: _Commit, call: Call) -> dict[str, Any]:
        run = runs.get(SnapshotRun, args.run)
        with run.serving(call), run.alone(call):
            return run.commit(
                args.snapshot,
                args.parent,
                args.created_unix,
                args.statistics,
                args.accepted,
                checked(args.grant),
                call,
            )

    def reread(args: _Reread, call: Call) -> dict[str, Any]:
        run = runs.get(SnapshotRun, args.run)
        with run.serving(call):
            return run.reread([checked(g) for g in args.packs], call)

    def confirm(args: _Confirm, call: Call) -> dict[str, Any]:
        run = runs.get(SnapshotRun, args.run)
        with run.serving(call), run.alone(call):
            return run.confirm(args.accepted, call)

    def end(args: _End, call: Call) -> dict[str, Any]:
        run = runs.get(SnapshotRun, args.run)
        with run.serving(call):
            run.finish(args.committed)
        return {}

    return {
        "snapshot.begin": parsed(_Begin, begin),
        "snapshot.scan": parsed(_Scan, scan),
        "snapshot.part": parsed(_Part, part),
        "snapshot.hook": parsed(_Hook, hook),
        "snapshot.packs": parsed(OfRun, packs),
        "snapshot.commit": parsed(_Commit, commit),
        "snapshot.reread": parsed(_Reread, reread),
        "snapshot.confirm": parsed(_Confirm, confirm),
        "snapshot.end": parsed(_End, end),
    }
