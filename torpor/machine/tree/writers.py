"""Which files a program writes: what it writes after its file has lost its name is in no file.

The kernel grants a read lease on a file that nobody has open for writing, also through a mapping.
Where it grants none at all (a network file system, a file of another user), the processes tell, as
far as this user may look at them.
"""

from __future__ import annotations

import fcntl
import os
import signal
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Final

from torpor.machine.tree.mappings import NOT_SHOWN, PROC, mapped_for_writing, unnamed_file

_FLAGS: Final = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


def is_written(name: bytes, parent: int | None = None) -> bool | None:
    """Whether a program has a file open for writing; None where the kernel does not say.
    ``parent``: a descriptor of the directory of ``name``."""
    try:
        fd = os.open(name, _FLAGS, dir_fd=parent)
    except OSError:
        return None
    try:
        take_lease(fd, fcntl.F_RDLCK)
    except BlockingIOError:  # what some network file systems answer for every file
        beside = os.path.dirname(name) if parent is None else b"/proc/self/fd/%d" % parent
        return True if _grants_leases(beside) else None
    except OSError:
        return None
    finally:
        os.close(fd)
    return False


def written(paths: Sequence[bytes]) -> dict[bytes, str]:
    """Those of ``paths`` that a program has open for writing, and which program, if that is
    known."""
    asked = {path: is_written(path) for path in paths}
    if all(answer is False for answer in asked.values()):
        return {}
    writers = dict(_writers())
    found = {}
    for path, answer in asked.items():
        with suppress(OSError):
            st = os.lstat(path)
            who = writers.get((st.st_dev, st.st_ino), "")
            if answer or (answer is None and who):
                found[path] = who or "a program"
    return found


def take_lease(fd: int, kind: int) -> None:
    """Take a lease of a ``kind`` and release it at once; OSError where the kernel refuses it."""
    # a process that opens the file now waits; the kernel sends us a signal, which is ignored
    fcntl.fcntl(fd, fcntl.F_SETSIG, signal.SIGURG)
    fcntl.fcntl(fd, fcntl.F_SETLEASE, kind)
    fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_UNLCK)


def _grants_leases(place: bytes) -> bool:
    """Whether the file system of a directory grants a lease on a file that nobody writes."""
    try:
        made = unnamed_file(place)
        try:
            fd = os.open(b"/proc/self/fd/%d" % made, os.O_RDONLY | os.O_CLOEXEC)
        finally:
            os.close(made)
        try:
            take_lease(fd, fcntl.F_RDLCK)
        finally:
            os.close(fd)
    except OSError:
        return False
    return True


def _writers() -> Iterator[tuple[tuple[int, int], str]]:
    """Device and inode of each file that a process has open or mapped for writing, and the
    process, as far as this user may know."""
    for device, inode, _, words in mapped_for_writing():
        yield (device, inode), words
    for process in PROC.iterdir():
        if not process.name.isdigit():
            continue
        with suppress(*NOT_SHOWN):
            name = (process / "comm").read_text(errors="backslashreplace").strip()
            for fd in (process / "fd").iterdir():
                with suppress(FileNotFoundError):  # closed meanwhile
                    told = (process / "fdinfo" / fd.name).read_text().split()
                    if int(told[told.index("flags:") + 1], 8) & os.O_ACCMODE:
                        st = fd.stat()
                        yield (st.st_dev, st.st_ino), f"process {process.name} ({name})"
