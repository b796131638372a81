"""The autosave process: one for each workspace of a HOME that is saved every few minutes, apart
from the agent and from everyone who asks.

It holds the newest book in memory only, so it saves while no control side is there. It also saves
when the machine will be taken away. It leaves when the grants have ended, or HOME is removed.
"""

from __future__ import annotations

import os
import resource
import signal
import sys
import time
from collections import deque
from contextlib import suppress
from pathlib import Path
from typing import Final

import msgspec

from torpor.machine.supervisor.folder import ProcessFolder
from torpor.machine.supervisor.guard import Guard
from torpor.machine.supervisor.requests import Requests
from torpor.machine.supervisor.saves import LONGEST_S, Rescued
from torpor.shared.errors import InvalidInput
from torpor.shared.values import WorkspaceName
from torpor.shared.wire.autosave import Autosave, AutosaveState, LookAtAutosave
from torpor.shared.wire.job import Notice
from torpor.shared.wire.machine import Bye
from torpor.shared.wire.protocol import Envelope, parse_line
from torpor.shared.wire.request import Nothing, parse_request

AUTOSAVES: Final = "autosaves"
TICK_S: Final = 1.0
REST: Final = 50.0
"""A save comes this many times as long after the last one as that kept all cores or the line busy,
so that saves take at most 2 % of either."""
MOST_CORES: Final = 8.0
"""More than this no save keeps busy."""
CLOCK_REST: Final = 10.0
"""Also this many times as long as it took: most of what it does besides is reading the disk."""


class AutosaveFolder(ProcessFolder):
    """The folder ``HOME/autosaves/WORKSPACE`` (mode 0700). ``alive`` is locked as long as the
    process lives, and names its bundle."""

    def __init__(self, home: Path, workspace: WorkspaceName) -> None:
        super().__init__(home / AUTOSAVES / workspace)

    def bundle(self) -> str:
        """What the newest process was started from."""
        try:
            return (self.path / "alive").read_text("utf-8").strip()
        except FileNotFoundError:
            return ""


def autosave_folders(home: Path) -> list[AutosaveFolder]:
    """One for each workspace that was ever saved so."""
    try:
        return [AutosaveFolder(home, WorkspaceName(n)) for n in os.listdir(home / AUTOSAVES)]
    except FileNotFoundError:
        return []


def autosave(home: Path, lock: int, bundle: str, save: list[str]) -> None:
    """Serve the request that stdin brings, and those that follow. ``lock``: of the workspace's
    folder; ``save``: the argv of a process that saves the workspace. Closes stdout once it does."""
    os.set_inheritable(lock, False)
    asked = parse_line(sys.stdin.buffer.read())
    if not isinstance(asked, Envelope):
        raise InvalidInput("autosave is started with a request")
    os.ftruncate(lock, 0)
    os.pwrite(lock, f"{bundle}\n".encode(), 0)
    process = Autosaver(home, parse_request(Autosave, asked.args), save)
    null = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1):
        os.dup2(null, stream)
    os.close(null)
    process.run()


