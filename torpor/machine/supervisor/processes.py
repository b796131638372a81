"""The processes of a job: which they are, and their end.

A pid is used again, so a process is its pid and its start time. A job's processes are those of the
session that its command began, those that carry its mark in their environment, and what descends
from its supervisor. The supervisor adopts the orphans of its command, which may have left the
session and cleared the environment.
"""

from __future__ import annotations

import ctypes
import os
import signal
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final

import msgspec

from torpor.machine.sampler.ring import boot_id
from torpor.shared.errors import MachineError

MARK: Final = "TORPOR_JOB_FOLDER"
"""The environment variable that every process of a job inherits; it holds the job's folder."""
OWN_MARK: Final = "TORPOR_SUPERVISOR_FOLDER"
"""The environment variable of a supervisor and of an autosave process, which are no processes of a
job; it holds the process's folder, which a command may remove."""
HARD_S: Final = 10.0
"""Seconds within which a process that got SIGKILL is gone, or hangs in the kernel."""
_QUICKEST_S: Final = 0.01
_SLOWEST_S: Final = 0.25  # a look reads two files for each process of the machine
_PR_SET_CHILD_SUBREAPER: Final = 36
_GONE: Final = (FileNotFoundError, ProcessLookupError, PermissionError)


class ProcessId(msgspec.Struct, frozen=True):
    """A process as a file names it: its pid, and in ``ticks`` its start since the boot."""

    pid: int
    ticks: int
    boot: str

    @property
    def lives(self) -> bool:
        """Whether the process runs now. A zombie has ended."""
        found = _look(self.pid)
        return found is not None and self._is(found) and not found.ended

    @property
    def began_s(self) -> float:
        """When the process started, on the boot clock."""
        return self.ticks / os.sysconf("SC_CLK_TCK")

    def may_lead(self) -> bool:
        """Whether other processes of its session may be left. The kernel gives a pid to no other
        process while one of its session lives."""
        found = _look(self.pid)
        return self.boot == boot_id() and (found is None or self._is(found))

    def _is(self, found: _Seen) -> bool:
        return (self.ticks, self.boot) == (found.ticks, boot_id())


class _Seen(msgspec.Struct, frozen=True):
    ticks: int
    parent: int
    session: int
    ended: bool
    stopped: bool


def identify(pid: int) -> ProcessId:
    """The process that has this pid now. Only a process that somebody waits for cannot have ended
    meanwhile. ProcessLookupError for none."""
    found = _look(pid)
    if found is None:
        raise ProcessLookupError(f"there is no process {pid}")
    return ProcessId(pid, found.ticks, boot_id())


def of_job(folder: Path, command: ProcessId | None, supervisor: ProcessId | None) -> list[int]:
    """The live processes of the job of that folder, of which these are the newest command and the
    newest supervisor."""
    mark = f"{MARK}={folder}".encode()
    session = command.pid if command is not None and command.may_lead() else None
    within = _own_namespace(command) if command is not None else None
    seen = _look_at_all()
    children = _of_supervisor(seen, folder, supervisor)
    return [
        pid
        for pid, process in seen.items()
        if pid in children
        or process.session == session
        or (mark in _environment(pid) and _is_own(pid))
        or (within is not None and _namespace(pid) == within)
    ]


def own_processes(folder: Path) -> list[int]:
    """The live supervisors, or autosave processes, of that folder."""
    own_mark = f"{OWN_MARK}={folder}".encode()
    return [pid for pid in _look_at_all() if own_mark in _environment(pid) and _is_own(pid)]


def own_folders(parent: Path) -> set[Path]:
    """The folders in ``parent`` whose processes live, whether these folders are there or not."""
    mark = f"{OWN_MARK}={parent}/".encode()
    found = set()
    for pid in _look_at_all():
        names = [one for one in _environment(pid) if one.startswith(mark)]
        if names and _is_own(pid):
            found |= {parent / os.fsdecode(name[len(mark) :]) for name in names}
    return found


def kill(pids: Iterable[int]) -> None:
    """Send SIGKILL to each of the processes that sees the same file systems as this process: in a
    container, the same path is another folder."""
    here = _mounts(os.getpid())
    _send([pid for pid in pids if _mounts(pid) == here], signal.SIGKILL)


def descendants(pid: int) -> set[int]:
    """The live children of a process, and theirs."""
    return _descendants(_look_at_all(), pid)


