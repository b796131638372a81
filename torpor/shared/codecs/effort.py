"""How hard text is compressed: as hard as the link leaves time for, as ``zstd --adapt`` does it."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final, NamedTuple

LEVELS: Final = (1, 3, 6, 9)
"""zstd's levels, from fast to small; a higher one costs about twice the time of the one before."""
SMALLEST_LEVEL: Final = 12
"""The zstd level where bytes count and time does not: levels above 12 gain under 1 % on chunks of 4
MiB."""

_START: Final = LEVELS.index(3)
_LOOKS: Final = 3  # packs seen before the level changes: the first never waits, the last is small
# share of a part's time spent on sending: from here on the link is the limit
_LINK_LIMITS: Final = 0.5
# share of a part's time spent on sending: below this the link is not the limit
_LINK_RESTS: Final = 0.3
_CORES_FREE: Final = 0.75  # CPU seconds per second of encoding: from here on cores are free
_CORES_SHORT: Final = 0.6  # CPU seconds per second of encoding: below this encoders wait for a core


class Pace(NamedTuple):
    """Where one pack's time went, in seconds: filling it, encoding as a part of that (by the wall
    and by the thread's CPU clock), and sending it."""

    filled: float
    encoded: float
    encoded_cpu: float
    sent: float


class Effort:
    """The level for the next chunk. Thread-safe; one for each run.

    Two things are watched, pack by pack. When parts spend their time on sending and encoders still
    find free cores, a slower level costs nothing and the link carries more: the level rises. When
    encoders wait for cores, or sending is quick, it falls. Both are measured in the transfer
    itself, so neither another process on the machine nor a link that changes needs to be known.

    ``smallest`` takes the smallest level at once and stays there.
    """

    def __init__(self, *, smallest: bool = False) -> None:
        self._lock = threading.Lock()
        self._smallest = smallest
        self._step = _START
        self._lowest = self._highest = _START
        self._recent: deque[Pace] = deque(maxlen=_LOOKS)
        self._filled = self._sent = 0.0
        self._cores_limit = False
        # (begin, end) of each pack's sending, in seconds
        self._sendings: list[tuple[float, float]] = []

    @contextmanager
    def sending(self) -> Iterator[None]:
        """Note the time in which one pack is being sent, also if the pack does not arrive."""
        began = time.monotonic()
        try:
            yield
        finally:
            with self._lock:
                self._sendings.append((began, time.monotonic()))

    @property
    def line_s(self) -> float:
        """Seconds in which at least one pack was on its way."""
        with self._lock:
            total = until = 0.0
            for began, ended in sorted(self._sendings):
                total += max(0.0, ended - max(began, until))
                until = max(until, ended)
            return total

    @property
    def cores_limit(self) -> bool:
        """Whether the last packs show that the run waits for its encoders and not for the link."""
        return self._cores_limit

    @property
    def level(self) -> int:
        return SMALLEST_LEVEL if self._smallest else LEVELS[self._step]

    def note(self, pace: Pace) -> None:
        """Take one pack's times into account."""
        with self._lock:
            self._filled += pace.filled
            self._sent += pace.sent
            self._recent.append(pace)
            if len(self._recent) < _LOOKS:
                return
            turn = self._turn()
            self._cores_limit = turn < 0
            step = min(max(self._step + turn, 0), len(LEVELS) - 1)
            if step != self._step:
                self._step = step
                self._lowest, self._highest = min(self._lowest, step), max(self._highest, step)
                # times measured at the old level do not count for the new level
                self._recent.clear()

    @property
    def words(self) -> str:
        """The level that was taken and why, in words for the run's report."""
        if self._smallest:
            return f"zstd {SMALLEST_LEVEL}: the workspace's tuning asks for the fewest bytes"
        with self._lock:
            low, high = LEVELS[self._lowest], LEVELS[self._highest]
            if not self._sent:
                return "nothing new was encoded"
            waited = self._sent / (self._filled + self._sent)
        levels = f"zstd {low}" if low == high else f"zstd {low} to {high}"
        return f"{levels}: parts spent {waited:.0%} of their time on sending"

    def _turn(self) -> int:
        filled = sum(pace.filled for pace in self._recent)
        sent = sum(pace.sent for pace in self._recent)
        encoded = sum(pace.encoded for pace in self._recent)
        waiting = sent / (filled + sent) if filled + sent else 0.0
        cores = sum(pace.encoded_cpu for pace in self._recent) / encoded if encoded else 1.0
        if waiting > _LINK_LIMITS and cores > _CORES_FREE:
            return 1
        return -1 if waiting < _LINK_RESTS or cores < _CORES_SHORT else 0
