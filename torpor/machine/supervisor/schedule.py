"""When a machine saves its workspace by itself."""

from __future__ import annotations

import math
import os
import resource
import time
from contextlib import suppress
from pathlib import Path
from typing import Final

REST: Final = 50.0
"""A save comes this many times as long after the last one as that kept all cores or the line busy,
so that saves take at most 2 % of either."""
MOST_CORES: Final = 8.0
"""More than this no save keeps busy."""
CLOCK_REST: Final = 10.0
"""Also this many times as long as it took: most of what it does besides is reading the disk."""


class SaveSchedule:
    """When the next save is due: so often as is wanted, and, where it ``rests``, seldom enough for
    what the last one took of the ``cores``, of the line and of the clock."""

    def __init__(self, every_s: float, cores: float) -> None:
        self._every_s = every_s or math.inf
        self._cores = cores
        self._rests = True
        self._rest_s = 0.0
        self._last_s: float | None = None
        self._saves = False
        self._began_s = time.monotonic()
        self._cpu_s = 0.0
        self.interval_s = every_s

    def every(self, seconds: float, *, rests: bool) -> None:
        """Seconds between two saves from now on; 0 for none."""
        self._every_s = seconds or math.inf
        self._rests = rests
        if not rests:
            self._rest_s = 0.0

    def restart(self) -> None:
        """Somebody else has stored the workspace: the next save comes a whole interval later."""
        self._began_s = time.monotonic()

    @property
    def gap_s(self) -> float:
        """From the begin of the last save to the next one."""
        return max(self._every_s, self._rest_s)

    @property
    def wait_s(self) -> float:
        """Until the next save is due; 0 from then on."""
        return max(0.0, self._began_s + self.gap_s - time.monotonic())

    def begin(self) -> None:
        """A scheduled save begins."""
        now_s = time.monotonic()
        if self._last_s is not None:
            self.interval_s = now_s - self._last_s
        self._last_s = self._began_s = now_s
        self._saves = True
        self._cpu_s = _cpu_of_saves_s()

    def rest_no_longer(self) -> None:
        """What the last save failed for may be mended, or a run has taken its place."""
        self._rest_s = 0.0

    def end(self, sent_s: float | None) -> None:
        """A save has ended, which was sending for so long; None: nobody knows. One after a notice
        counts for nothing here."""
        if not self._saves:
            return
        self._saves = False
        if not self._rests:
            return
        took_s = time.monotonic() - self._began_s
        cores_s = (_cpu_of_saves_s() - self._cpu_s) / self._cores
        line_s = took_s if sent_s is None else min(sent_s, took_s)
        self._rest_s = max(REST * max(cores_s, line_s), CLOCK_REST * took_s)


def usable_cores(root: Path = Path("/sys/fs/cgroup")) -> float:
    """How many cores a save may count on: a container sees all of its host's, and has a limit at
    most where this one can be read."""
    cores = min(MOST_CORES, float(len(os.sched_getaffinity(0))))
    for names in (("cpu.max",), ("cpu/cpu.cfs_quota_us", "cpu/cpu.cfs_period_us")):
        with suppress(OSError, ValueError, ZeroDivisionError):  # none, or without a limit
            quota, period = " ".join((root / name).read_text() for name in names).split()
            if int(quota) > 0:
                return min(cores, int(quota) / int(period))
    return cores


def _cpu_of_saves_s() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime
