"""Reads the content of files, and says whether it changed meanwhile."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Final, NamedTuple

from torpor.machine.tree import batch
from torpor.machine.tree.absence import GONE
from torpor.machine.tree.batch import Stat, read_files
from torpor.machine.tree.names import Signature, SmallFiles
from torpor.shared.codecs.codec import Buffer
from torpor.shared.errors import WorkspaceInvalid

_FLAGS: Final = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
"""NONBLOCK: a FIFO that replaced the file must not block the agent."""


class Read(NamedTuple):
    """``data`` may be shorter than asked for when the file shrank; then ``stable`` is false."""

    data: Buffer
    stable: bool  # whether the file is still as the walk saw it
    gone: bool = False  # whether there is no regular file of that name any more


def read_at(root: bytes, path: bytes, offset: int, length: int, seen: Signature) -> Read:
    """Read ``length`` bytes at ``offset`` of a regular file; see Read."""
    try:
        fd = open_unseen(os.path.join(root, path))
    except OSError as exc:
        if _is_no_file(os.path.join(root, path), exc.errno):
            return Read(b"", stable=False, gone=True)
        raise WorkspaceInvalid(
            f"{os.fsdecode(os.path.join(root, path))} cannot be read: {exc.strerror}; log in as "
            "its owner or as root, or exclude it in the workspace block"
        ) from None
    try:
        let_writes_end(fd, offset)
        data = _pread(fd, length, offset)
        st = os.fstat(fd)
    except OSError as exc:
        if exc.errno in (errno.ESPIPE, errno.EISDIR):
            return Read(b"", stable=False, gone=True)  # a FIFO or a directory
        raise WorkspaceInvalid(
            f"{os.fsdecode(os.path.join(root, path))} cannot be read at {offset}: {exc.strerror}; "
            "look at the machine's disk, or exclude the file in the workspace block"
        ) from None
    finally:
        os.close(fd)
    return Read(data, stable=seen.is_of(Stat.of(st)) and len(data) == length)


def _is_no_file(full: bytes, error: int | None) -> bool:
    """Whether a name that cannot be opened with that error is surely no regular file."""
    if error in (errno.ENOENT, errno.ENOTDIR):
        return True
    if error not in (errno.ELOOP, errno.ENXIO):
        return False
    try:
        return not stat.S_ISREG(os.lstat(full).st_mode)  # a symlink or a socket
    except GONE:
        return True
    except OSError:
        return False


def read_whole(root: bytes, files: Sequence[tuple[bytes, Signature]]) -> list[Read]:
    """Read small files below ``root`` whole, at once: path and signature of each; see Read."""
    try:
        place = os.open(root, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError:
        return [read_at(root, path, 0, seen.size, seen) for path, seen in files]
    try:
        found = read_files(place, [path for path, _ in files], [seen.size for _, seen in files])
        return [
            read_at(root, path, 0, seen.size, seen)
            if read is None
            else Read(read[0], stable=seen.is_of(read[2]))
            for (path, seen), read in zip(files, found, strict=True)
        ]
    finally:
        os.close(place)


def read_unchanged(root: bytes, files: SmallFiles) -> bytearray | None:
    """The contents of all files, one behind the other; None unless each is as it was seen."""
    try:
        place = os.open(root, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        return batch.read_unchanged(place, files.paths, files.sizes, files.signatures)
    finally:
        os.close(place)


def let_writes_end(fd: int, offset: int = 0) -> None:
    """Wait for a write that has begun. It has changed the file's time already, so nothing else
    would show the bytes that it writes after they were read: one call may write 2 GiB."""
    with suppress(OSError):  # ENXIO: there is no data
        os.lseek(fd, offset, os.SEEK_DATA)  # takes the lock of the file, which a write holds


def data_regions(root: bytes, path: bytes, size: int) -> list[tuple[int, int]]:
    """Where a sparse file holds data: (offset, length) in order; all of it when unknown."""
    try:
        fd = open_unseen(os.path.join(root, path))
    except OSError:
        return [(0, size)]  # an error shows when the file is read
    try:
        return all_regions(fd, size)
    finally:
        os.close(fd)


@contextmanager
def opened(full: bytes) -> Iterator[int]:
    """A file descriptor for reading, never through a symlink, after running writes have ended."""
    fd = open_unseen(full)
    try:
        let_writes_end(fd)
        yield fd
    finally:
        os.close(fd)


def open_unseen(name: bytes, parent: int | None = None) -> int:
    """Open a file, in the directory ``parent``, without changing its access time, which shows what
    others read."""
    try:
        return os.open(name, _FLAGS | os.O_NOATIME, dir_fd=parent)
    except PermissionError:
        return os.open(name, _FLAGS, dir_fd=parent)  # O_NOATIME is only for the owner and root


def all_regions(fd: int, size: int) -> list[tuple[int, int]]:
    """Where an open file holds data: (offset, length) in order; all of it when unknown."""
    try:
        return list(_regions(fd, size))
    except OSError:
        return [(0, size)]  # SEEK_DATA is not supported here


def _pread(fd: int, length: int, offset: int) -> bytes:
    data = os.pread(fd, length, offset)
    if len(data) == length or not data:
        return data
    pieces = [data]
    got = len(data)
    while got < length:
        more = os.pread(fd, length - got, offset + got)
        if not more:
            break
        pieces.append(more)
        got += len(more)
    return b"".join(pieces)


def _regions(fd: int, size: int) -> Iterator[tuple[int, int]]:
    position = 0
    while position < size:
        try:
            start = os.lseek(fd, position, os.SEEK_DATA)
        except OSError as exc:
            if exc.errno == errno.ENXIO:
                return  # a hole up to the end
            raise
        end = os.lseek(fd, start, os.SEEK_HOLE)
        if start < size:
            yield start, min(end, size) - start
        position = end
