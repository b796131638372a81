"""The autosave process: one for each workspace of a HOME that is saved every few minutes, apart
from the agent and from everyone who asks.

It holds the newest book in memory only, so it saves while no control side is there. It also saves
when the machine will be taken away. It leaves when the grants have ended, or HOME is removed.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections import deque
from pathlib import Path
from typing import Final

import msgspec

from torpor.machine.supervisor.folder import ProcessFolder
from torpor.machine.supervisor.guard import Guard
from torpor.machine.supervisor.requests import Requests
from torpor.machine.supervisor.saves import Rescued
from torpor.shared.errors import InvalidInput
from torpor.shared.values import WorkspaceName
from torpor.shared.wire.autosave import Autosave, AutosaveState, LookAtAutosave
from torpor.shared.wire.job import Notice
from torpor.shared.wire.machine import Bye
from torpor.shared.wire.protocol import Envelope, parse_line
from torpor.shared.wire.request import Nothing, parse_request

AUTOSAVES: Final = "autosaves"
TICK_S: Final = 1.0


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
        self._guard = Guard(request.notices, save, self._requests.wake, rests=True)
        self._shuts_down = self._leaving = False
        signal.signal(signal.SIGTERM, self._shut_down)
        self._state = AutosaveState(lives=True, interval_s=request.book.every_s)
        self._heard: deque[tuple[float, float]] = deque()  # of saves that have not ended
        self._stored_s = time.monotonic()
        self._hand_over(request)

    def run(self) -> None:
        while not self._done():
            saves = self._guard.saves_now
            self._requests.wait(TICK_S if saves else min(TICK_S, self._guard.schedule.wait_s))
            if self._shuts_down:
                self._shuts_down = False
                words = "the machine shuts down: the autosave process got SIGTERM"
                self._guard.hear(Notice("signal", words, time.time()))
            else:
                self._guard.save_if_due()
            for news in self._guard.news():
                if isinstance(news, Notice):
                    self._heard.append((news.at_unix, time.monotonic()))
                elif isinstance(news, Rescued):
                    self._hear(news)

    def _hear(self, done: Rescued) -> None:
        began_unix, began_s = self._heard.popleft()  # saves end in the order of what asked for them
        if done.gave_way:
            return
        replace, schedule = msgspec.structs.replace, self._guard.schedule
        self._state = replace(self._state, error=done.error, interval_s=schedule.interval_s)
        if done.saved is not None or done.unchanged:
            self._stored_s = began_s
            saved = done.saved or self._state.saved
            self._state = replace(self._state, saved=saved, stored_unix=began_unix)

    def _done(self) -> bool:
        if self._folder.is_gone(self._ours):
            return True
        return (self._leaving or self._guard.is_over) and not self._guard.saves_now

    def _shut_down(self, _number: int, _frame: object) -> None:
        self._shuts_down = True

    def _serve(self, asked: Envelope) -> Nothing | AutosaveState:
        if asked.op == LookAtAutosave.op:
            return msgspec.structs.replace(
                self._state,
                left=self._guard.left,
                unsaved_s=time.monotonic() - self._stored_s,
                interval_s=max(self._state.interval_s, self._guard.schedule.gap_s),
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
        until_unix = max((save.grant.expires_unix for save in request.book.saves), default=0)
        self._state = msgspec.structs.replace(
            self._state, until_unix=until_unix, lasts_s=request.book.lasts_s
        )
