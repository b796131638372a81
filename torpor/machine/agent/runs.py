"""The runs an agent holds: at most one for each workspace."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final, TypeVar

from torpor.machine.agent.call import Call
from torpor.machine.agent.gpu import MachineGpu
from torpor.machine.agent.log import LOG_FILE, Log
from torpor.machine.agent.state import WorkspaceState
from torpor.machine.agent.workers import WORKERS
from torpor.machine.sampler.save_lock import end_save
from torpor.shared.codecs.trial import GpuTrial
from torpor.shared.errors import AgentLost, RunCancelled, WorkspaceBusy
from torpor.shared.format.keys import Seal
from torpor.shared.transfer.connections import Connections
from torpor.shared.transfer.transfer import Transfer
from torpor.shared.values import GpuUse, WorkspaceName
from torpor.shared.wire.request import Event, Nothing, OfRun

_POLL_S: Final = 0.2


class AgentRun:
    """One snapshot, restore or sync of a workspace, from begin to end. Holds the workspace."""

    def __init__(self, home: Path, run: str, workspace: WorkspaceName) -> None:
        self.home = home
        self.id = run
        self.workspace = workspace
        self.state = WorkspaceState(home, workspace)
        self.state.lock()
        self.connections = Connections(timeout_s=60.0)
        self.beginning = threading.Lock()
        """Held for work that is done once a run, and that several requests may ask for at once."""
        self._lock = threading.Lock()
        self._calls = self._writing = 0
        self._ended: str | None = None

    @contextmanager
    def serving(self, call: Call) -> Iterator[None]:
        """Count this request, so that the workspace is given back only after the last one."""
        with self._lock:
            if self._ended is not None:
                raise RunCancelled(f"run {self.id} has ended: {self._ended}")
            self._calls += 1
        try:
            yield
        finally:
            with self._lock:
                self._calls -= 1
                last = self._calls == 0 and self._ended is not None
            if last:
                self._give_back()

    @contextmanager
    def starting(self, call: Call) -> Iterator[None]:
        """Serve a request that begins the run, one at a time; if it fails, end the run."""
        with self.serving(call), self.beginning:
            try:
                yield
            except BaseException:
                self.end("it could not begin")
                raise

    @contextmanager
    def alone(self, call: Call) -> Iterator[None]:
        """Exclude other requests that begin, change, finish or check the run.

        A repeated request, whose first answer was lost, waits for the first.
        """
        with self.beginning:
            self.check(call)
            yield

    @contextmanager
    def writing(self, call: Call) -> Iterator[None]:
        """Count a part that writes files as at work. Nothing finishes or checks files meanwhile,
        and a part that comes during a finish waits."""
        with self.alone(call), self._lock:
            self._writing += 1
        try:
            yield
        finally:
            with self._lock:
                self._writing -= 1

    @contextmanager
    def written(self, call: Call) -> Iterator[None]:
        """As ``alone``, after every part has ended: a part that is requested again may still write
        what its repeat has written."""
        with self.alone(call):
            while self._writing:
                time.sleep(_POLL_S)
                self.check(call)
            yield

    def check(self, call: Call) -> None:
        """Raise RunCancelled if the request or the run was asked to end."""
        call.check()
        if self._ended is not None:
            raise RunCancelled(f"run {self.id} has ended: {self._ended}")

    def transfer(self, call: Call, stopped: Callable[[], bool] = lambda: False) -> Transfer:
        """A transfer for one request, over the run's connections. It is also cancelled once it is
        ``stopped``."""
        return Transfer(
            connections=self.connections,
            on_away=lambda away: call.emit(Event(0, away)),
            cancelled=lambda: call.cancelled() or self._ended is not None or stopped(),
        )

    def trial(self, use: GpuUse, roots: Sequence[bytes]) -> GpuTrial:
        """A trial of this machine's GPU; its decision also goes into the log."""
        return GpuTrial(
            MachineGpu(self.home, use, roots).open,
            coding_cores(),
            lambda words: Log(self.home / LOG_FILE).write(f"run {self.id}: {words}"),
        )

    def end(self, reason: str) -> None:
        """Give the workspace back, as soon as no request works on it any more. Idempotent."""
        with self._lock:
            if self._ended is not None:
                return
            self._ended = reason
            idle = self._calls == 0
        if idle:
            self._give_back()

    def give_back(self, request: OfRun[Nothing], call: Call) -> Nothing:
        """Serve the request that ends the run."""
        self.end("finished")
        return Nothing()

    @property
    def ended(self) -> bool:
        return self._ended is not None

    def _give_back(self) -> None:
        self.connections.close()
        self.state.unlock()


def coding_cores() -> int:
    """How many cores may encode or decode at once: each worker is one thread."""
    return min(WORKERS, len(os.sched_getaffinity(0)))


def seal_of(key: str | None) -> Seal:
    """The seal of the workspace key (hex), or of none."""
    return Seal(None if key is None else bytes.fromhex(key))


R = TypeVar("R", bound=AgentRun)


class RunRegistry:
    """The agent's runs; implements the daemon's ``Runs``. ``workers`` work at the same time.
    Thread-safe."""

    def __init__(self, home: Path, workers: int = WORKERS) -> None:
        self.home = home
        self.workers = workers
        self._lock = threading.Lock()
        self._runs: dict[str, AgentRun] = {}
        # signalled when a worker is free, or the line of waiting threads changes
        self._left = threading.Condition()
        self._busy = 0
        self._first_waiting = 0

    def add(self, kind: type[R], run: str, workspace: WorkspaceName) -> R:
        """The run of that id, made if it is new; ends a scheduled save of the workspace.
        WorkspaceBusy while another run is active."""
        with self._lock:
            self._runs = {i: r for i, r in self._runs.items() if not r.ended}
            held = self._runs.get(run)
            if isinstance(held, kind):
                return held
            other = next((r for r in self._runs.values() if r.workspace == workspace), None)
            if other is not None:
                raise WorkspaceBusy(
                    f"run {other.id} works on workspace {workspace} on this machine: wait until it "
                    "has ended; a run whose control side is gone ends by itself after a minute"
                )
            end_save(self.home, workspace)
            fresh = kind(self.home, run, workspace)
            self._runs[run] = fresh
            return fresh

    def get(self, kind: type[R], run: str) -> R:
        """The active run; AgentLost if this agent does not hold it (begin it again)."""
        with self._lock:
            held = self._runs.get(run)
        if not isinstance(held, kind) or held.ended:
            raise AgentLost(
                f"the agent on the machine does not hold run {run}: the agent restarted, or ended "
                "the run after a minute without its control side"
            )
        return held

    @contextmanager
    def worker(self, check: Callable[[], None], *, first: bool = False) -> Iterator[None]:
        """Wait for one of the agent's workers, ``first`` before all others; ``check`` may raise
        RunCancelled meanwhile."""
        with self._left:
            self._first_waiting += first
            try:
                while self._busy == self.workers or (self._first_waiting and not first):
                    self._left.wait(_POLL_S)
                    check()
                self._busy += 1
            finally:
                self._first_waiting -= first
                self._left.notify_all()
        try:
            yield
        finally:
            with self._left:
                self._busy -= 1
                self._left.notify_all()

    def active(self) -> bool:
        with self._lock:
            return any(not run.ended for run in self._runs.values())

    def abandon(self, run: str, reason: str) -> None:
        with self._lock:
            held = self._runs.get(run)
        if held is not None:
            held.end(reason)

    def close(self) -> None:
        with self._lock:
            runs = list(self._runs.values())
        for run in runs:
            run.end("the agent leaves")
