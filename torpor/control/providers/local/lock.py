"""A lock for one local machine that dies with its holder, and clearing what such holders left."""

from __future__ import annotations

import contextlib
import fcntl
import os
import random
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from torpor.control.providers.local.folder import MachineFolder
from torpor.control.providers.removal import remove_tree
from torpor.shared.errors import ProviderError

_POLL_S: Final = 0.02
_DEBRIS: Final = re.compile(r"\.(m-[0-9a-f]{12})\.(?:new|lock)")


@contextlib.contextmanager
def held(path: Path, *, timeout_s: float) -> Iterator[None]:
    """Hold the kernel lock on ``path``, waiting at most ``timeout_s``; leaves no file behind.

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


def sweep(folder: Path) -> None:
    """Remove what killed processes left beside the machines: it was no machine yet, or none any
    more. What a live process works on stays."""
    matches = (_DEBRIS.fullmatch(name) for name in os.listdir(folder))
    for name in sorted({match.group(1) for match in matches if match}):
        machine = MachineFolder(folder / name)
        try:
            with held(machine.lock, timeout_s=0):
                remove_tree(machine.new)
        except ProviderError:
            continue  # its holder lives


def _acquire(path: Path, timeout_s: float) -> int:
    end = time.monotonic() + timeout_s
    while True:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        with contextlib.ExitStack() as unless_locked:
            unless_locked.callback(os.close, fd)
            with contextlib.suppress(BlockingIOError, FileNotFoundError):
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                # The last holder unlinks the file: the name may be another file's by now.
                if os.path.samestat(os.stat(path, follow_symlinks=False), os.fstat(fd)):
                    unless_locked.pop_all()
                    return fd
        if time.monotonic() >= end:
            raise ProviderError(
                f"another process has worked on the machine of {path} for {timeout_s:.0f} s; "
                "look what it does, then try again"
            )
        time.sleep(_POLL_S * (0.5 + random.random()))  # noqa: S311
