"""The store's clock, as the dates of its answers show it.

Clocks of hosts differ, so no host compares its time with one that another host recorded. Records
hold times by the store's clock, which all hosts see.
"""

from __future__ import annotations

import logging
import threading
from email.utils import parsedate_to_datetime
from typing import Final

_LOG: Final = logging.getLogger(__name__)

SAME_S: Final = 5.0
"""Seconds of difference that count as none: an answer's date is in whole seconds, and the answer
travels."""
AGAIN_SAME_S: Final = 2.0
"""Seconds below which a difference that counts ends again: otherwise times of a host whose clock is
off by about SAME_S would move now and then."""
QUICK_S: Final = 5.0
"""Seconds from which an answer says little about the time, because the host may have slept
meanwhile."""
MOST_S: Final = 24 * 3600.0
"""Seconds from which a date is no clock. Most stores refuse a signature that is off by 15
minutes."""


class StoreClock:
    """By how much the store's clock is ahead of this host's. Thread-safe.

    A new difference counts once two answers agree on it; a known one stays while answers agree
    with it within SAME_S.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._ahead_s = 0.0
        # the difference that the answer before showed
        self._heard: tuple[float, float] | None = None
        self._any = self._warned = False

    @property
    def ahead_s(self) -> float:
        return self._ahead_s

    @property
    def undecided(self) -> bool:
        """Whether one more answer would show whether the clocks differ."""
        return not self._any or self._heard is not None

    def hear(self, date: str, asked_unix: float, answered_unix: float) -> None:
        """Note that an answer which the store itself has just made carried this date. Both times
        are by the clock of this host."""
        self._any = True
        if not 0 <= answered_unix - asked_unix <= QUICK_S:
            return
        try:
            store_unix = parsedate_to_datetime(date).timestamp()
        except (ValueError, OverflowError):
            return
        # The store's clock was within [store, store + 1) at some moment between both times.
        least, most = store_unix - answered_unix, store_unix + 1 - asked_unix
        with self._lock:
            if max(abs(least), abs(most)) > MOST_S:
                self._warn_once(date)
                return
            same_s = AGAIN_SAME_S if self._ahead_s else SAME_S
            if least - same_s <= 0 <= most + same_s:
                now_s = 0.0
            elif least - SAME_S <= self._ahead_s <= most + SAME_S:
                now_s = self._ahead_s
            else:
                now_s = (least + most) / 2
            before, self._heard = self._heard, None
            if now_s == self._ahead_s:
                return
            if before is not None and before[0] <= most + SAME_S and least - SAME_S <= before[1]:
                self._ahead_s = now_s
            else:
                self._heard = (least, most)

    def _warn_once(self, date: str) -> None:
        if not self._warned:
            self._warned = True
            _LOG.warning(
                "an answer of the store is dated %r, more than %.0f h from this host's time: no "
                "difference of clocks is counted from it. Set the clock that is wrong",
                date,
                MOST_S / 3600,
            )
