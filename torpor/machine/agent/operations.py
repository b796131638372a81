"""The agent's table of operations (docs/contributing/agent-protocol.md)."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from functools import partial
from typing import Any, Generic, TypeVar

from torpor.machine.agent.activity import read_activity
from torpor.machine.agent.autosave import autosave, end_autosave, look_at_autosave
from torpor.machine.agent.brought import make_paths, note_made_again
from torpor.machine.agent.call import Call, Operations
from torpor.machine.agent.encodings import measure_encodings
from torpor.machine.agent.examine import examine
from torpor.machine.agent.file_use import note_ready
from torpor.machine.agent.jobs import (
    look_at_job,
    start_job,
    stop_job,
    try_freezing,
)
from torpor.machine.agent.passes import Workers
from torpor.machine.agent.paths import PathRun
from torpor.machine.agent.preview import preview
from torpor.machine.agent.restore import RestoreRun
from torpor.machine.agent.runs import AgentRun, RunRegistry
from torpor.machine.agent.snapshot import SnapshotRun
from torpor.machine.agent.sync import SyncRun
from torpor.shared.transfer import throughput
from torpor.shared.wire.activity import ReadActivity
from torpor.shared.wire.autosave import Autosave, EndAutosave, LookAtAutosave
from torpor.shared.wire.brought import MakePaths, NoteMadeAgain
from torpor.shared.wire.hold import EndHold, Held, Hold
from torpor.shared.wire.job import LookAtJob, StartJob, StopJob, TryFreezing
from torpor.shared.wire.losses import LookAtHomes, LookForLosses
from torpor.shared.wire.machine import (
    ExaminePacks,
    MeasureEncodings,
    MeasureThroughput,
    Throughput,
)
from torpor.shared.wire.packages import PutPackagesBack
from torpor.shared.wire.preview import PreviewSnapshot
from torpor.shared.wire.request import BeginsRun, OfRun
from torpor.shared.wire.restore import (
    BeginPath,
    BeginRestore,
    Checked,
    CheckRestore,
    EndRestore,
    FetchPart,
    FinishFirst,
    FinishRestore,
    NoteReady,
    ServePacks,
)
from torpor.shared.wire.snapshot import (
    BeginSnapshot,
    Commit,
    Confirm,
    EndSnapshot,
    ListPacks,
    PassesOutcome,
    Quiesce,
    RereadPacks,
    StorePasses,
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
Turn = Callable[[AgentRun, Call], AbstractContextManager[None]]
"""What a request waits for and holds while it is served, so that other requests of its run, or a
worker, are excluded."""


def operations(
    runs: RunRegistry, supervise: list[str], autosaves: list[str], canary: list[str]
) -> Operations:
    """Every operation of the agent except ``bye`` and ``forget``, over ``runs``. ``supervise``,
    ``autosaves`` and ``canary``: the argv that start such a process."""
    table = Operations()
    table.add(MeasureThroughput, _measure_line)
    table.add(MeasureEncodings, measure_encodings)
    table.add(ExaminePacks, lambda request, call: examine(request, call, runs))
    table.add(PreviewSnapshot, preview)
    table.add(ReadActivity, lambda request, call: read_activity(request, call, runs))
    table.add(StartJob, lambda request, call: start_job(request, call, supervise, autosaves))
    table.add(LookAtJob, lambda request, call: look_at_job(request, call, autosaves))
    table.add(StopJob, stop_job)
    table.add(TryFreezing, lambda request, call: try_freezing(request, call, canary))
    table.add(NoteReady, note_ready)
    table.add(MakePaths, make_paths)
    table.add(NoteMadeAgain, note_made_again)
    table.add(Autosave, lambda request, call: autosave(request, call, autosaves))
    table.add(LookAtAutosave, look_at_autosave)
    table.add(EndAutosave, end_autosave)

    def worker(run: AgentRun, call: Call) -> AbstractContextManager[None]:
        return runs.worker(partial(run.check, call))

    def first_worker(run: AgentRun, call: Call) -> AbstractContextManager[None]:
        return runs.worker(partial(run.check, call), first=True)

    def store(run: SnapshotRun, request: StorePasses, call: Call) -> PassesOutcome:
        return run.store(request, call, Workers(runs.workers, runs.worker))

    snapshots = _Serving(runs, SnapshotRun)
    table.add(BeginSnapshot, snapshots.begins(SnapshotRun.begin))
    table.add(StorePasses, snapshots.during(store, AgentRun.alone))
    table.add(Quiesce, snapshots.during(SnapshotRun.quiesce, AgentRun.alone))
    table.add(LookForLosses, snapshots.during(SnapshotRun.losses))
    table.add(LookAtHomes, snapshots.during(SnapshotRun.homes))
    table.add(ListPacks, snapshots.during(SnapshotRun.packs, AgentRun.alone))
    table.add(Commit, snapshots.during(SnapshotRun.commit, AgentRun.alone))
    table.add(RereadPacks, snapshots.during(SnapshotRun.reread))
    table.add(Confirm, snapshots.during(SnapshotRun.confirm, AgentRun.alone))
    table.add(EndSnapshot, snapshots.during(SnapshotRun.finish))

    restores = _Serving(runs, RestoreRun)
    table.add(BeginRestore, restores.begins(RestoreRun.begin))
    table.add(BeginPath, _Serving(runs, PathRun).begins(PathRun.begin_path))
    table.add(ServePacks, restores.during(RestoreRun.serve))
    part = restores.during(RestoreRun.part, AgentRun.writing, worker)
    first_part = restores.during(RestoreRun.part, AgentRun.writing, first_worker)
    table.add(FetchPart, lambda asked, call: (first_part if asked.pieces else part)(asked, call))
    table.add(FinishFirst, restores.during(RestoreRun.first, AgentRun.writing))
    table.add(FinishRestore, restores.during(RestoreRun.finish, AgentRun.written))
    table.add(CheckRestore, restores.during(_compare, AgentRun.written))
    table.add(PutPackagesBack, restores.during(RestoreRun.packages, AgentRun.written))
    table.add(EndRestore, restores.during(RestoreRun.give_back))

    syncs = _Serving(runs, SyncRun)
    table.add(BeginSync, syncs.begins(SyncRun.begin))
    table.add(StageSync, syncs.during(SyncRun.stage, AgentRun.alone))
    table.add(SyncPart, syncs.during(SyncRun.part, AgentRun.writing, worker))
    table.add(FinishSync, syncs.during(SyncRun.finish, AgentRun.written))
    table.add(CheckSync, syncs.during(SyncRun.compare, AgentRun.written))
    table.add(EndSync, syncs.during(SyncRun.give_back))

    holds = _Serving(runs, AgentRun)
    table.add(Hold, holds.begins(_holds))
    table.add(EndHold, holds.during(AgentRun.give_back))
    return table


class _Serving(Generic[R]):
    """Handlers for runs of one kind."""

    def __init__(self, runs: RunRegistry, kind: type[R]) -> None:
        self._runs = runs
        self._kind = kind

    def begins(self, method: Callable[[R, B, Call], A]) -> Callable[[B, Call], A]:
        """Begin the run; if that fails, end it."""

        def handler(request: B, call: Call) -> A:
            run = self._runs.add(self._kind, request.run, request.workspace)
            run.connections.trust(request.authority)
            with run.starting(call):
                return method(run, request, call)

        return handler

    def during(self, method: Callable[[R, Q, Call], A], *turns: Turn) -> Callable[[Q, Call], A]:
        """Serve a request of a run that has begun, after waiting for its ``turns``. Without turns
        it is served at any time."""

        def handler(request: Q, call: Call) -> A:
            run = self._runs.get(self._kind, request.run)
            with ExitStack() as held:
                held.enter_context(run.serving(call))
                for turn in turns:
                    held.enter_context(turn(run, call))
                return method(run, request, call)

        return handler


def _holds(run: AgentRun, request: Hold, call: Call) -> Held:
    return Held(run.state.is_half_restored)  # the run holds the workspace from its beginning


def _compare(run: RestoreRun, request: CheckRestore, call: Call) -> Checked:
    return run.compare(request, call)  # a path's run has a compare of its own


def _measure_line(request: MeasureThroughput, call: Call) -> Throughput:
    moved = throughput.move(
        request.puts,
        request.gets,
        request.object_bytes,
        request.connections,
        call.cancelled,
        request.authority,
    )
    return Throughput(*moved)
