"""Writes content, and says in words what to do where a file system refuses it."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from torpor.shared.codecs.codec import Buffer
from torpor.shared.errors import DiskFull, MachineUnfit
from torpor.shared.format.manifest import Entry
from torpor.shared.values import MIB

NO_ROOM: Final = {errno.ENOSPC, errno.EDQUOT}
_LITTLE_BYTES: Final = MIB
"""A disk with less free bytes than this is full: the largest extended attribute has 64 KiB."""


@contextmanager
def making(path: bytes, near: int) -> Iterator[None]:
    """Within this context a name is made; a full disk raises the errors of ``write_refused``."""
    try:
        yield
    except OSError as exc:
        raise write_refused(exc, path, near) from None


def write_all(fd: int, data: Buffer, offset: int, entry: Entry) -> None:
    """Write ``data`` at ``offset``; DiskFull and MachineUnfit say what to do."""
    view = memoryview(data)
    try:
        while view:
            written = os.pwrite(fd, view, offset)
            view = view[written:]
            offset += written
    except OSError as exc:
        raise write_refused(exc, entry.path, fd) from None


def set_size(fd: int, entry: Entry) -> None:
    """Set a file's size before it is written; raises as ``write_all`` does."""
    try:
        os.ftruncate(fd, entry.size)
    except OSError as exc:
        raise write_refused(exc, entry.path, fd) from None


def is_full(fd: int, exc: OSError) -> bool:
    """Whether the file system of an open file is full. ENOSPC alone does not say so: some file
    systems return it for one value that they cannot hold."""
    st = os.fstatvfs(fd)
    return exc.errno == errno.EDQUOT or st.f_bavail * st.f_frsize < _LITTLE_BYTES or _no_inode(st)


def write_refused(exc: OSError, path: bytes, near: int) -> OSError | DiskFull | MachineUnfit:
    """The error for a file that cannot be made or written. ``near``: a descriptor on its file
    system."""
    shown = repr(os.fsdecode(path))
    if exc.errno == errno.EFBIG:
        return MachineUnfit(
            f"{shown} is larger than the file system there can hold, or than its login may write "
            "(ulimit -f): wake on a machine whose disk has ext4 or XFS; the snapshot in the store "
            "is untouched"
        )
    if exc.errno not in NO_ROOM:
        return exc
    if exc.errno == errno.ENOSPC and _no_inode(os.fstatvfs(near)):
        return DiskFull(
            f"the machine's file system can hold no more files (it has no inode left) at {shown}: "
            "remove some, or wake on a machine whose file system has more; the snapshot in the "
            "store is untouched"
        )
    return DiskFull(
        f"the machine's disk is full ({exc.strerror}) at {shown}: free some space, or wake on a "
        "machine with a larger disk; the snapshot in the store is untouched"
    )


def _no_inode(st: os.statvfs_result) -> bool:
    return st.f_files > 0 and st.f_favail == 0
