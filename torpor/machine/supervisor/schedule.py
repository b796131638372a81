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
"""The next save begins at least 50 times as long after the last one as the last one kept all cores
or the line busy: saves use at most 2 % of the CPU or of the upload bandwidth."""
MOST_CORES: Final = 8.0
"""No save uses more cores than this."""
CLOCK_REST: Final = 10.0
"""The next save also begins at least 10 times as long after the last one as that took by the clock,
most of which is reading the disk."""


class SaveSchedule:
    """When the next save is due: as often as wanted, and, where the schedule ``rests``, rarely
    enough for what the last save took of the ``cores``, of the line and of the clock."""

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
        """Set the seconds between two saves from now on; 0 for none."""
        self._every_s = seconds or math.inf
        self._rests = rests
        if not rests:
            self._rest_s = 0.0

    def restart(self) -> None:
        """Count a whole interval from now on, because somebody else has stored the workspace."""
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
        """Note that a scheduled save begins."""
        now_s = time.monotonic()
        if self._last_s is not None:
            self.interval_s = now_s - self._last_s
        self._last_s = self._began_s = now_s
        self._saves = True
        self._cpu_s = _cpu_of_saves_s()

    def rest_no_longer(self) -> None:
        """Save at the next tick: the cause of the last failure may be gone, or a run has replaced
        the save."""
        self._rest_s = 0.0

    def end(self, sent_s: float | None) -> None:
        """Note that a save has ended. ``sent_s``: seconds in which it was sending; None: unknown. A
        save after a notice does not change the schedule."""
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
    """How many cores a save may count on. A container sees all cores of its host; its limit counts
    where it can be read."""
    cores = min(MOST_CORES, float(len(os.sched_getaffinity(0))))
    for names in (("cpu.max",), ("cpu/cpu.cfs_quota_us", "cpu/cpu.cfs_period_us")):
        # no limit is set, or none can be read
        with suppress(OSError, ValueError, ZeroDivisionError):
            quota, period = " ".join((root / name).read_text() for name in names).split()
            if int(quota) > 0:
                return min(cores, int(quota) / int(period))
    return cores


def _cpu_of_saves_s() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime
