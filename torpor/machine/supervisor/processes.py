"""The processes of a job: which they are, and their end.

A pid is used again, so a process is its pid and its start time. A job's processes are those of the
session that its command began, and those that carry its mark in their environment: a launcher of
workers may give each a session of its own.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Final

import msgspec

from torpor.machine.sampler.ring import boot_id
from torpor.shared.errors import MachineError

MARK: Final = "TORPOR_JOB_FOLDER"
"""The environment variable that every process of a job inherits; it holds the job's folder."""
HARD_S: Final = 10.0
"""A process that got SIGKILL is gone within this time, or hangs in the kernel."""
_QUICKEST_S: Final = 0.01
_SLOWEST_S: Final = 0.25  # a look reads two files for each process of the machine
_GONE: Final = (FileNotFoundError, ProcessLookupError, PermissionError)


class ProcessId(msgspec.Struct, frozen=True):
    """A process as a file names it. ``ticks``: its start, counted from the boot."""

    pid: int
    ticks: int
    boot: str

    @property
    def lives(self) -> bool:
        """Whether it runs now. A zombie has ended."""
        found = _look(self.pid)
        return found is not None and self._is(found) and not found.ended

    @property
    def began_s(self) -> float:
        """When it started, on the boot clock."""
        return self.ticks / os.sysconf("SC_CLK_TCK")

    def may_lead(self) -> bool:
        """Whether processes of its session may be left, and be no other's. The kernel gives its pid
        to no other process as long as one of its session lives."""
        found = _look(self.pid)
        return self.boot == boot_id() and (found is None or self._is(found))

    def _is(self, found: _Seen) -> bool:
        return (self.ticks, self.boot) == (found.ticks, boot_id())


class _Seen(msgspec.Struct, frozen=True):
    ticks: int
    session: int
    ended: bool


def identify(pid: int) -> ProcessId:
    """The process that has this pid now, which may have ended unless nobody waited for it;
    ProcessLookupError for none."""
    found = _look(pid)
    if found is None:
        raise ProcessLookupError(f"there is no process {pid}")
    return ProcessId(pid, found.ticks, boot_id())


def of_job(folder: Path, command: ProcessId | None) -> list[int]:
    """The live processes of the job of that folder, whose newest command was ``command``."""
    mark = f"{MARK}={folder}".encode()
    session = command.pid if command is not None and command.may_lead() else None
    found = []
    for pid in (int(name) for name in os.listdir("/proc") if name.isdigit()):
        seen = _look(pid)
        if seen is None or seen.ended:
            continue
        if seen.session == session or mark in _environment(pid):
            found.append(pid)
    return found


def end_processes(find: Callable[[], list[int]], grace_s: float, check: Callable[[], None]) -> None:
    """SIGTERM; after ``grace_s`` SIGKILL, until ``find`` finds nothing. ``check`` may raise.

    MachineError names those that outlive SIGKILL for HARD_S.
    """
    asked: set[int] = set()
    pause_s = _QUICKEST_S
    give_up = time.monotonic() + grace_s
    while left := find() or find():  # one that forks and ends may hide its child from one look
        check()
        late_s = time.monotonic() - give_up
        if late_s >= HARD_S:
            raise MachineError(
                f"processes {', '.join(map(str, left))} of a job outlive SIGKILL: they hang in the "
                "kernel (a disk or mount that does not answer?), or belong to another user. End "
                "them on the machine, then run it again"
            )
        for number in (signal.SIGTERM, signal.SIGCONT):  # one that is stopped hears nothing else
            _send(set(left) - asked, number)
        asked.update(left)
        if late_s >= 0:
            _send(left, signal.SIGKILL)
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, _SLOWEST_S)


def _send(pids: Iterable[int], number: signal.Signals) -> None:
    for pid in pids:
        with suppress(ProcessLookupError, PermissionError):
            os.kill(pid, number)


def _look(pid: int) -> _Seen | None:
    try:
        stat = Path(f"/proc/{pid}/stat").read_bytes()
    except _GONE:
        return None
    # The name in parentheses may hold anything, so count from the last one.
    facts = stat[stat.rfind(b")") + 2 :].split()
    threads = int(facts[17])  # the first one of a program may end before the others
    return _Seen(int(facts[19]), int(facts[3]), facts[0] in (b"Z", b"X") and threads < 2)


def _environment(pid: int) -> list[bytes]:
    try:
        return Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except _GONE:
        return []
