"""Writes through a shared mapping (mmap): where they move a file's time, and who can make them.

The kernel sets a file's times at the first store into a page that is clean, and never again until
that page was written back. So a file's pages are written back before it is read: any later store
moves the time. A file system without a disk (tmpfs), or one that is told not to use it (an overlay
that is "volatile"), never cleans its pages. There a store may move nothing, so a file that a live
process has mapped for writing counts as changing.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import re
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final

_TICK_S: Final = 0.012
"""A little more than the kernel's longest tick: file times of Linux are as fine as that."""
PROC: Final = Path("/proc")


def file_systems(root: bytes, excluded: Callable[[bytes], bool] | None) -> list[bytes]:
    """``root``, and each directory below it on which another file system is mounted."""
    places = [root]
    for line in (PROC / "self/mountinfo").read_bytes().splitlines():
        place = re.sub(rb"\\([0-7]{3})", lambda m: bytes([int(m[1], 8)]), line.split(b" ", 5)[4])
        if not place.startswith(os.path.join(root, b"")):
            continue
        names = place[len(root) :].strip(b"/").split(b"/")
        inner = (b"/".join(names[: n + 1]) for n in range(len(names)))
        if not (excluded and any(map(excluded, inner))) and os.path.isdir(place):
            places.append(place)
    return places


def sync_disk(place: bytes) -> None:
    """Write the dirty pages of a file system back, so that the next store into any of them is
    seen."""
    fd = os.open(place, os.O_RDONLY | os.O_DIRECTORY)
    try:
        ctypes.CDLL(None, use_errno=True).syncfs(fd)
    finally:
        os.close(fd)


def mapped_unseen(places: Sequence[bytes]) -> frozenset[tuple[int, int] | bytes]:
    """Files in ``places`` that a live process has mapped for writing, where stores are not seen:
    the device and inode of each, and its path."""
    unsure = [os.path.join(place, b"") for place in places if not shows_stores(place)]
    if not unsure:
        return frozenset()
    devices = {os.stat(place).st_dev for place in unsure}
    found: set[tuple[int, int] | bytes] = set()
    for device, inode, path in _mapped_for_writing():
        if device in devices or path.startswith(tuple(unsure)):
            found |= {(device, inode), path}
    return frozenset(found)


def shows_stores(place: bytes) -> bool:
    """Whether a store moves the time of a file that was written back before: tried with a file
    without a name. False where that cannot be tried."""
    try:
        fd = _unnamed_file(place)
    except OSError as exc:
        return exc.errno == errno.EROFS  # nobody can write there
    try:
        os.write(fd, b"\1")  # not by a store alone: that takes a block, and a full disk kills
        with mmap.mmap(fd, 1) as mapping, memoryview(mapping) as page:
            _store(page)
            sync_disk(place)
            before = os.fstat(fd).st_ctime_ns
            time.sleep(_TICK_S)
            _store(page)
            return os.fstat(fd).st_ctime_ns != before
    except OSError:
        return False
    finally:
        os.close(fd)


def _unnamed_file(place: bytes) -> int:
    try:
        return os.open(place, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
    except OSError:  # overlays can do it since Linux 6.1
        beside = tempfile.gettempdir()
        if os.stat(beside).st_dev != os.stat(place).st_dev:
            raise
    fd, name = tempfile.mkstemp(dir=beside)
    os.unlink(name)
    return fd


def _store(page: memoryview) -> None:
    """Have the kernel store a byte: where it cannot, that is an error here and no SIGBUS."""
    zero = os.open("/dev/zero", os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.readv(zero, [page])
    finally:
        os.close(zero)


def _mapped_for_writing() -> Iterator[tuple[int, int, bytes]]:
    """Device, inode and path of each file that a process has mapped shared and for writing, as far
    as this user may know."""
    for process in PROC.iterdir():
        if not process.name.isdigit():
            continue
        with suppress(OSError):  # it has ended, or belongs to somebody else
            for line in (process / "maps").read_bytes().splitlines():
                fields = line.split(None, 5)
                if fields[1][1:4:2] == b"ws" and len(fields) == 6:
                    major, minor = (int(part, 16) for part in fields[3].split(b":"))
                    yield os.makedev(major, minor), int(fields[4]), fields[5]
