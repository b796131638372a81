"""The saves that a machine makes by itself, after a notice or on a schedule: what the autosave
process holds for them, and the process that makes one (agent/rescue.py)."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import IO, Final

import msgspec

from torpor.machine.supervisor.freezing import Freeze
from torpor.machine.supervisor.processes import OWN_MARK
from torpor.shared.values import learned
from torpor.shared.wire.autosave import Book
from torpor.shared.wire.job import LONGEST_NOTICE_S, SPOT_NOTICE_S, Notice, OwnSave
from torpor.shared.wire.protocol import encode_line
from torpor.shared.wire.snapshot import KnownSnapshot

LONGEST_S: Final = 3600.0
"""Seconds after which a save after a notice ends at the latest. A scheduled save ends with its
grants."""
UNKNOWN_S: Final = min(SPOT_NOTICE_S.values())
"""Seconds that the machine is assumed to live if its market does not say: the shortest of all
notices."""
RESERVE: Final = 64
"""Packs that a scheduled save leaves for a save after a notice: 4 GiB."""
REPEAT_S: Final = 5.0
"""Seconds after which a save that should give way is asked again. It needs less time to end."""
_SLACK_S: Final = 60.0


class SaveDue(msgspec.Struct, frozen=True):
    """The schedule's cause of a save, due since ``at_unix``: the machine is not taken away."""

    at_unix: float


SaveCause = Notice | SaveDue
"""What has a machine save by itself: a notice, or the schedule."""


class SaveRequest(msgspec.Struct, frozen=True):
    """What the saving process gets on its standard input. ``book``: a book with one save, and packs
    that no other save uses. ``given_unix``: when the machine got the book, by the machine's clock.
    ``left_s``: how long the machine lives on; None if nobody has said that it ends. ``made``: the
    root hashes (hex) of the saves that were made on the same book. ``scheduled``: the save gives
    way to runs, and an unchanged workspace is not stored. ``freeze``: freeze that job's command
    first, for this save.
    """

    book: Book
    given_unix: float
    left_s: float | None
    made: list[str] = []
    scheduled: bool = False
    freeze: Freeze | None = None


class Rescued(msgspec.Struct, frozen=True):
    """What the saving process prints as one line. ``error``: why there is no save, or what went
    wrong although there is one. ``unchanged``: an earlier snapshot has all of the workspace.
    ``gave_way``: the save gave way to a run, which holds the workspace, or to a notice.
    ``scheduled``: no notice asked for the save. ``packs``: how many grants for packs were used,
    from the first on; None where nobody knows. ``unsent``: no manifest was sent. ``bytes_s``: how
    fast it stored what was new; 0 where that was too little to say. ``sent_s``: seconds in which it
    was sending, at most; None where nobody knows."""

    saved: OwnSave | None
    error: str = ""
    unchanged: bool = False
    gave_way: bool = False
    scheduled: bool = False
    packs: int | None = None
    unsent: bool = False
    bytes_s: float = 0.0
    sent_s: float | None = None


