"""What the processes of an installation use: CPU, memory and file handles."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Final

import psutil

from deployments.installation import Installation
from deployments.processes import MARK
from torpor.control.processes import all_processes
from torpor.control.providers.local.folder import MARK as MACHINE_MARK
from torpor.shared.values import MIB

EVERY_S: Final = 1.0
RUN: Final = b"PREFECT__FLOW_RUN_ID="
"""Prefect sets it in the process of each run."""
ROLES: Final = ("supervisor", "server", "worker", "job-worker", "store")


@dataclass
class Used:
    """By one process from the beginning of the measurement until it was last seen. ``of``: a role,
    or the id of its run."""

    of: str
    before_s: float = 0.0
    cpu_s: float = 0.0
    rss_mib: float = 0.0
    most_mib: float = 0.0
    files: int = 0


@dataclass
class Meter:
    """``used``: every process that was ever seen; ``now``: those of the last look."""

    installation: Installation
    used: dict[psutil.Process, Used] = field(default_factory=dict)
    now: list[Used] = field(default_factory=list)

    def look(self) -> None:
        now = []
        for process, words in all_processes().items():
            of = self._of(words)
            with suppress(psutil.Error):
                if of:
                    now.append(self._see(process, of))
        self.now = now

    def _of(self, words: set[bytes]) -> str:
        if any(word.startswith(f"{MACHINE_MARK}=".encode()) for word in words):
            return ""
        run = next((word.removeprefix(RUN) for word in words if word.startswith(RUN)), b"")
        ours = [
            role
            for role in (*ROLES, "register")
            if f"{MARK}={role}@{self.installation.folder}".encode() in words
        ]
        if not ours:
            return ""
        return run.decode() or ours[0]

    def _see(self, process: psutil.Process, of: str) -> Used:
        seen = self.used.setdefault(process, Used(of))
        with process.oneshot():
            times = process.cpu_times()
            seen.cpu_s = times.user + times.system - seen.before_s
            seen.rss_mib = process.memory_info().rss / MIB
            seen.most_mib = max(seen.most_mib, seen.rss_mib)
            seen.files = process.num_fds()
        return seen

    def of(self, *of: str) -> list[Used]:
        """Every process of these roles and runs."""
        return [used for used in [*self.used.values()] if used.of in of]


@contextmanager
def metered(installation: Installation) -> Iterator[Meter]:
    """It looks again and again meanwhile."""
    meter, over = Meter(installation), threading.Event()
    meter.look()
    for used in meter.now:
        used.before_s = used.cpu_s

    def look() -> None:
        while not over.wait(EVERY_S):
            meter.look()

    thread = threading.Thread(target=look)
    thread.start()
    try:
        yield meter
    finally:
        over.set()
        thread.join()
