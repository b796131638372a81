"""The processes of local machines, found in /proc and ended without ever hitting another.

A process is its pid and its start time, because pids are used again. It belongs to a machine if
its environment says ``TORPOR_MACHINE=<id>``, if it is an sshd that has the machine's log open
(sshd writes its title over its environment), or if it descends from the machine's server.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Final, NamedTuple

import msgspec

from torpor.shared.errors import ProviderError
from torpor.shared.values import MachineId

MARK = "TORPOR_MACHINE"
"""The environment variable that every process of a machine inherits."""

_ROUNDS = 8  # a process that forks while it is hunted is caught by a later round
_POLL_S = 0.02
_ENVIRON_MAX_BYTES = 4 << 20
_PF_EXITING: Final = 0x4  # Linux, include/linux/sched.h; zombies have it too
# It has gone, or it is another account's. Anything else (no descriptor left) is no answer at all:
# taken for one, a process would be left running on a machine that is said to be gone.
_NOT_THERE: Final = (FileNotFoundError, ProcessLookupError, PermissionError)


class Process(msgspec.Struct, frozen=True):
    """One process, told apart from a later one with the same pid by its start time."""

    pid: int
    start_ticks: int


def boot_id() -> str:
    """This boot's name: start times count from the boot."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def identify(pid: int) -> Process | None:
    """The process that has this pid now; None for none and for a zombie."""
    stat = _stat(pid)
    return None if stat is None else Process(pid, stat.start_ticks)


def is_alive(process: Process) -> bool:
    return identify(process.pid) == process


def is_at_work(process: Process) -> bool:
    """Whether it is alive and not on its way out: then it runs nothing any more, and holds its
    port all the same until it is a zombie."""
    stat = _stat(process.pid)
    return (
        stat is not None
        and stat.start_ticks == process.start_ticks
        and not stat.flags & _PF_EXITING
    )


def wait_for_end(processes: list[Process], at_most_s: float) -> None:
    end = time.monotonic() + at_most_s
    while any(is_alive(p) for p in processes) and time.monotonic() < end:
        time.sleep(_POLL_S)


def machine_processes(machine: MachineId, log: Path, server: Process | None) -> list[Process]:
    """Every live process of the machine. ``server`` is its SSH server where that is known."""
    marked = f"{MARK}={machine}".encode()
    servers: set[Process] = set()
    found: set[Process] = set()
    parents: dict[int, tuple[int, Process]] = {}
    for pid in _pids():
        stat = _stat(pid)
        if stat is None:
            continue
        process = Process(pid, stat.start_ticks)
        parents[pid] = (stat.parent, process)
        if process == server or _is_sshd_of(pid, log):
            servers.add(process)
        elif marked in _environ(pid):
            found.add(process)
    return sorted(found | servers | _descendants(servers, parents), key=lambda p: p.pid)


def server_processes(machine: MachineId, log: Path) -> list[Process]:
    """The processes that serve or are about to serve SSH for the machine."""
    marked = f"{MARK}={machine}".encode()
    found = []
    for pid in _pids():
        process = identify(pid)
        if process is None:
            continue
        ours = b"torpor.control.providers.asyncssh_host" in _cmdline(pid) and marked in _environ(
            pid
        )
        if ours or _is_sshd_of(pid, log):
            found.append(process)
    return found


def end_processes(
    find: Callable[[], list[Process]], *, polite_s: float = 2.0, hard_s: float = 5.0
) -> None:
    """SIGTERM, at most ``polite_s``, then SIGKILL until ``find`` finds nothing.

    ProviderError names those that outlive SIGKILL for ``hard_s``.
    """
    asked = find()
    _signal(asked, signal.SIGTERM)
    wait_for_end(asked, polite_s)
    for _ in range(_ROUNDS):
        left = find()
        if not left:
            return
        _signal(left, signal.SIGKILL)
        wait_for_end(left, hard_s)
    pids = ", ".join(str(p.pid) for p in find())
    if pids:
        raise ProviderError(
            f"processes {pids} on this host outlive SIGKILL (a hung disk or mount?); the machine's "
            "folder is kept: end them and destroy the machine again"
        )


def _signal(processes: Iterable[Process], number: signal.Signals) -> None:
    for process in processes:
        # A pidfd names this very process: between the look and the signal the pid cannot pass on.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            fd = os.pidfd_open(process.pid)
            try:
                if is_alive(process):
                    signal.pidfd_send_signal(fd, number)
            finally:
                os.close(fd)


def _descendants(of: set[Process], parents: dict[int, tuple[int, Process]]) -> set[Process]:
    inside = {p.pid for p in of}
    grew = True
    while grew:
        more = {pid for pid, (parent, _) in parents.items() if parent in inside} - inside
        inside |= more
        grew = bool(more)
    return {parents[pid][1] for pid in inside if pid in parents}


def _is_sshd_of(pid: int, log: Path) -> bool:
    """sshd, or sshd-session and sshd-auth of newer ones, with the machine's log open."""
    try:
        program = os.path.basename(os.readlink(f"/proc/{pid}/exe"))
        if not program.startswith("sshd"):
            return False
        told = os.fspath(log)
        fds = f"/proc/{pid}/fd"
        return any(os.readlink(f"{fds}/{fd}") == told for fd in os.listdir(fds))
    except _NOT_THERE:
        return False


def _pids() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]


class _Stat(NamedTuple):
    parent: int
    flags: int
    start_ticks: int


def _stat(pid: int) -> _Stat | None:
    """What the kernel says of it; None where there is no such process or only its zombie."""
    try:
        raw = Path(f"/proc/{pid}/stat").read_bytes()
    except _NOT_THERE:
        return None
    # The name in parentheses may hold anything, so count from the last one.
    fields = raw[raw.rfind(b")") + 2 :].split()
    if fields[0] in (b"Z", b"X"):
        return None
    return _Stat(int(fields[1]), int(fields[6]), int(fields[19]))


def _environ(pid: int) -> list[bytes]:
    return _words(f"/proc/{pid}/environ")


def _cmdline(pid: int) -> list[bytes]:
    return _words(f"/proc/{pid}/cmdline")


def _words(path: str) -> list[bytes]:
    try:
        with open(path, "rb") as file:
            return file.read(_ENVIRON_MAX_BYTES).split(b"\0")
    except _NOT_THERE:
        return []
