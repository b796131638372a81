"""Hears that the machine will be taken away, and starts a save for each notice and when a scheduled
save is due."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Final

import msgspec

from torpor.machine.checkpoint.tree import frozen_for
from torpor.machine.supervisor.folder import JobFolder, Kept
from torpor.machine.supervisor.freezing import NOTICES, Freeze, why_too_late
from torpor.machine.supervisor.notices import NoticeListener
from torpor.machine.supervisor.processes import descendants, resident_bytes
from torpor.machine.supervisor.saves import Rescued, RescueSaves, SaveCause, SaveDue
from torpor.machine.supervisor.schedule import SaveSchedule, usable_cores
from torpor.shared.errors import TorporError
from torpor.shared.wire.autosave import Book
from torpor.shared.wire.job import Notice, NoticeSource

NOT_PROVEN: Final = "this machine has not proven that processes can be frozen on it"
NOT_KNOWN: Final = "what its supervisor wrote cannot be read"
NO_BOOK: Final = "the machine has no grants for this job"


class Frozen(msgspec.Struct, frozen=True):
    """The result of the save with the frozen command; ``error`` says why there is none.
    ``attempt``: the attempt of that command; 0 where unknown."""

    done: Rescued
    attempt: int = 0


News = SaveCause | Rescued | Frozen


class SaveTrigger:
    """Asks the metadata services and makes saves in threads of its own: either may take long.

    ``save`` is the argv of a process that makes one; ``wake`` is called when there is news. Its
    methods are called on one thread.
    """

    def __init__(self, home: Path, save: list[str], wake: Callable[[], None]) -> None:
        self._home = home
        self._saves = RescueSaves(save, is_urgent=lambda: self.is_urgent)
        self.schedule: Final = SaveSchedule(0.0, usable_cores())
        self._failed = False
        self._wake = wake
        # the machine shuts down and ends the command, which is not frozen any more
        self.shuts_down = False
        self._news: SimpleQueue[News] = SimpleQueue()
        self._unsaved: SimpleQueue[SaveCause] = SimpleQueue()
        self._lock = threading.Lock()
        self._open = self._urgent = 0  # saves that have not ended, and those of them after a notice
        self._sources: list[NoticeSource] = []
        self._notices = NoticeListener([])
        threading.Thread(target=self._save_for_each, name="saves", daemon=True).start()

    def listen(self, sources: Sequence[NoticeSource]) -> None:
        """Listen from now on to the services of ``sources``, which may have sent notices before.
        Services that are listened to already stay."""
        if list(sources) == self._sources:
            return
        self._sources, self._notices = list(sources), NoticeListener(sources)
        listens = threading.Thread(
            target=self._listen, args=(self._notices,), name="notices", daemon=True
        )
        listens.start()

    def stand_by(self, book: Book) -> bool:
        """Save by ``book`` from now on, which stays in memory. Returns whether somebody else has
        stored the workspace since the book before."""
        others = not self._saves.has_made(book.known)
        if others:
            self.schedule.restart()
        self._saves.stand_by(book)
        self.schedule.every(book.every_s, rests=not book.job)
        if self._failed:
            self.schedule.rest_no_longer()
        return others

    def drop_book(self) -> None:
        """Drop the book, so that no further save begins. A running save goes on with its grants."""
        self._saves.stand_by(None)

    def save_for(self, cause: SaveCause) -> None:
        """Start a save for this cause. A scheduled save gives way to any other."""
        is_urgent = isinstance(cause, Notice)
        with self._lock:
            self._open += 1
            self._urgent += is_urgent
        if is_urgent:
            self._saves.end_scheduled()
        self._news.put(cause)
        self._unsaved.put(cause)
        self._wake()

    def save_if_due(self) -> None:
        """Begin a scheduled save, unless another one runs, or the command stays frozen, because a
        later save would lack it."""
        if self.is_over:
            self.drop_book()
        if self.saves_now or self.is_over or self.schedule.wait_s > 0 or self._is_frozen():
            return
        self.schedule.begin()
        self.save_for(SaveDue(time.time()))

    def news(self) -> list[News]:
        """Each cause of a save, with the outcome of its save, that was not returned before."""
        found = []
        while True:
            try:
                found.append(self._news.get_nowait())
            except Empty:
                return found
            if isinstance(done := found[-1], Rescued):
                self.schedule.end(done.sent_s)
                if done.gave_way:  # it gave way to a run, which stores all of the workspace
                    self.schedule.rest_no_longer()
                else:
                    self._failed = done.saved is None and not done.unchanged

    @property
    def job(self) -> str:
        """The job that the grants are for, until they expire; empty without one."""
        return "" if self.is_over else self._saves.job

    @property
    def is_urgent(self) -> bool:
        """Whether a save runs or waits that was not scheduled."""
        return self._urgent > 0

    @property
    def saves_now(self) -> bool:
        """Whether a save runs or waits, so that news will come."""
        return self._open > 0 or not self._news.empty()

    def why_never_frozen(self, job: str) -> str:
        """Why that job's command is not frozen after any notice; empty where it may be frozen, or
        was never meant to be."""
        try:
            kept = JobFolder(self._home, job).read() if job else None
        except (TorporError, OSError):
            return NOT_KNOWN
        if kept is None or kept.freeze is None:
            return ""
        if not kept.freeze.criu:
            return NOT_PROVEN
        return "" if self._saves.job == job else NO_BOOK

    @property
    def left(self) -> int:
        """How many manifests may still be written."""
        return self._saves.left

    @property
    def is_over(self) -> bool:
        """Whether the grants have expired, by this machine's own clock."""
        return self._saves.is_over

    def _command(self) -> Kept | None:
        """The command of the job that the grants are for; None where it is unknown."""
        job = self._saves.job
        try:
            return JobFolder(self._home, job).read() if job else None
        except (TorporError, OSError):
            return None

    def _is_frozen(self) -> bool:
        kept = self._command()
        images = kept.freeze.images if kept and kept.freeze else ""
        return bool(images) and frozen_for(Path(images)) is not None

    def _save_for_each(self) -> None:
        while True:
            cause = self._unsaved.get()
            try:
                self._save(cause)
            finally:  # otherwise the process would never leave
                with self._lock:
                    self._open -= 1
                    self._urgent -= isinstance(cause, Notice)
                self._wake()

    def _save(self, cause: SaveCause) -> None:
        """Save; then, if time is left, save once more with the frozen command. After that no save
        follows, because it would lack the frozen command."""
        kept, began_s = self._command(), time.monotonic()
        scheduled = isinstance(cause, SaveDue)
        if (scheduled and self.is_urgent) or self._is_frozen():
            self._news.put(Rescued(None, gave_way=True, scheduled=scheduled))
            return
        left_s = self._saves.left_s(cause) or 0.0
        done = self._saves.save(cause)
        self._news.put(done)
        if isinstance(cause, SaveDue) or cause.kind not in NOTICES:
            return
        # a caller that waits for this holds back its own saves
        if kept is None and self._saves.job:
            self._news.put(Frozen(Rescued(None, NOT_KNOWN)))
        elif kept is not None and kept.freeze is not None and kept.freeze.criu:
            try:
                frozen = self._save_frozen(kept, kept.freeze, cause, done, began_s + left_s)
            except OSError as error:
                frozen = Rescued(None, f"its processes cannot be looked at: {error}")
            self._news.put(Frozen(frozen, kept.state.attempt))

    def _save_frozen(
        self, kept: Kept, freeze: Freeze, notice: Notice, before: Rescued, ends_s: float
    ) -> Rescued:
        """Save with the frozen command. ``before``: the save without it; ``ends_s``: when the
        machine ends."""
        why_not = self._why_not(kept, before, ends_s - time.monotonic())
        if why_not:
            return Rescued(None, why_not)
        return self._saves.save(notice, freeze, ends_s - time.monotonic())

    def _why_not(self, kept: Kept, done: Rescued, left_s: float) -> str:
        """Why the command is not frozen after that save; empty if it is."""
        if done.saved is None:
            return "the save before it failed"
        if self.shuts_down:
            return "the machine shuts down"
        if not self._saves.sealed:
            return "the save would hold its memory, and nothing seals it"
        command = kept.command
        if not (kept.runs and command.lives):
            return "it has ended"
        # without a supervisor, nobody would report the freeze or keep the images
        if not kept.supervisor.lives:
            return "its supervisor is gone"
        held_bytes = resident_bytes({command.pid, *descendants(command.pid)})
        return why_too_late(held_bytes, done.bytes_s, left_s)

    def _listen(self, notices: NoticeListener) -> None:
        """Listen until other services replace these."""
        while (wait_s := notices.wait_s) is not None and notices is self._notices:
            time.sleep(wait_s)
            found = notices.poll()
            for notice in found if notices is self._notices else ():
                self.save_for(notice)