def resident_bytes(pids: Iterable[int]) -> int:
    """The bytes of memory that these processes hold at most. Shared pages count for each
    process."""
    pages = 0
    for pid in pids:
        with suppress(*_GONE):
            pages += int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def are_stopped(pids: Sequence[int]) -> bool:
    """Whether there are any processes, and all of them are stopped."""
    looks = [_look(pid) for pid in pids]
    return bool(looks) and all(look is not None and look.stopped for look in looks)


def of_supervisor(folder: Path, supervisor: ProcessId) -> list[int]:
    """The live processes that descend from the supervisor, which are the job's."""
    return sorted(_of_supervisor(_look_at_all(), folder, supervisor))


def adopt_orphans() -> None:
    """Make this process the parent of each descendant whose own parent ends. A kernel that refuses
    gives them to init."""
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def reap_orphans(command: int | None) -> bool:
    """Reap the ended children of this process, except ``command``, for which others wait. Returns
    whether any child is left."""
    try:
        while found := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT):
            if found.si_pid == command:
                break
            os.waitpid(found.si_pid, os.WNOHANG)
    except ChildProcessError:
        return False
    return True


def end_processes(find: Callable[[], list[int]], grace_s: float, check: Callable[[], None]) -> None:
    """SIGTERM; after ``grace_s`` SIGKILL, until ``find`` finds nothing. ``check`` may raise.

    MachineError names those that outlive SIGKILL for HARD_S.
    """
    asked: set[int] = set()
    pause_s = _QUICKEST_S
    give_up = time.monotonic() + grace_s
    # a process that forks and ends may hide its child from one look
    while left := find() or find():
        check()
        late_s = time.monotonic() - give_up
        if late_s >= HARD_S:
            raise MachineError(
                f"processes {', '.join(map(str, left))} of a job outlive SIGKILL: they hang in the "
                "kernel (a disk or mount that does not answer?), or belong to another user. End "
                "them on the machine, then run it again"
            )
        for number in (signal.SIGTERM, signal.SIGCONT):  # a stopped process handles no other signal
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


def _of_supervisor(seen: dict[int, _Seen], folder: Path, supervisor: ProcessId | None) -> set[int]:
    """The processes of a supervisor, without the save that one of an older bundle makes."""
    if supervisor is None or not supervisor.lives:
        return set()
    own_mark = f"{OWN_MARK}={folder}".encode()
    found = _descendants(seen, supervisor.pid)
    return {pid for pid in found if own_mark not in _environment(pid)}


def _descendants(seen: dict[int, _Seen], pid: int) -> set[int]:
    found, parents = set[int](), {pid}
    while parents:
        parents = {child for child, process in seen.items() if process.parent in parents} - found
        found |= parents
    return found


def _look_at_all() -> dict[int, _Seen]:
    """The processes of this machine that have not ended."""
    looks = {int(name): _look(int(name)) for name in os.listdir("/proc") if name.isdigit()}
    return {pid: seen for pid, seen in looks.items() if seen is not None and not seen.ended}


def _look(pid: int) -> _Seen | None:
    try:
        stat = Path(f"/proc/{pid}/stat").read_bytes()
    except _GONE:
        return None
    # The name in parentheses may hold any character, so fields are counted from the last
    # parenthesis.
    facts = stat[stat.rfind(b")") + 2 :].split()
    threads = int(facts[17])  # the first thread of a program may end before the others
    ended = facts[0] in (b"Z", b"X") and threads < 2
    return _Seen(int(facts[19]), int(facts[1]), int(facts[3]), ended, facts[0] in (b"T", b"t"))


def _own_namespace(command: ProcessId) -> str | None:
    """The PID namespace of a command that has one of its own, as processes that went on have."""
    found = _namespace(command.pid) if command.lives else None
    return None if found == _namespace(os.getpid()) else found


def _namespace(pid: int) -> str | None:
    try:
        return os.readlink(f"/proc/{pid}/ns/pid")
    except _GONE:
        return None


def _mounts(pid: int) -> str | None:
    try:
        return os.readlink(f"/proc/{pid}/ns/mnt")
    except _GONE:
        return None


def _is_own(pid: int) -> bool:
    """Whether the process acts for this account: any account can start a process with any
    environment."""
    try:
        status = Path(f"/proc/{pid}/status").read_bytes()
    except _GONE:
        return False
    _, _, uids = status.partition(b"\nUid:")
    return uids.split()[1:2] == [b"%d" % os.geteuid()]


def _environment(pid: int) -> list[bytes]:
    try:
        return Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except _GONE:
        return []
