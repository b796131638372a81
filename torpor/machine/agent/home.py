"""The agent's folder HOME on the machine. A marker file in it says that the folder is torpor's."""

from __future__ import annotations

import fcntl
import os
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

from torpor.machine.supervisor.marker import MARKER, mark_home
from torpor.shared.errors import AgentLost, InvalidInput, MachineUnfit

SOCKET: Final = "agent.sock"  # connected to by its relative name: sun_path holds 108 bytes
START_LOCK: Final = "agent.start"
LIFE_LOCK: Final = "agent.alive"
"""A file that is locked as long as the agent lives. It holds the process id, and ``busy`` while a
run is active."""
BUNDLES: Final = "bundles"


def enter_home(home: Path) -> Path:
    """Make ``home`` if it is missing, check that it is ours and private, and chdir to it.

    Returns its absolute path. A folder with something in it and without our marker is refused.
    """
    if not home.is_absolute():
        raise InvalidInput(f"the agent's folder {home} must be an absolute path")
    home.mkdir(mode=0o700, parents=True, exist_ok=True)
    os.chdir(home)
    facts = os.stat(".")
    if facts.st_uid != os.geteuid():
        raise MachineUnfit(
            f"the agent's folder {home} belongs to user {facts.st_uid}, not to {os.geteuid()}"
        )
    # listed before the look for the marker, which another start may make meanwhile
    found = os.listdir(".")
    if not os.path.lexists(MARKER):
        if any(name != BUNDLES for name in found):
            raise MachineUnfit(
                f"the agent's folder {home} holds files that are not torpor's: name another one"
            )
        mark_home(home)
    if stat.S_IMODE(facts.st_mode) != 0o700:
        os.chmod(".", 0o700)
    return home


@contextmanager
def start_lock(home: Path, timeout_s: float) -> Iterator[None]:
    """Hold the lock to start an agent here; AgentLost if another process holds it for too long."""
    fd = os.open(home / START_LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        give_up = time.monotonic() + timeout_s
        while not try_lock(fd):
            if time.monotonic() >= give_up:
                raise AgentLost(f"another start of the agent in {home} takes over {timeout_s:g} s")
            time.sleep(0.05)
        yield
    finally:
        os.close(fd)


def hold_life_lock(home: Path) -> int | None:
    """Become the agent of ``home`` until this process ends; None if there is one already.

    The lock ends with the process, so a kill leaves no stale lock.
    """
    fd = os.open(home / LIFE_LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    if not try_lock(fd):
        os.close(fd)
        return None
    os.ftruncate(fd, 0)
    note_busy(home, False)
    return fd


def note_busy(home: Path, busy: bool) -> None:
    """Write into the agent's life lock whether a run is active. The sampler reads it: what a run of
    torpor does is not the user's work."""
    fd = os.open(home / LIFE_LOCK, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        os.pwrite(fd, f"{os.getpid()} {'busy' if busy else '    '}\n".encode("ascii"), 0)
    finally:
        os.close(fd)


def agent_alive(home: Path) -> bool:
    """Whether an agent's process lives, even if its socket does not answer."""
    try:
        fd = os.open(home / LIFE_LOCK, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    try:
        return not try_lock(fd)
    finally:
        os.close(fd)


class OwnHome:
    """Knows whether HOME is still as its living agent made it: a user's program may remove it, or
    some of it (`rm -rf ~/.*`)."""

    def __init__(self, home: Path) -> None:
        self._home: Final = home
        self._ours: Final = _identity(home / LIFE_LOCK)

    @property
    def is_gone(self) -> bool:
        """Whether the agent's lock file has certainly been removed: another agent may live in
        HOME."""
        try:
            return self._ours is not None and _identity(self._home / LIFE_LOCK) != self._ours
        except OSError:
            return False

    def mark(self) -> None:
        """Make the marker again where it is missing, because no agent starts in a HOME without it.
        A folder without the agent's lock belongs to somebody else, and gets no marker."""
        with suppress(OSError):  # HOME is unknown, or its disk is full: the next look tries again
            if self._ours is not None and _identity(self._home / LIFE_LOCK) == self._ours:
                mark_home(self._home, again=True)


def was_marked_again(home: Path) -> bool:
    """Whether HOME was marked again after its user had removed it or its marker, or has no marker
    now: some of its files may not be torpor's."""
    try:
        return os.stat(home / MARKER).st_size > 0
    except OSError:
        return True


def _identity(path: Path) -> tuple[int, int] | None:
    """The identity of a file; None where there is none. OSError where it is unknown."""
    try:
        facts = path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return None
    return facts.st_dev, facts.st_ino


def try_lock(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
