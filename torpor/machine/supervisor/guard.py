"""Hears that the machine will be taken away, and has the workspace saved for each notice and when
a save is due."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Final

import msgspec

from torpor.machine.checkpoint.tree import frozen_for
from torpor.machine.supervisor.freezing import NOTICES, Freeze, why_too_late
from torpor.machine.supervisor.notices import Notices
from torpor.machine.supervisor.saves import Rescued, RescueSaves
from torpor.machine.supervisor.schedule import Schedule, usable_cores
from torpor.shared.wire.job import Notice, NoticeSource, StandBy


class Frozen(msgspec.Struct, frozen=True):
    """What became of the save with the frozen command; its ``error`` says why there is none."""

    done: Rescued


News = Notice | Rescued | Frozen


class Guard:
    """Asks the metadata services and makes saves in threads of its own: either may take long.

    ``save`` is the argv of a process that makes one; ``wake`` is called when there is news.
    ``freeze``: how the command is frozen where there is time for it, ``held_bytes``: its memory.
    ``rests``: scheduled saves take little of the machine. Its methods are called on one thread.
    """

    def __init__(
        self,
        sources: Sequence[NoticeSource],
        save: list[str],
        wake: Callable[[], None],
        freeze: Freeze | None = None,
        held_bytes: Callable[[], int] = lambda: 0,
        *,
        rests: bool,
    ) -> None:
        self._saves = RescueSaves(save, is_urgent=lambda: self.is_urgent)
        self.schedule: Final = Schedule(0.0, usable_cores(), rests=rests)
        self._ends_s = 0.0
        self._failed = False
        self._wake = wake
        self._freeze, self._held_bytes = freeze, held_bytes
        self._freezes = self._shuts_down = False
        self._news: SimpleQueue[News] = SimpleQueue()
        self._unsaved: SimpleQueue[Notice] = SimpleQueue()
        self._lock = threading.Lock()
        self._open = self._urgent = 0  # notices whose save has not ended, and those not scheduled
        self.stands_until_unix = 0.0
        """When the last grant ends."""
        threading.Thread(target=self._save_for_each, name="saves", daemon=True).start()
        if sources:
            listens = threading.Thread(
                target=self._listen, args=(Notices(sources),), name="notices", daemon=True
            )
            listens.start()

    def stand_by(self, book: StandBy) -> None:
        """Save with what ``book`` gives from now on. It stays in memory."""
        if not self._saves.has_made(book.known):
            self.schedule.restart()  # somebody else has stored the workspace
        self._saves.stand_by(book)
        self._ends_s = time.monotonic() + book.lasts_s  # this machine's time of day may be wrong
        self.schedule.every(book.every_s)
        if self._failed:
            self.schedule.rest_no_longer()
        self.stands_until_unix = max((save.grant.expires_unix for save in book.saves), default=0)

    def hear(self, notice: Notice) -> None:
        """Have the workspace saved for it. A scheduled save gives way to any other."""
        is_urgent = notice.kind != "schedule"
        with self._lock:
            self._open += 1
            self._urgent += is_urgent
        if is_urgent:
            self._saves.end_scheduled()
        self._news.put(notice)
        self._unsaved.put(notice)
        self._wake()

    def save_if_due(self) -> None:
        """Begin a scheduled save, unless another one runs, or the command stays frozen: what is
        stored after that would lack it."""
        frozen = self._freeze is not None and frozen_for(Path(self._freeze.images)) is not None
        if self.saves_now or frozen or self.is_over or self.schedule.wait_s > 0:
            return
        self.schedule.begin()
        self.hear(Notice("schedule", "a save is due", time.time()))

    def news(self) -> list[News]:
        """Each notice, with the outcome of its save, that was not returned before."""
        found = []
        while True:
            try:
                found.append(self._news.get_nowait())
            except Empty:
                return found
            if isinstance(done := found[-1], Rescued):
                self.schedule.end(done.sent_s)
                if done.gave_way:  # to a run, which stores all of it
                    self.schedule.rest_no_longer()
                else:
                    self._failed = done.saved is None and not done.unchanged

    @property
    def is_urgent(self) -> bool:
        """Whether a save runs or waits that is not scheduled."""
        return self._urgent > 0

    @property
    def saves_now(self) -> bool:
        """Whether a save runs or waits, so that news will come."""
        return self._open > 0 or not self._news.empty()

    def shut_down(self) -> None:
        """The machine shuts down, and the command with it: it is not frozen any more."""
        self._shuts_down = True

    @property
    def freezes_now(self) -> bool:
        """Whether the command is being frozen, or news of that will come."""
        return self._freezes or not self._news.empty()

    @property
    def left(self) -> int:
        """How many manifests may still be written."""
        return self._saves.left

    @property
    def is_over(self) -> bool:
        """Whether the time of the grants is over, by this machine's own measure."""
        return time.monotonic() >= self._ends_s

    @property
    def stands_by(self) -> bool:
        """Whether it could save: some grant has not ended."""
        return time.time() < self.stands_until_unix

    def _save_for_each(self) -> None:
        while True:
            notice = self._unsaved.get()
            try:
                self._save(notice)
            finally:  # or its supervisor would never leave
                with self._lock:
                    self._open -= 1
                    self._urgent -= notice.kind != "schedule"
                self._freezes = False  # the news of it is there
                self._wake()

    def _save(self, notice: Notice) -> None:
        """Save; then, in the time that is left, once more with the command, frozen. A later save
        would lack what is frozen."""
        freeze, began_s = self._freeze, time.monotonic()
        if notice.kind == "schedule" and self.is_urgent:
            self._news.put(Rescued(None, gave_way=True, scheduled=True))
            return
        if freeze is None:
            self._news.put(self._saves.save(notice))
            return
        if frozen_for(Path(freeze.images)) is not None:
            return
        left_s = self._saves.left_s(notice) or 0.0
        done = self._saves.save(notice)
        self._news.put(done)
        if notice.kind not in NOTICES:
            return
        left_s -= time.monotonic() - began_s
        why_not = self._why_not(done, left_s)
        self._freezes = not why_not
        frozen = Rescued(None, why_not) if why_not else self._saves.save(notice, freeze, left_s)
        self._news.put(Frozen(frozen))

    def _why_not(self, done: Rescued, left_s: float) -> str:
        """Why the command is not frozen after that save."""
        if done.saved is None:
            return "the save before it failed"
        if self._shuts_down:
            return "the machine shuts down"
        if not self._saves.sealed:
            return "the save would hold its memory, and nothing seals it"
        held_bytes = self._held_bytes()
        return why_too_late(held_bytes, done.bytes_s, left_s) if held_bytes else "it has ended"

    def _listen(self, notices: Notices) -> None:
        while (wait_s := notices.wait_s) is not None:
            time.sleep(wait_s)
            for notice in notices.poll():
                self.hear(notice)
