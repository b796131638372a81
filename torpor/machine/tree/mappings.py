"""Writes through a shared mapping (mmap): where they move a file's time, and who can make them.

The kernel sets a file's times at the first store into a page that is clean, and never again until
that page was written back. So a file's pages are written back before it is read: any later store
moves the time. A file system without a disk (tmpfs), or one that is told not to use it (an overlay
that is "volatile"), never cleans its pages; nor does a kernel without ``syncfs``. There a store may
leave the file's times unchanged, so a file that a live process has mapped for writing counts as
changing.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import re
import stat
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final

from torpor.shared.errors import DiskFull, MachineError

_TICK_S: Final = 0.012
"""A little more than the longest tick of the kernel, which is the resolution of file times on
Linux."""
PROC: Final = Path("/proc")
NOT_SHOWN: Final = (FileNotFoundError, ProcessLookupError, PermissionError)
"""Errors for a process that has ended, or that belongs to somebody else."""
_NO_SYNCFS: Final = (errno.ENOSYS, errno.EPERM)
"""Errors that ``syncfs`` itself never returns: the kernel lacks the call, or a sandbox forbids
it."""


def file_systems(root: bytes, excluded: Callable[[bytes], bool] | None) -> list[bytes]:
    """``root``, and each directory and file below it on which another file system is mounted."""
    places = [root]
    for line in (PROC / "self/mountinfo").read_bytes().splitlines():
        place = re.sub(rb"\\([0-7]{3})", lambda m: bytes([int(m[1], 8)]), line.split(b" ", 5)[4])
        if not place.startswith(os.path.join(root, b"")):
            continue
        names = place[len(root) :].strip(b"/").split(b"/")
        inner = (b"/".join(names[: n + 1]) for n in range(len(names)))
        if not (excluded and any(map(excluded, inner))) and _holds_files(place):
            places.append(place)
    return places


def _holds_files(place: bytes) -> bool:
    """Whether a mount has files to sync: it is no device and no pipe, and this user can reach
    it."""
    try:
        mode = os.stat(place).st_mode
    except OSError:  # the mount is gone, or the walk, which looks at it too, raises
        return False
    return stat.S_ISDIR(mode) or stat.S_ISREG(mode)


def sync_disk(place: bytes) -> None:
    """Write the dirty pages of a file system back, so that the next store into any of them moves
    its file's time. DiskFull or MachineError if they were not written."""
    try:
        _syncfs(place)
    except OSError as error:
        # shows_stores then returns False, so that mapped files count as changing
        if error.errno in _NO_SYNCFS:
            os.sync()
            return
        shown = os.fsdecode(place)
        cause = f"{error.strerror} (errno {error.errno})"
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise DiskFull(
                f"the disk that holds {shown} is full: the kernel could not write its pages back: "
                f"{cause}. Free some space there, and try again"
            ) from error
        raise MachineError(
            f"the kernel could not write the pages of the disk that holds {shown} back: {cause}. "
            "Changes of files there might not be seen, so the machine is kept. Try again; if it "
            "fails again, look for errors of the disk with `dmesg` on the machine"
        ) from error


def _syncfs(place: bytes) -> None:
    fd = os.open(place, os.O_RDONLY | os.O_CLOEXEC)
    try:
        if ctypes.CDLL(None, use_errno=True).syncfs(fd):
            code = ctypes.get_errno()
            raise OSError(code, os.strerror(code), place)
    finally:
        os.close(fd)


def mapped_unseen(places: Sequence[bytes]) -> dict[tuple[int, int] | bytes, str]:
    """Files in ``places`` that a live process has mapped for writing, where stores are not seen:
    the process by the device and inode of each file, and by its path."""
    unsure = [place for place in places if not shows_stores(place)]
    if not unsure:
        return {}
    seen = {place: os.stat(place) for place in unsure}
    devices = {st.st_dev for st in seen.values() if stat.S_ISDIR(st.st_mode)}
    files = {(st.st_dev, st.st_ino) for st in seen.values()}
    below = tuple(os.path.join(place, b"") for place in unsure)
    found: dict[tuple[int, int] | bytes, str] = {}
    for device, inode, path, process in mapped_for_writing():
        is_there = device in devices or (device, inode) in files
        if is_there or path in seen or path.startswith(below):
            found[device, inode] = found[path] = process
    return found


def shows_stores(place: bytes) -> bool:
    """Whether a store changes the time of a file that was written back before, tried with a file
    without a name. False where that cannot be tried."""
    try:
        fd = unnamed_file(place)
    except OSError as exc:
        return exc.errno == errno.EROFS  # nobody can write there
    try:
        # written, because a store alone would need a new block, and be killed on a full disk
        os.write(fd, b"\1")
        with mmap.mmap(fd, 1) as mapping, memoryview(mapping) as page:
            _store(page)
            _syncfs(place)
            before = os.fstat(fd).st_ctime_ns
            time.sleep(_TICK_S)
            _store(page)
            return os.fstat(fd).st_ctime_ns != before
    except OSError:
        return False
    finally:
        os.close(fd)


def unnamed_file(place: bytes) -> int:
    """A descriptor of a new file without a name, on the file system of a directory or a file."""
    try:
        return os.open(place, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
    except OSError:  # overlayfs supports this since Linux 6.1
        beside = tempfile.gettempdir()
        if os.stat(beside).st_dev != os.stat(place).st_dev:
            raise
    fd, name = tempfile.mkstemp(dir=beside)
    os.unlink(name)
    return fd


def _store(page: memoryview) -> None:
    """Have the kernel store a byte, so that a failure is an error and no SIGBUS."""
    zero = os.open("/dev/zero", os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.readv(zero, [page])
    finally:
        os.close(zero)


def mapped_for_writing() -> Iterator[tuple[int, int, bytes, str]]:
    """Device, inode and path of each file that a process has mapped shared and for writing, and the
    process, as far as this user may know."""
    for process in PROC.iterdir():
        if not process.name.isdigit():
            continue
        with suppress(*NOT_SHOWN):
            name = (process / "comm").read_text(errors="backslashreplace").strip()
            for line in (process / "maps").read_bytes().splitlines():
                fields = line.split(None, 5)
                if fields[1][1:4:2] == b"ws" and len(fields) == 6:
                    major, minor = (int(part, 16) for part in fields[3].split(b":"))
                    words = f"process {process.name} ({name})"
                    yield os.makedev(major, minor), int(fields[4]), fields[5], words