class RescueSaves:
    """Holds the newest book, in memory only. Thread-safe.

    The saving process logs to this process's standard error. Each grant is handed out once, before
    its process starts: a second manifest of a name, or a second pack, would replace what an earlier
    save wrote.
    """

    def __init__(
        self,
        start: list[str],
        now: Callable[[], float] = time.time,
        is_urgent: Callable[[], bool] = lambda: False,
    ) -> None:
        """``is_urgent``: whether a notice waits for its save, to which a scheduled save gives
        way."""
        self._start = start
        self._now = now
        self._is_urgent = is_urgent
        self._scheduled: subprocess.Popen[bytes] | None = None  # the process of a scheduled save
        self._lock = threading.Lock()
        self._saving = threading.Lock()
        self._book: Book | None = None
        self._given_unix = 0.0
        self._ends_s = 0.0
        self._made: list[str] = []

    def stand_by(self, book: Book | None) -> None:
        """Replace the book. A running save goes on with its grants."""
        with self._lock:
            self._book, self._given_unix, self._made = book, self._now(), []
            # by a monotonic clock, because this machine's time of day may be wrong
            self._ends_s = time.monotonic() + book.lasts_s if book else 0.0

    @property
    def is_over(self) -> bool:
        """Whether the book's grants have expired, or there is none."""
        return time.monotonic() >= self._ends_s

    def has_made(self, known: Sequence[KnownSnapshot]) -> bool:
        """Whether the newest of the ``known`` snapshots is one that the present book knows, or a
        save on that book."""
        with self._lock:
            book = self._book
            before = set() if book is None else {one.root for one in book.known[:1]}
            return {one.root for one in known[:1]} <= before | set(self._made)

    @property
    def job(self) -> str:
        """The job that the book is for; empty without one."""
        with self._lock:
            return self._book.job if self._book else ""

    @property
    def left(self) -> int:
        """How many manifests may still be written."""
        with self._lock:
            return len(self._book.saves) if self._book else 0

    @property
    def sealed(self) -> bool:
        """Whether saves are sealed, so that nobody but the user can read them."""
        with self._lock:
            return self._book is not None and self._book.key is not None

    def save(
        self,
        cause: SaveCause,
        freeze: Freeze | None = None,
        left_s: float | None = None,
    ) -> Rescued:
        """Save the workspace; waits for a save that runs, and returns when the process has ended.
        ``freeze``: save with the frozen command, within the ``left_s`` that the machine lives on.
        Never raises for a failure of the process, or of its start."""
        with self._saving:
            asked = self._request_for(cause)
            if asked is not None and freeze is not None:
                book = msgspec.structs.replace(asked.book, save_argv=[])
                asked = msgspec.structs.replace(asked, book=book, freeze=freeze, left_s=left_s)
            if asked is None:
                return Rescued(
                    None,
                    "the machine cannot save by itself: the control side has given no grants "
                    "for it, or they have ended, or all of them are used",
                )
            done = self._run(asked)
            self._take_back(asked, done)
            return msgspec.structs.replace(done, scheduled=asked.scheduled)

    def end_scheduled(self) -> None:
        """Let a scheduled save that is under way give way; what it has stored is in the journal."""
        with self._lock:
            if self._scheduled is not None:
                self._scheduled.terminate()

    def _request_for(self, cause: SaveCause) -> SaveRequest | None:
        """The next save, with half of the packs that are left; the last one gets all of them. A
        scheduled save leaves only RESERVE packs, so that a first save of many GiB can store
        much."""
        with self._lock:
            book = self._book
            # an expired book would pause programs for a save that every store refuses
            if book is None or not book.saves or self.is_over:
                return None
            scheduled = isinstance(cause, SaveDue)
            share = len(book.packs) if len(book.saves) == 1 else (len(book.packs) + 1) // 2
            if scheduled:
                share = max(share, len(book.packs) - RESERVE)
            replace = msgspec.structs.replace
            self._book = replace(book, saves=book.saves[1:], packs=book.packs[share:])
            mine = replace(book, saves=book.saves[:1], packs=book.packs[:share])
            left_s = self.left_s(cause)
            # without a job, nobody's work is paused for the save
            if not book.job and left_s is None:
                mine = replace(mine, save_argv=[])
            return SaveRequest(mine, self._given_unix, left_s, list(self._made), scheduled)

    def _take_back(self, asked: SaveRequest, done: Rescued) -> None:
        """Keep the grants that the save has certainly not used, unless there is a new book."""
        with self._lock:
            if self._book is None or self._given_unix != asked.given_unix:
                return
            if done.saved is not None:
                self._made.append(done.saved.root)
            packs = [] if done.packs is None else asked.book.packs[done.packs :]
            saves = asked.book.saves if done.unsent else []
            self._book = msgspec.structs.replace(
                self._book, saves=[*saves, *self._book.saves], packs=[*packs, *self._book.packs]
            )

    def left_s(self, cause: SaveCause) -> float | None:
        """Seconds that the machine lives on; None if no notice says that it ends."""
        if isinstance(cause, SaveDue) or cause.kind == "aws-rebalance":
            return None
        if cause.until_unix is None:
            return UNKNOWN_S
        left_s = cause.until_unix - self._now()
        longest_s = LONGEST_NOTICE_S.get(cause.kind, UNKNOWN_S)
        if not -_SLACK_S <= left_s <= longest_s + _SLACK_S:
            return UNKNOWN_S  # this machine's clock may differ from the market's
        return max(left_s, 0.0)

    def _run(self, asked: SaveRequest) -> Rescued:
        longest_s = asked.book.lasts_s if asked.scheduled else LONGEST_S
        try:
            process = subprocess.Popen(
                self._start,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                cwd="/",  # HOME, where this process began, may have been removed
                env={name: value for name, value in os.environ.items() if name != OWN_MARK},
                start_new_session=True,
            )
        except OSError as error:
            return Rescued(None, f"the machine's own save could not be started: {error}")
        with self._lock:
            self._scheduled = process if asked.scheduled else None
        if asked.scheduled and self._is_urgent():
            process.terminate()
        try:
            said = self._answer(process, asked, longest_s)
        finally:
            with self._lock:
                self._scheduled = None
        if said is None:
            return Rescued(
                None, f"the machine's own save took over {longest_s:.0f} s and was ended"
            )
        try:
            return msgspec.convert(json.loads(said), learned(Rescued))
        except ValueError:
            # it was ended before it handled the signal
            if asked.scheduled and process.returncode == -signal.SIGTERM:
                return Rescued(None, gave_way=True, packs=0, unsent=True)
            return Rescued(
                None,
                f"the machine's own save ended with status {process.returncode} and did not say "
                "what it did",
            )

    def _answer(
        self, process: subprocess.Popen[bytes], asked: SaveRequest, longest_s: float
    ) -> bytes | None:
        """What the process prints; None where it was ended because it took ``longest_s``. A process
        that should give way to a notice gets SIGTERM repeatedly, because it may miss one sent
        before it handles the signal."""
        give_up_s = time.monotonic() + longest_s
        line = encode_line(msgspec.to_builtins(asked))
        its_input, process.stdin = process.stdin, None  # communicate() loses the rest at a timeout
        threading.Thread(target=_tell, args=(its_input, line), name="asked", daemon=True).start()
        while True:
            left_s = give_up_s - time.monotonic()
            try:
                return process.communicate(timeout=min(REPEAT_S, max(0.0, left_s)))[0]
            except subprocess.TimeoutExpired:
                if left_s <= REPEAT_S:
                    process.kill()
                    process.communicate()
                    return None
                if asked.scheduled and self._is_urgent():
                    process.terminate()


def _tell(its_input: IO[bytes], line: bytes) -> None:
    """Send the request on a thread: a pipe takes 64 KiB, and a process on a busy machine reads them
    only once it has started."""
    with suppress(BrokenPipeError), its_input:  # the process has ended
        its_input.write(line)
