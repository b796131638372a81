"""A lock that dies with its holder, for one local machine."""

from __future__ import annotations

import contextlib
import fcntl
import os
import random
import time
from collections.abc import Iterator
from pathlib import Path

from torpor.shared.errors import ProviderError

_POLL_S = 0.02


@contextlib.contextmanager
def held(path: Path, *, timeout_s: float) -> Iterator[None]:
    """Hold the kernel lock on ``path``, at most ``timeout_s`` of waiting; leaves no file behind.

    Works between threads, as each holder opens the file for itself.
    """
    fd = _acquire(path, timeout_s)
    try:
        yield
    finally:
        try:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)
        finally:  # a lock that is only unlinked once the process ends would be held until then
            os.close(fd)


def _acquire(path: Path, timeout_s: float) -> int:
    end = time.monotonic() + timeout_s
    while True:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if _is_still(path, fd):
                return fd
        except BlockingIOError:
            pass
        except BaseException:
            os.close(fd)
            raise
        os.close(fd)
        if time.monotonic() >= end:
            raise ProviderError(
                f"another process has worked on the machine of {path} for {timeout_s:.0f} s; "
                "look what it does, then try again"
            )
        time.sleep(_POLL_S * (0.5 + random.random()))  # noqa: S311


def _is_still(path: Path, fd: int) -> bool:
    """Whether the locked file is the one that has the name: the last holder unlinks it."""
    try:
        return os.path.samestat(os.stat(path, follow_symlinks=False), os.fstat(fd))
    except FileNotFoundError:
        return False
