"""The operations of docs/agent-protocol.md: parse, call, answer."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from typing import Any, Final

import msgspec

from torpor.agent import content, line
from torpor.agent.environment import record_environment
from torpor.agent.examine import ExamineRequest, examine
from torpor.agent.paths import PathRun
from torpor.agent.peers import PeerGrant
from torpor.agent.protocol import Call, Operation
from torpor.agent.requests import checked, key_of, parsed
from torpor.agent.restore import RestoreRun
from torpor.agent.runs import RunRegistry
from torpor.agent.snapshot import Known, SnapshotRun
from torpor.agent.sync_operations import sync_operations
from torpor.errors import HookFailed, InvalidInput
from torpor.tree.plan import PART_BYTES
from torpor.tree.walk import absolute_root
from torpor.values import Compression, Grant, ObjectKey, SnapshotId, WorkspaceName

_TAIL_BYTES: Final = 4096


class _KnownSnapshot(msgspec.Struct):
    root: str
    bytes: int
    grant: Grant


class _SnapshotBegin(msgspec.Struct):
    run: str
    workspace: WorkspaceName
    roots: list[str]
    exclude: list[str]
    key: str | None
    known: list[_KnownSnapshot]
    compression: Compression = Compression()


class _Scan(msgspec.Struct):
    run: str
    number: int = msgspec.field(name="pass")
    max_parts: int
    resumed: list[ObjectKey]
    lost: list[ObjectKey]
    accepted: list[str]
    part_bytes: int = PART_BYTES


class _StorePart(msgspec.Struct):
    run: str
    number: int = msgspec.field(name="pass")
    part: int
    packs: list[Grant]


class _Hook(msgspec.Struct):
    run: str
    argv: list[str]
    timeout_s: float


class _OfRun(msgspec.Struct):
    run: str


class _Commit(msgspec.Struct):
    run: str
    snapshot: SnapshotId
    parent: SnapshotId | None
    created_unix: int
    statistics: dict[str, int]
    accepted: list[str]
    grant: Grant


class _Reread(msgspec.Struct):
    run: str
    packs: list[Grant]


class _Confirm(msgspec.Struct):
    run: str
    accepted: list[str]


class _SnapshotEnd(msgspec.Struct):
    run: str
    committed: bool


class _RestoreBegin(msgspec.Struct):
    run: str
    workspace: WorkspaceName
    snapshot: SnapshotId
    root: str
    grant: Grant
    manifest_bytes: int
    key: str | None
    roots: list[str] | None
    max_parts: int
    part_bytes: int = PART_BYTES
    resume: bool = False


class _RestorePath(msgspec.Struct):
    run: str
    workspace: WorkspaceName
    snapshot: SnapshotId
    root: str
    grant: Grant
    manifest_bytes: int
    key: str | None
    root_number: int
    path: str  # hexadecimal: a name may be any bytes
    into: str
    aside: bool
    max_parts: int
    part_bytes: int


class _RestorePart(msgspec.Struct):
    run: str
    part: int
    packs: list[Grant]
    peer: PeerGrant | None = None


class _RestoreServe(msgspec.Struct):
    run: str
    host: str
    most_bytes: int


class _Check(msgspec.Struct):
    run: str
    full: bool


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

    def snapshot_begin(args: _SnapshotBegin, call: Call) -> dict[str, Any]:
        run, _ = runs.add(SnapshotRun, args.run, args.workspace)
        known = [Known(bytes.fromhex(k.root), k.bytes, checked(k.grant)) for k in args.known]
        with run.serving(call), run.beginning:
            try:
                return run.begin(
                    args.roots, args.exclude, key_of(args.key), known, args.compression
                )
            except BaseException:
                run.end("it could not begin")
                raise

    def snapshot_scan(args: _Scan, call: Call) -> dict[str, Any]:
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

    def snapshot_part(args: _StorePart, call: Call) -> dict[str, Any]:
        run = runs.get(SnapshotRun, args.run)
        with run.serving(call), runs.worker(lambda: run.check(call)):
            return run.part(args.number, args.part, [checked(g) for g in args.packs], call)

    def snapshot_hook(args: _Hook, call: Call) -> dict[str, Any]:
        run = runs.get(SnapshotRun, args.run)
        with run.serving(call), run.alone(call):
            return _run_hook(args.argv, args.timeout_s, lambda: run.check(call))

    def snapshot_packs(args: _OfRun, call: Call) -> dict[str, Any]:
        run = runs.get(SnapshotRun, args.run)
        with run.serving(call), run.alone(call):
            return run.packs()

    def snapshot_commit(args: _Commit, call: Call) -> dict[str, Any]:
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

    def snapshot_reread(args: _Reread, call: Call) -> dict[str, Any]:
        run = runs.get(SnapshotRun, args.run)
        with run.serving(call):
            return run.reread([checked(g) for g in args.packs], call)

    def snapshot_confirm(args: _Confirm, call: Call) -> dict[str, Any]:
        run = runs.get(SnapshotRun, args.run)
        with run.serving(call), run.alone(call):
            return run.confirm(args.accepted, call)

    def snapshot_end(args: _SnapshotEnd, call: Call) -> dict[str, Any]:
        run = runs.get(SnapshotRun, args.run)
        with run.serving(call):
            run.finish(args.committed)
        return {}

    def restore_begin(args: _RestoreBegin, call: Call) -> dict[str, Any]:
        run, _ = runs.add(RestoreRun, args.run, args.workspace)
        with run.serving(call), run.beginning:
            try:
                return run.begin(
                    args.snapshot,
                    bytes.fromhex(args.root),
                    checked(args.grant),
                    args.manifest_bytes,
                    key_of(args.key),
                    args.roots,
                    args.max_parts,
                    args.part_bytes,
                    args.resume,
                    call,
                )
            except BaseException:
                run.end("it could not begin")
                raise

    def restore_path(args: _RestorePath, call: Call) -> dict[str, Any]:
        run, _ = runs.add(PathRun, args.run, args.workspace)
        with run.serving(call), run.beginning:
            try:
                return run.begin_path(
                    args.snapshot,
                    bytes.fromhex(args.root),
                    checked(args.grant),
                    args.manifest_bytes,
                    key_of(args.key),
                    (args.root_number, bytes.fromhex(args.path)),
                    args.into,
                    args.aside,
                    args.max_parts,
                    args.part_bytes,
                    call,
                )
            except BaseException:
                run.end("it could not begin")
                raise

    def restore_part(args: _RestorePart, call: Call) -> dict[str, Any]:
        run = runs.get(RestoreRun, args.run)
        with run.serving(call), runs.worker(lambda: run.check(call)), run.writing(call):
            return run.part(args.part, [checked(g) for g in args.packs], args.peer, call)

    def restore_serve(args: _RestoreServe, call: Call) -> dict[str, Any]:
        run = runs.get(RestoreRun, args.run)
        with run.serving(call):
            return run.serve(args.host, args.most_bytes)

    def restore_finish(args: _OfRun, call: Call) -> dict[str, Any]:
        run = runs.get(RestoreRun, args.run)
        with run.serving(call), run.written(call):
            return run.finish()

    def restore_check(args: _Check, call: Call) -> dict[str, Any]:
        run = runs.get(RestoreRun, args.run)
        with run.serving(call), run.written(call):
            return run.compare(args.full, call)

    def restore_end(args: _OfRun, call: Call) -> dict[str, Any]:
        run = runs.get(RestoreRun, args.run)
        with run.serving(call):
            run.end("finished")
        return {}

    def verify_packs(args: ExamineRequest, call: Call) -> dict[str, Any]:
        return examine(args, call, runs)

    return sync_operations(runs) | {
        "probe": parsed(_Probe, _probe),
        "content.make": parsed(_MakeContent, _make_content),
        "content.remove": parsed(_RemoveContent, _remove_content),
        "line": parsed(_Line, _line),
        "snapshot.begin": parsed(_SnapshotBegin, snapshot_begin),
        "snapshot.scan": parsed(_Scan, snapshot_scan),
        "snapshot.part": parsed(_StorePart, snapshot_part),
        "snapshot.hook": parsed(_Hook, snapshot_hook),
        "snapshot.packs": parsed(_OfRun, snapshot_packs),
        "snapshot.commit": parsed(_Commit, snapshot_commit),
        "snapshot.reread": parsed(_Reread, snapshot_reread),
        "snapshot.confirm": parsed(_Confirm, snapshot_confirm),
        "snapshot.end": parsed(_SnapshotEnd, snapshot_end),
        "verify.packs": parsed(ExamineRequest, verify_packs),
        "restore.begin": parsed(_RestoreBegin, restore_begin),
        "restore.path": parsed(_RestorePath, restore_path),
        "restore.part": parsed(_RestorePart, restore_part),
        "restore.serve": parsed(_RestoreServe, restore_serve),
        "restore.finish": parsed(_OfRun, restore_finish),
        "restore.check": parsed(_Check, restore_check),
        "restore.end": parsed(_OfRun, restore_end),
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


def _run_hook(argv: list[str], timeout_s: float, check: Callable[[], None]) -> dict[str, Any]:
    """Run the user's own command; its whole process group ends with it."""
    if not argv:
        raise InvalidInput("the quiesce hook is an empty list: give a program and its arguments")
    started = time.monotonic()
    try:
        process = subprocess.Popen(
            argv,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            cwd=os.path.expanduser("~"),
            start_new_session=True,
        )
    except OSError as exc:
        raise HookFailed(
            f"the quiesce hook {argv[0]!r} cannot be started on the machine: {exc.strerror}"
        ) from None
    output = b""
    try:
        while True:
            try:
                output, _ = process.communicate(timeout=0.2)
                break
            except subprocess.TimeoutExpired:
                check()
                if time.monotonic() - started > timeout_s:
                    raise HookFailed(
                        f"the quiesce hook {argv[0]!r} took longer than {timeout_s:.0f} s and was "
                        "ended: raise its time limit, or make it finish"
                    ) from None
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
    tail = output[-_TAIL_BYTES:].decode(errors="replace")
    if process.returncode != 0:
        raise HookFailed(
            f"the quiesce hook {argv[0]!r} ended with status {process.returncode}: {tail.strip()}"
        )
    return {
        "exit": process.returncode,
        "seconds": time.monotonic() - started,
        "tail": tail,
    }
