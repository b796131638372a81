"""How hard chunks are compressed: as hard as the link leaves time for, like ``zstd --adapt``."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Final, NamedTuple

from torpor.shared.codecs.codec import Codec
from torpor.shared.codecs.stock import LZ4, RAW, ZSTD, zstd_at
from torpor.shared.values import Compression


class Step(NamedTuple):
    """How chunks are encoded: text and programs by ``text``, numbers in planes; everything raw
    where ``text`` is raw. ``next_takes``: the next step takes about so many times as long
    (`python -m benchmarks.lines`)."""

    name: str
    text: Codec
    next_takes: float = 1.0


BALANCED: Final = (
    Step("zstd 1", zstd_at(1), next_takes=1.5),
    Step("zstd 3", zstd_at(3), next_takes=2.2),
    Step("zstd 6", zstd_at(6), next_takes=1.8),
    Step("zstd 9", zstd_at(9)),
)
"""From fast to small, without the steps that store far more bytes to save seconds once."""
FASTEST: Final = (Step("raw", RAW), Step("lz4", LZ4, next_takes=1.35), *BALANCED)
"""From fast to small, where time counts more than bytes."""
SMALLEST: Final = (Step("zstd 12", zstd_at(12)),)
"""Where bytes count and time does not: levels above 12 gain under 1 % on chunks of 4 MiB."""


def steps_for(wanted: Compression) -> Sequence[Step]:
    """The steps that a workspace's settings allow."""
    if wanted.smallest:
        return SMALLEST
    return FASTEST if wanted.fastest else BALANCED


_STARTS: Final = ("lz4", "zstd 3")  # not far from any line's best step
_LOOKS: Final = 3  # packs of a step seen before it changes
_MOST_LOOKS: Final = 24
# shares of the time of parts that is spent on sending
_LINK_LIMITS: Final = 0.5  # from here on the link is the limit
_LINK_RESTS: Final = 0.3  # below this the link is not the limit
_CORES_FREE: Final = 0.75  # CPU seconds per second of encoding: from here on cores are free
_CORES_SHORT: Final = 0.6  # CPU seconds per second of encoding: below this encoders wait for a core


class Pace(NamedTuple):
    """Where one pack's time went, in seconds: filling it from ``step`` on, encoding as a part of
    that (by the wall and by the thread's CPU clock), and sending it. ``by_step``: the wall time of
    encoding chunks that another step would encode otherwise."""

    step: Step
    filled: float
    encoded: float
    encoded_cpu: float
    by_step: float
    sent: float


class Effort:
    """The step for the next chunk. Thread-safe; one for each run.

    Two things are watched, pack by pack. Where parts would spend their time on sending even if they
    encoded by the next step, and encoders find free cores, that step costs nothing and the link
    carries more: the run goes one step up. Where sending is quick, or encoders wait for cores, the
    run goes one step down; for want of cores only as far as zstd 1. Both are measured in the
    transfer itself, so neither another process on the machine nor a link that changes needs to be
    known. Packs of weights or noise, which each step encodes alike, say nothing about a step. A run
    that turns around looks twice as long before it turns again.

    ``steps`` go from fast to small; a single one is kept.
    """

    def __init__(self, steps: Sequence[Step] = BALANCED) -> None:
        self._lock = threading.Lock()
        self._steps = steps
        names = [step.name for step in steps]
        self._at = next((names.index(name) for name in _STARTS if name in names), 0)
        self._lowest = self._highest = self._at
        # the lowest step for want of cores: those below save less CPU than the bytes they add cost
        self._floor = next((at for at, step in enumerate(steps) if step in BALANCED), 0)
        self._latest: deque[Pace] = deque(maxlen=_LOOKS)
        self._recent: list[Pace] = []  # packs of this step
        self._looks = _LOOKS
        self._last_turn = 0
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
    def step(self) -> Step:
        return self._steps[self._at]

    def changes(self, code: int) -> bool:
        """Whether the next step up or down encodes a chunk otherwise that got this encoding."""
        below = self._steps[max(0, self._at - 1)]
        return code in (LZ4.code, ZSTD.code) or (code != RAW.code and below.text is RAW)

    def note(self, pace: Pace) -> None:
        """Take one pack's times into account."""
        with self._lock:
            self._filled += pace.filled
            self._sent += pace.sent
            self._latest.append(pace)
            latest = _Times(self._latest)
            self._cores_limit = latest.waiting < _LINK_RESTS or latest.cores < _CORES_SHORT
            if pace.step is self.step and (
                pace.by_step > pace.encoded / 2 or pace.step.text is RAW
            ):
                self._recent.append(pace)
            if len(self._recent) == self._looks:
                self._go(self._turn(_Times(self._recent)))
                self._recent.clear()

    def _turn(self, seen: _Times) -> int:
        """1: a step up. -1: a step down."""
        left = seen.waiting - seen.by_step * (self.step.next_takes - 1)
        if left > _LINK_LIMITS and (seen.cores > _CORES_FREE or self._at < self._floor):
            return 1
        short_of_cores = seen.cores < _CORES_SHORT and self._at > self._floor
        return -1 if seen.waiting < _LINK_RESTS or short_of_cores else 0

    def _go(self, turn: int) -> None:
        at = min(max(self._at + turn, 0), len(self._steps) - 1)
        if at == self._at:
            return
        if turn == -self._last_turn:
            self._looks = min(2 * self._looks, _MOST_LOOKS)
        self._at, self._last_turn = at, turn
        self._lowest, self._highest = min(self._lowest, at), max(self._highest, at)

    @property
    def words(self) -> str:
        """The steps that were taken and why, in words for the run's report."""
        if self._steps is SMALLEST:
            return f"{self.step.name}: the workspace's tuning asks for the fewest bytes"
        with self._lock:
            low, high = self._steps[self._lowest].name, self._steps[self._highest].name
            if not self._sent:
                return "nothing new was encoded"
            waited = self._sent / (self._filled + self._sent)
        names = low if low == high else f"{low} to {high}"
        return f"{names}: parts spent {waited:.0%} of their time on sending"


class _Times:
    """Some packs together. ``waiting`` and ``by_step``: shares of their time; ``cores``: CPU
    seconds per second of encoding."""

    def __init__(self, paces: Collection[Pace]) -> None:
        total = sum(pace.filled + pace.sent for pace in paces) or 1.0
        encoded = sum(pace.encoded for pace in paces)
        self.waiting = sum(pace.sent for pace in paces) / total
        self.by_step = sum(pace.by_step for pace in paces) / total
        self.cores = sum(pace.encoded_cpu for pace in paces) / encoded if encoded else 1.0
