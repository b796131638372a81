"""Hears that the machine will be taken away, and has the workspace saved for each notice. A save
that is due is heard like one."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from queue import Empty, SimpleQueue

from torpor.machine.supervisor.notices import Notices
from torpor.machine.supervisor.saves import Rescued, RescueSaves
from torpor.shared.wire.job import Notice, NoticeSource, StandBy

News = Notice | Rescued


class Guard:
    """Asks the metadata services and makes saves in threads of its own: either may take long.

    ``save`` is the argv of a process that makes one; ``wake`` is called when there is news.
    """

    def __init__(
        self, sources: Sequence[NoticeSource], save: list[str], wake: Callable[[], None]
    ) -> None:
        self._saves = RescueSaves(save)
        self._wake = wake
        self._news: SimpleQueue[News] = SimpleQueue()
        self._unsaved: SimpleQueue[Notice] = SimpleQueue()
        self._lock = threading.Lock()
        self._open = 0  # notices whose save has not ended
        self._stands_until_unix = 0.0
        threading.Thread(target=self._save_for_each, name="saves", daemon=True).start()
        if sources:
            listens = threading.Thread(
                target=self._listen, args=(Notices(sources),), name="notices", daemon=True
            )
            listens.start()

    def stand_by(self, book: StandBy) -> None:
        """Save with what ``book`` gives from now on. It stays in memory."""
        self._saves.stand_by(book)
        self._stands_until_unix = max((save.grant.expires_unix for save in book.saves), default=0)

    def hear(self, notice: Notice) -> None:
        with self._lock:
            self._open += 1
        self._news.put(notice)
        self._unsaved.put(notice)
        self._wake()

    def news(self) -> list[News]:
        """Each notice, with the outcome of its save, that was not returned before."""
        found = []
        while True:
            try:
                found.append(self._news.get_nowait())
            except Empty:
                return found

    @property
    def saves_now(self) -> bool:
        """Whether a save runs or waits, so that news will come."""
        return self._open > 0 or not self._news.empty()

    @property
    def left(self) -> int:
        """How many manifests may still be written."""
        return self._saves.left

    @property
    def stands_by(self) -> bool:
        """Whether it could save: some grant has not ended."""
        return time.time() < self._stands_until_unix

    def _save_for_each(self) -> None:
        while True:
            notice = self._unsaved.get()
            try:
                self._news.put(self._saves.save(notice))
            finally:  # or its supervisor would never leave
                with self._lock:
                    self._open -= 1
                self._wake()

    def _listen(self, notices: Notices) -> None:
        while (wait_s := notices.wait_s) is not None:
            time.sleep(wait_s)
            for notice in notices.poll():
                self.hear(notice)
