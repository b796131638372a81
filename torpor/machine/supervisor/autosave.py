"""The autosave process: one for each workspace of a HOME that is to be saved by itself, apart from
the agent and from everyone who asks.

It holds the newest book in memory only, so it saves while no control side is there: on a schedule,
and when the machine will be taken away. A SIGTERM is a machine that shuts down. While a job's
command runs, it hears for it also without a book, and makes HOME again if that is removed. It
leaves when it has nothing to do any more.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections import deque
from contextlib import suppress
from math import isfinite
from pathlib import Path
from typing import Any, Final

import msgspec

from torpor.machine.supervisor.folder import AutosaveFolder, AutosaveRecord, JobFolder, Kept
from torpor.machine.supervisor.requests import Requests
from torpor.machine.supervisor.save_trigger import Frozen, News, SaveTrigger
from torpor.machine.supervisor.saves import Rescued, SaveDue
from torpor.shared.errors import InvalidInput, TorporError, WorkspaceBusy
from torpor.shared.values import WorkspaceName
from torpor.shared.wire.autosave import (
    Autosave,
    AutosaveState,
    HearForAttempt,
    LookAtAutosave,
)
from torpor.shared.wire.job import Notice
from torpor.shared.wire.machine import Bye
from torpor.shared.wire.protocol import Envelope, parse_line
from torpor.shared.wire.request import Nothing, parse_request

TICK_S: Final = 1.0
MOST_TAKEN: Final = 8
"""How many requests that brought a book are remembered. A session repeats only its last request."""
LEAVES_S: Final = 5.0
"""Seconds for which the process counts as asked to leave. Whoever asked repeats the request, and
may give up."""
BEGINS_S: Final = 300.0
"""Seconds within which a supervisor writes that its command runs (also one that goes on from
images), and its driver gives it a book."""


def autosave(home: Path, lock: int, bundle: str, save: list[str]) -> None:
    """Serve the request that stdin brings, and those that follow. ``lock``: the descriptor of the
    lock of the workspace's folder; ``save``: the argv of a process that saves the workspace. Closes
    stdout once it serves."""
    asked = parse_line(sys.stdin.buffer.read())
    if not isinstance(asked, Envelope):
        raise InvalidInput("autosave is started with a request")
    process = Autosaver(home, lock, bundle, save, asked)
    null = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1):
        os.dup2(null, stream)
    os.close(null)
    process.run()


def refuse_late(request: Autosave, held: str, record: AutosaveRecord) -> None:
    """Refuse a book that may have been on its way for long: one that would replace a book that its
    sender has not seen, and one for a job that is over. ``held``: the job whose book a process
    holds; ``record``: what that process wrote."""
    book = request.book
    if not book.job and held not in ("", request.instead_of):
        raise WorkspaceBusy(
            f"job {held} saves workspace {book.workspace} on this machine by now: look again"
        )
    if book.job and record.job == book.job and record.over:
        raise InvalidInput(f"job {book.job} was stopped on this machine: it saves nothing")


class Autosaver:
    """Saves one workspace. ``asked``: its first request."""

    def __init__(
        self, home: Path, lock: int, bundle: str, save: list[str], asked: Envelope
    ) -> None:
        book = asked.args.get("book", {})
        workspace = asked.args.get("workspace") or book.get("workspace")
        self._home, self._bundle = home, bundle
        self._folder = AutosaveFolder(home, WorkspaceName(str(workspace)))
        self._has_place = True
        self._hold(lock)
        self._requests = Requests(self._folder.listen(), self._serve)
        self._trigger = SaveTrigger(home, save, self._requests.wake)
        self._shuts_down = False
        self._leaves_until_s = 0.0
        signal.signal(signal.SIGTERM, self._shut_down)
        self._state = AutosaveState(lives=True)
        # of saves that have not ended: when the notice came, and when it was heard
        self._heard: deque[tuple[float, float]] = deque()
        self._stored_s = time.monotonic()
        self._record = msgspec.structs.replace(self._folder.read(), saves_until_unix=0.0)
        self._kept: Kept | None = None  # the record of its job, as it was seen last
        self._begins_s = 0.0
        self._is_written = False
        self._look_at_command()  # before a book for another job is used
        self._serve(asked)
        self._look_at_command()

    def run(self) -> None:
        while not self._done():
            self._requests.wait(TICK_S)  # the next due time may be hours away
            if self._shuts_down:
                self._shuts_down, self._trigger.shuts_down = False, True
                words = "the machine shuts down: the autosave process got SIGTERM"
                self._trigger.save_for(Notice("signal", words, time.time()))
            elif not self._is_leaving:
                self._trigger.save_if_due()
            for news in self._trigger.news():
                self._hear(news)
            if not self._is_written:
                self._update()
            self._look_at_command()
            self._look_at_folder()

    def _hear(self, news: News) -> None:
        if isinstance(news, Notice | SaveDue):
            self._heard.append((news.at_unix, time.monotonic()))
            if isinstance(news, Notice):
                why_not = self._trigger.why_never_frozen(self._record.job)
                self._update(notice=news, save_error="", not_frozen=why_not)
        elif isinstance(news, Frozen):
            if news.attempt in (0, self._record.attempt):  # else of one that has ended since
                saved = news.done.saved or self._record.saved
                self._update(saved=saved, not_frozen=news.done.error)
        else:
            began = self._heard.popleft()  # saves end in the order of what asked for them
            if not news.gave_way:
                self._note(news, *began)

    def _note(self, done: Rescued, began_unix: float, began_s: float) -> None:
        replace, schedule = msgspec.structs.replace, self._trigger.schedule
        self._state = replace(self._state, error=done.error, interval_s=schedule.interval_s)
        if done.saved is not None or done.unchanged:
            self._stored_s = began_s
            saved = done.saved or self._state.saved
            self._state = replace(self._state, saved=saved, stored_unix=began_unix)
        saved = done.saved or self._record.saved
        # whether this attempt heard the notice
        heard = not done.scheduled and self._record.notice is not None
        self._update(saved=saved, save_error=done.error if heard else self._record.save_error)

    def _update(self, **changes: Any) -> None:
        """Write the record of the job's attempt; what cannot be written now is tried again at each
        tick."""
        self._record = msgspec.structs.replace(self._record, **changes)
        try:
            self._folder.write(self._record)
        except OSError:
            self._is_written = False
        else:
            self._is_written = True

    # -- its end

    def _done(self) -> bool:
        if not self._has_place:
            return True
        if self._trigger.saves_now:
            return False
        is_unneeded = self._trigger.is_over and not self._is_for_a_command()
        return self._is_leaving or (is_unneeded and self._is_written)

    @property
    def _is_leaving(self) -> bool:
        """Whether somebody waits for the end of this process, and repeats the request."""
        return time.monotonic() < self._leaves_until_s

    def _is_for_a_command(self) -> bool:
        """Whether a command runs, or is about to begin, for which this process hears."""
        kept = self._kept
        if kept is None or kept.state.attempt < self._record.attempt:
            return time.monotonic() < self._begins_s
        return kept.at_work

    def _look_at_command(self) -> None:
        if self._record.job:
            with suppress(TorporError, OSError):
                self._kept = JobFolder(self._home, self._record.job).read() or self._kept

    def _look_at_folder(self) -> None:
        """Make again what somebody has removed, as `rm -rf ~/.*` of a job's command does. If the
        folder is gone for good, this process stays only for a job. What cannot be made now is tried
        again at each tick, unless the directory that contained HOME is gone, too."""
        with suppress(OSError):  # what the folder holds is unknown
            if self._folder.is_whole(self._lock):
                return
            is_for_a_job = self._is_for_a_command() or bool(self._trigger.job)
            stays = is_for_a_job or self._folder.is_locked_by(self._lock)
            self._has_place = stays and self._folder.has_place
            if not self._has_place:
                return
            lock = self._folder.make_again(self._lock)
            if lock is None:
                return
            if lock != self._lock:
                self._hold(lock, self._lock)
            self._requests.listen(self._folder.listen())
            self._update()

    def _hold(self, lock: int, before: int | None = None) -> None:
        """Hold this lock from now on, in place of the lock ``before``. OSError where the name of
        the bundle cannot be written into it, which stays on the disk as long as this process
        lives."""
        os.set_inheritable(lock, False)
        name = f"{self._bundle}\n".encode()
        try:
            os.pwrite(lock, name, 0)  # written first: otherwise a full disk would leave no name
            os.ftruncate(lock, len(name))
        except OSError:
            os.close(lock)
            raise
        if before is not None:
            os.close(before)
        self._lock = lock

    def _shut_down(self, _number: int, _frame: object) -> None:
        self._shuts_down = True

    # -- requests

    def _serve(self, asked: Envelope) -> Nothing | AutosaveState:
        if asked.op == LookAtAutosave.op:
            gap_s = self._trigger.schedule.gap_s
            return msgspec.structs.replace(
                self._state,
                job=self._trigger.job,
                left=self._trigger.left,
                unsaved_s=time.monotonic() - self._stored_s,
                interval_s=max(self._state.interval_s, gap_s) if isfinite(gap_s) else 0.0,
            )
        if asked.op == Autosave.op:
            self._take_book(parse_request(Autosave, asked.args), asked.id)
        elif asked.op == HearForAttempt.op:
            self._attempt(parse_request(HearForAttempt, asked.args))
        elif asked.op == Bye.op:
            self._leaves_until_s = time.monotonic() + LEAVES_S
        else:
            raise InvalidInput("the autosave process does not know what it is asked for")
        return Nothing()

    def _take_book(self, request: Autosave, request_id: str) -> None:
        book = request.book
        self._refuse_unwanted(request)
        # the answer to this request was lost: its grants may be used already
        if request_id in self._record.taken:
            return
        self._leaves_until_s = 0.0
        if book.job:
            self._begins_s = 0.0
            self._begin(book.job, self._attempt_of(book.job))
        self._trigger.listen(request.notices)
        if self._trigger.stand_by(book):
            self._stored_s = time.monotonic()
        until_unix = max((float(save.grant.expires_unix) for save in book.saves), default=0.0)
        self._state = msgspec.structs.replace(
            self._state, until_unix=until_unix, lasts_s=book.lasts_s
        )
        if not book.every_s:  # no save comes that would replace the result of the last one
            self._state = msgspec.structs.replace(self._state, error="")
        taken = [*self._record.taken, request_id][-MOST_TAKEN:]
        saves_until_unix = until_unix if book.job else 0.0
        self._update(notices=request.notices, saves_until_unix=saves_until_unix, taken=taken)

    def _refuse_unwanted(self, request: Autosave) -> None:
        book, record, held = request.book, self._record, self._trigger.job
        refuse_late(request, held, record)
        if not book.job and not held and time.monotonic() < self._begins_s:
            raise WorkspaceBusy(
                f"job {record.job} has just begun on this machine, and its driver gives it a book: "
                "look again"
            )
        if book.job and record.job not in ("", book.job) and (held or self._is_for_a_command()):
            raise InvalidInput(f"job {record.job} has this machine, and job {book.job} does not")

    def _attempt(self, request: HearForAttempt) -> None:
        if request.over:
            if self._trigger.job == request.job:
                self._drop_book()
            if self._record.job == request.job:
                self._begins_s = 0.0
                self._update(over=True)
            return
        self._leaves_until_s = 0.0
        if self._trigger.job not in ("", request.job):
            self._drop_book()
        self._begins_s = time.monotonic() + BEGINS_S
        self._begin(request.job, request.attempt)
        self._trigger.listen(request.notices)
        self._update(notices=request.notices, over=False)

    def _begin(self, job: str, attempt: int) -> None:
        """Begin an attempt. A notice that was heard for another attempt does not count, unless it
        is heard again."""
        if (self._record.job, self._record.attempt) != (job, attempt):
            until_unix = self._record.saves_until_unix if self._record.job == job else 0.0
            taken = self._record.taken
            self._record = AutosaveRecord(job, attempt, saves_until_unix=until_unix, taken=taken)
            self._kept = None
            self._trigger.shuts_down = False
            self._trigger.listen([])

    def _attempt_of(self, job: str) -> int:
        """The newest attempt that this process knows."""
        known = self._record.attempt if self._record.job == job else 0
        with suppress(TorporError, OSError):
            kept = JobFolder(self._home, job).read()
            known = max(known, kept.state.attempt if kept else 0)
        return known

    def _drop_book(self) -> None:
        self._trigger.drop_book()
        self._state = msgspec.structs.replace(self._state, until_unix=0.0, lasts_s=0.0)
        self._update(saves_until_unix=0.0)
