"""The store's clock, as the dates of its answers show it.

Clocks of hosts differ, so no host compares its time with one that another host recorded. Records
hold times by the store's clock, which all hosts see.
"""

from __future__ import annotations

import threading
from email.utils import parsedate_to_datetime
from typing import Final

SAME_S: Final = 5.0
"""A smaller difference counts as none: an answer's date is in whole seconds, and it travels."""
QUICK_S: Final = 5.0
"""An answer that took longer says little about the time: the host may have slept meanwhile."""


class StoreClock:
    """By how much the store's clock is ahead of this host's. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._ahead_s = 0.0

    @property
    def ahead_s(self) -> float:
        return self._ahead_s

    def hear(self, date: str, asked_unix: float, answered_unix: float) -> None:
        """An answer carried this date. Both times are by the clock of this host."""
        if not 0 <= answered_unix - asked_unix <= QUICK_S:
            return
        try:
            store_unix = parsedate_to_datetime(date).timestamp()
        except ValueError:
            return
        # The store's clock was within [store, store + 1) at some moment between both times.
        least, most = store_unix - answered_unix, store_unix + 1 - asked_unix
        with self._lock:
            if least - SAME_S <= 0 <= most + SAME_S:
                self._ahead_s = 0.0
            elif not least - SAME_S <= self._ahead_s <= most + SAME_S:
                self._ahead_s = (least + most) / 2
