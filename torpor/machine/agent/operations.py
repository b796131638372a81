"""The agent's table of operations (docs/agent-protocol.md)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, TypeVar

from torpor.machine.agent.call import Call, Operations
from torpor.machine.agent.examine import examine
from torpor.machine.agent.paths import PathRun
from torpor.machine.agent.restore import RestoreRun
from torpor.machine.agent.runs import AgentRun, RunRegistry
from torpor.machine.agent.snapshot import SnapshotRun
from torpor.machine.agent.sync import SyncRun
from torpor.shared import content
from torpor.shared.transfer import line
from torpor.shared.wire.machine import (
    ExaminePacks,
    LineRate,
    MakeContent,
    MeasureLine,
    RemoveContent,
)
from torpor.shared.wire.request import BeginsRun, Nothing, OfRun
from torpor.shared.wire.restore import (
    BeginPath,
    BeginRestore,
    CheckRestore,
    EndRestore,
    FetchPart,
    FinishRestore,
    ServePacks,
)
from torpor.shared.wire.snapshot import (
    BeginSnapshot,
    Commit,
    Confirm,
    EndSnapshot,
    ListPacks,
    Quiesce,
    RereadPacks,
    Scan,
    StorePart,
)
from torpor.shared.wire.sync import (
    BeginSync,
    CheckSync,
    EndSync,
    FinishSync,
    StageSync,
    SyncPart,
)

A = TypeVar("A")
B = TypeVar("B", bound=BeginsRun[Any])
Q = TypeVar("Q", bound=OfRun[Any])
R = TypeVar("R", bound=AgentRun)


def operations(runs: RunRegistry) -> Operations:
    """Every operation of the agent except ``bye`` and ``forget``, over ``runs``."""
    table = Operations()
    table.add(MakeContent, _make_content)
    table.add(RemoveContent, _remove_content)
    table.add(MeasureLine, _measure_line)
    table.add(ExaminePacks, lambda request, call: examine(request, call, runs))

    snapshots = _Serving(runs, SnapshotRun)
    table.add(BeginSnapshot, snapshots.begins(SnapshotRun.begin))
    table.add(Scan, snapshots.alone(SnapshotRun.scan))
    table.add(StorePart, snapshots.worker(SnapshotRun.part))
    table.add(Quiesce, snapshots.alone(SnapshotRun.quiesce))
    table.add(ListPacks, snapshots.alone(SnapshotRun.packs))
    table.add(Commit, snapshots.alone(SnapshotRun.commit))
    table.add(RereadPacks, snapshots.beside(SnapshotRun.reread))
    table.add(Confirm, snapshots.alone(SnapshotRun.confirm))
    table.add(EndSnapshot, snapshots.beside(SnapshotRun.finish))

    restores = _Serving(runs, RestoreRun)
    table.add(BeginRestore, restores.begins(RestoreRun.begin))
    table.add(BeginPath, _Serving(runs, PathRun).begins(PathRun.begin_path))
    table.add(ServePacks, restores.beside(RestoreRun.serve))
    table.add(FetchPart, restores.writing(RestoreRun.part))
    table.add(FinishRestore, restores.written(RestoreRun.finish))
    table.add(CheckRestore, restores.written(RestoreRun.compare))
    table.add(EndRestore, restores.beside(RestoreRun.give_back))

    syncs = _Serving(runs, SyncRun)
    table.add(BeginSync, syncs.begins(SyncRun.begin))
    table.add(StageSync, syncs.alone(SyncRun.stage))
    table.add(SyncPart, syncs.writing(SyncRun.part))
    table.add(FinishSync, syncs.written(SyncRun.finish))
    table.add(CheckSync, syncs.written(SyncRun.compare))
    table.add(EndSync, syncs.beside(SyncRun.give_back))
    return table


class _Serving(Generic[R]):
    """Handlers for runs of one kind. Each method says what else may run at the same time."""

    def __init__(self, runs: RunRegistry, kind: type[R]) -> None:
        self._runs = runs
        self._kind = kind

    def begins(self, method: Callable[[R, B, Call], A]) -> Callable[[B, Call], A]:
        """Begin the run; if that fails, end it."""

        def handler(request: B, call: Call) -> A:
            run = self._runs.add(self._kind, request.run, request.workspace)
            with run.starting(call):
                return method(run, request, call)

        return handler

    def beside(self, method: Callable[[R, Q, Call], A]) -> Callable[[Q, Call], A]:
        """At any time."""

        def handler(request: Q, call: Call) -> A:
            run = self._runs.get(self._kind, request.run)
            with run.serving(call):
                return method(run, request, call)

        return handler

    def alone(self, method: Callable[[R, Q, Call], A]) -> Callable[[Q, Call], A]:
        """One of these at a time."""

        def guarded(run: R, request: Q, call: Call) -> A:
            with run.alone(call):
                return method(run, request, call)

        return self.beside(guarded)

    def worker(self, method: Callable[[R, Q, Call], A]) -> Callable[[Q, Call], A]:
        """As many at a time as the agent has workers."""

        def guarded(run: R, request: Q, call: Call) -> A:
            with self._runs.worker(lambda: run.check(call)):
                return method(run, request, call)

        return self.beside(guarded)

    def writing(self, method: Callable[[R, Q, Call], A]) -> Callable[[Q, Call], A]:
        """As ``worker``, and nothing of ``written`` meanwhile."""

        def guarded(run: R, request: Q, call: Call) -> A:
            with run.writing(call), self._runs.worker(lambda: run.check(call)):
                return method(run, request, call)

        return self.beside(guarded)

    def written(self, method: Callable[[R, Q, Call], A]) -> Callable[[Q, Call], A]:
        """As ``alone``, and behind every request of ``writing``."""

        def guarded(run: R, request: Q, call: Call) -> A:
            with run.written(call):
                return method(run, request, call)

        return self.beside(guarded)


def _make_content(request: MakeContent, call: Call) -> Nothing:
    content.make(request.name, request.bytes, request.seed, call.check)
    return Nothing()


def _remove_content(request: RemoveContent, call: Call) -> Nothing:
    content.remove(request.name, place_too=request.place_too)
    return Nothing()


def _measure_line(request: MeasureLine, call: Call) -> LineRate:
    moved = line.move(
        request.puts, request.gets, request.object_bytes, request.connections, call.cancelled
    )
    return LineRate(*moved)
