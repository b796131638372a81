"""Find processes on this host by their environment, identify them, and end them.

A pid is used again, so a process is its pid and its start time: psutil.Process in memory,
ProcessRecord in a file.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Final

import msgspec
import psutil

from torpor.shared.errors import ProviderError

STARTED_BY: Final = "TORPOR_STARTED_BY"
"""An environment variable of all processes that an installation starts."""
_PR_SET_PDEATHSIG: Final = 1
_libc: Final = ctypes.CDLL(None)
_ROUNDS: Final = 8  # a process that forks while it is searched for is found by a later round
_POLL_S: Final = 0.02
_EXEC_S: Final = 1.0  # a process starts a program in less than a millisecond of its CPU time
_EXEC_POLL_S: Final = 0.001
# The process has gone, or belongs to another account. Any other error (no descriptor left) is no
# answer: taken for one, a process would be left running on a machine that is said to be gone.
_NOT_THERE: Final = (FileNotFoundError, ProcessLookupError, PermissionError)


class ProcessRecord(msgspec.Struct, frozen=True):
    """A process as files name it. Start times count from the boot: keep ``boot_id`` beside it."""

    pid: int
    start_ticks: int


def boot_id() -> str:
    """The name of this boot of the host."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def identify(pid: int) -> ProcessRecord | None:
    """The process that has this pid now; None for none, and for a zombie."""
    facts = _stat(pid)
    return None if facts is None or facts[0] in (b"Z", b"X") else _record(pid, facts)


def is_alive(process: ProcessRecord) -> bool:
    return identify(process.pid) == process


def is_at_work(process: ProcessRecord) -> bool:
    """Whether the process lives and has memory. An exiting process has none, but may still hold its
    port. A process that is starting a program has memory, but for a moment no arguments."""
    facts = _stat(process.pid)
    return facts is not None and _record(process.pid, facts) == process and _has_memory(facts)


def ending_with_this_process() -> Callable[[], None]:
    """For Popen's ``preexec_fn``: the kernel kills the child when this process ends, however that
    ends. Start such a child in the main thread, as the kernel looks at the thread that started it.
    Processes that the child starts are not killed: flow runs outlive their worker."""
    parent = os.getpid()

    def before_exec() -> None:
        # A parent that waits for signals has blocked some.
        signal.pthread_sigmask(signal.SIG_SETMASK, ())
        refused = _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if refused or os.getppid() != parent:  # the parent ended before the kernel was asked
            os._exit(1)

    return before_exec


def is_running(process: psutil.Process) -> bool:
    """Whether the process is neither gone nor a zombie."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def all_processes(*, others_too: bool = False) -> dict[psutil.Process, set[bytes]]:
    """Every process with the ``NAME=value`` words of its environment: of this account's, as any
    account can start a process with any words. ``others_too``: also of those of other accounts that
    we may read, for whoever ends what a machine has left."""
    found = {}
    for pid in psutil.pids():
        with contextlib.suppress(psutil.NoSuchProcess):
            process = psutil.Process(pid)
            words = _environment(pid)
            found[process] = words if not words or others_too or _is_own(pid) else set()
    return found


def _is_own(pid: int) -> bool:
    """Whether the process acts for this account. The owner of its /proc folder does not show that:
    it is root where the process has asked the kernel for it."""
    try:
        status = Path(f"/proc/{pid}/status").read_bytes()
    except _NOT_THERE:
        return False
    _, _, uids = status.partition(b"\nUid:")
    return uids.split()[1:2] == [b"%d" % os.geteuid()]


def with_descendants(
    processes: Iterable[psutil.Process], among: Mapping[psutil.Process, object]
) -> list[psutil.Process]:
    """The live ones of ``processes`` and of all their descendants."""
    parents = {}
    for process in among:
        with contextlib.suppress(psutil.NoSuchProcess):
            parents[process.pid] = process.ppid()
    inside = {process.pid for process in processes}
    while more := {pid for pid, parent in parents.items() if parent in inside} - inside:
        inside |= more
    return [process for process in among if process.pid in inside and is_running(process)]


def end_processes(
    find: Callable[[], list[psutil.Process]], *, polite_s: float = 2.0, hard_s: float = 5.0
) -> None:
    """Send SIGTERM, wait at most ``polite_s``, then send SIGKILL until ``find`` finds nothing.

    ProviderError names those that outlive SIGKILL for ``hard_s``.
    """
    asked = find()
    _signal(asked, signal.SIGTERM)
    _wait(asked, polite_s)
    for _ in range(_ROUNDS):
        left = find()
        if not left:
            return
        _signal(left, signal.SIGKILL)
        _wait(left, hard_s)
    pids = ", ".join(str(process.pid) for process in find())
    if pids:
        raise ProviderError(
            f"processes {pids} on this host outlive SIGKILL (a hung disk or mount?); the machine's "
            "folder is kept: end them and destroy the machine again"
        )


def _environment(pid: int) -> set[bytes]:
    """The ``NAME=value`` words of a process's environment. While a process starts a program, the
    kernel shows neither its environment nor its arguments, so it is looked at again: otherwise it
    would count as another's."""
    end = time.monotonic() + _EXEC_S
    shown = Path(f"/proc/{pid}/environ")
    try:
        while not (words := shown.read_bytes()):
            if not _starts_a_program(pid) or time.monotonic() > end:
                words = shown.read_bytes()  # the program began after the first look
                break
            time.sleep(_EXEC_POLL_S)
        # psutil stops at an empty word, which remains where a program has written its title.
        return set(words.split(b"\0"))
    except _NOT_THERE:
        return set()


def _starts_a_program(pid: int) -> bool:
    facts = _stat(pid)
    has_arguments = Path(f"/proc/{pid}/cmdline").read_bytes() != b""
    return not has_arguments and facts is not None and _has_memory(facts)


def _stat(pid: int) -> list[bytes] | None:
    """The facts of /proc/PID/stat from the state on; None where there is no such process."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_bytes()
    except _NOT_THERE:
        return None
    # The name in parentheses may hold any character, so fields are counted from the last
    # parenthesis.
    return stat[stat.rfind(b")") + 2 :].split()


def _record(pid: int, facts: list[bytes]) -> ProcessRecord:
    # psutil adds the time of the boot to the start time, which changes with the clock.
    return ProcessRecord(pid, int(facts[19]))


def _has_memory(facts: list[bytes]) -> bool:
    return facts[20] != b"0"


def _signal(processes: list[psutil.Process], number: signal.Signals) -> None:
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
            process.send_signal(number)


def _wait(processes: list[psutil.Process], at_most_s: float) -> None:
    # psutil's own wait lasts until a zombie is reaped, which may never happen in a container.
    end = time.monotonic() + at_most_s
    while any(is_running(process) for process in processes) and time.monotonic() < end:
        time.sleep(_POLL_S)