class Autosaver:
    """Saves one workspace until its grants have ended."""

    def __init__(self, home: Path, request: Autosave, save: list[str]) -> None:
        self._folder = AutosaveFolder(home, request.book.workspace)
        self._ours = self._folder.identity()
        self._requests = Requests(self._folder.listen(), self._serve)
        self._guard = Guard(request.notices, save, self._requests.wake)
        self._shuts_down = self._leaving = False
        signal.signal(signal.SIGTERM, self._shut_down)
        self._state = AutosaveState(lives=True, interval_s=request.every_s)
        self._schedule = Schedule(request.every_s, usable_cores())
        self._heard: deque[tuple[float, float]] = deque()  # of saves that have not ended
        self._stored_s = time.monotonic()
        self._failed = False
        self._hand_over(request)

    def run(self) -> None:
        while not self._done():
            saves = self._guard.saves_now
            self._requests.wait(TICK_S if saves else min(TICK_S, self._schedule.wait_s))
            if self._shuts_down:
                self._shuts_down = False
                words = "the machine shuts down: the autosave process got SIGTERM"
                self._guard.hear(Notice("signal", words, time.time()))
            elif self._schedule.wait_s <= 0 and not self._guard.saves_now:
                self._schedule.begin()
                self._guard.hear(Notice("schedule", "a save is due", time.time()))
            for news in self._guard.news():
                if isinstance(news, Notice):
                    self._heard.append((news.at_unix, time.monotonic()))
                elif isinstance(news, Rescued):
                    self._hear(news)

    def _hear(self, done: Rescued) -> None:
        self._schedule.end(done.sent_s)
        began_unix, began_s = self._heard.popleft()  # saves end in the order of what asked for them
        if done.gave_way:  # to a run, which stores all of it
            self._schedule.rest_no_longer()
            return
        replace = msgspec.structs.replace
        self._state = replace(self._state, error=done.error, interval_s=self._schedule.interval_s)
        self._failed = done.saved is None and not done.unchanged
        if not self._failed:
            self._stored_s = began_s
            saved = done.saved or self._state.saved
            self._state = replace(self._state, saved=saved, stored_unix=began_unix)

    def _done(self) -> bool:
        if self._folder.is_gone(self._ours):
            return True
        over = self._leaving or time.monotonic() >= self._ends_s
        return over and not self._guard.saves_now

    def _shut_down(self, _number: int, _frame: object) -> None:
        self._shuts_down = True

    def _serve(self, asked: Envelope) -> Nothing | AutosaveState:
        if asked.op == LookAtAutosave.op:
            return msgspec.structs.replace(
                self._state,
                left=self._guard.left,
                unsaved_s=time.monotonic() - self._stored_s,
                interval_s=max(self._state.interval_s, self._schedule.gap_s),
            )
        if asked.op == Autosave.op:
            self._hand_over(parse_request(Autosave, asked.args))
        elif asked.op == Bye.op:
            self._leaving = True
        else:
            raise InvalidInput("the autosave process does not know what it is asked for")
        return Nothing()

    def _hand_over(self, request: Autosave) -> None:
        self._guard.stand_by(request.book)
        self._ends_s = time.monotonic() + LONGEST_S  # this machine's time of day may be wrong
        self._schedule.every(request.every_s)
        if self._failed:
            self._schedule.rest_no_longer()
        until_unix = max((save.grant.expires_unix for save in request.book.saves), default=0)
        self._state = msgspec.structs.replace(self._state, until_unix=until_unix)


class Schedule:
    """When the next save is due: so often as is wanted, and seldom enough for what the last one
    took of the ``cores``, of the line and of the clock."""

    def __init__(self, every_s: float, cores: float) -> None:
        self._every_s = every_s
        self._cores = cores
        self._rest_s = 0.0
        self._last_s: float | None = None
        self._saves = False
        self._began_s = time.monotonic()
        self._cpu_s = 0.0
        self.interval_s = every_s

    def every(self, seconds: float) -> None:
        self._every_s = seconds

    @property
    def gap_s(self) -> float:
        """From the begin of the last save to the next one."""
        return max(self._every_s, self._rest_s)

    @property
    def wait_s(self) -> float:
        """Until the next save is due; 0 from then on."""
        return max(0.0, self._began_s + self.gap_s - time.monotonic())

    def begin(self) -> None:
        """A scheduled save begins."""
        now_s = time.monotonic()
        if self._last_s is not None:
            self.interval_s = now_s - self._last_s
        self._last_s = self._began_s = now_s
        self._saves = True
        self._cpu_s = _cpu_of_saves_s()

    def rest_no_longer(self) -> None:
        """What the last save failed for may be mended, or a run has taken its place."""
        self._rest_s = 0.0

    def end(self, sent_s: float | None) -> None:
        """A save has ended, which was sending for so long; None: nobody knows. One after a notice
        counts for nothing here."""
        if not self._saves:
            return
        self._saves = False
        took_s = time.monotonic() - self._began_s
        cores_s = (_cpu_of_saves_s() - self._cpu_s) / self._cores
        line_s = took_s if sent_s is None else min(sent_s, took_s)
        self._rest_s = max(REST * max(cores_s, line_s), CLOCK_REST * took_s)


def usable_cores(root: Path = Path("/sys/fs/cgroup")) -> float:
    """How many cores a save may count on: a container sees all of its host's, and has a limit at
    most where this one can be read."""
    cores = min(MOST_CORES, float(len(os.sched_getaffinity(0))))
    for names in (("cpu.max",), ("cpu/cpu.cfs_quota_us", "cpu/cpu.cfs_period_us")):
        with suppress(OSError, ValueError, ZeroDivisionError):  # none, or without a limit
            quota, period = " ".join((root / name).read_text() for name in names).split()
            if int(quota) > 0:
                return min(cores, int(quota) / int(period))
    return cores


def _cpu_of_saves_s() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime
