"""The scheduled save that is under way in a HOME. Its file is locked as long as the save goes on.
By the lock the sampler sees that this is not the user's work, and a run ends the save, because the
run itself stores more."""

from __future__ import annotations

import fcntl
import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

from torpor.shared.values import WorkspaceName

SAVING: Final = "saving"
ENDS_S: Final = 3.0
"""Seconds that a save which was asked to end gets before SIGKILL, and again after it."""
_POLL_S: Final = 0.02


@contextmanager
def saving(home: Path, workspace: WorkspaceName) -> Iterator[None]:
    """Within this context, this process makes the scheduled save. Waits for a save of another
    workspace."""
    fd = os.open(home / SAVING, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        pid = os.getpid()
        os.ftruncate(fd, 0)
        os.pwrite(fd, f"{pid} {_start(pid)} {workspace}\n".encode("ascii"), 0)
        yield
    finally:
        os.close(fd)


def is_saving(home: Path) -> bool:
    """Whether a scheduled save is under way."""
    return _saver(home) is not None


def end_save(home: Path, workspace: WorkspaceName) -> None:
    """End the scheduled save of the workspace, if one is under way. What it has stored stays in the
    journal."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        give_up = time.monotonic() + ENDS_S
        sent = False
        while (saver := _saver(home)) is not None and saver[1] == workspace:
            if not sent:
                with suppress(ProcessLookupError):
                    os.kill(saver[0], number)
                sent = True
            if time.monotonic() >= give_up:
                break
            time.sleep(_POLL_S)
        else:
            return


def _saver(home: Path) -> tuple[int, str] | None:
    """The process that makes the save, and its workspace; None where no save is under way, or where
    it has only just begun."""
    try:
        fd = os.open(home / SAVING, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        words = os.pread(fd, 200, 0).decode("ascii").split()
        # the words may be of an earlier save
        if len(words) != 3 or _start(int(words[0])) != words[1]:
            return None
        return int(words[0]), words[2]
    finally:
        os.close(fd)
    return None


def _start(pid: int) -> str:
    """The start time of a process, by which it is told from a later process with its number."""
    try:
        return Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[19].decode()
    except (FileNotFoundError, ProcessLookupError):
        return ""
