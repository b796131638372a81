"""Write a tree: never outside its target, never through a symlink.

Everything is opened relative to a descriptor of the target, component by component, without
following links; symlinks are made last. The manifest was checked before (format/checks.py).
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable, Container, Sequence
from typing import Final, Protocol

import msgspec

from torpor.machine.tree.attributes import Attributes
from torpor.machine.tree.directories import Directories
from torpor.shared.errors import DiskFull, InvalidInput
from torpor.shared.format.manifest import DIRECTORY, FILE, HARDLINK, SYMLINK, Entry

NO_ROOM: Final = {errno.ENOSPC, errno.EDQUOT}


class ContentWriter(Protocol):
    """Receives checked content, in any order and from any thread."""

    def write_whole(self, entry: Entry, data: bytes | bytearray | memoryview) -> None:
        """All the content of a file."""

    def write_at(self, entry: Entry, offset: int, data: bytes | bytearray | memoryview) -> None:
        """A run of a file."""

    def close(self) -> None:
        """The calling thread has finished writing."""


class TreeWriter:
    """Creates the entries of one snapshot below ``targets``. Thread-safe from ``prepare`` on.

    A file is private (mode 0600) until its content is complete. ``attributes`` know what an earlier
    writer could not set.
    """

    def __init__(self, targets: Sequence[bytes], attributes: Attributes | None = None) -> None:
        self._targets = targets
        self._directories = Directories(targets, "empty the target, and wake again")
        self.attributes = attributes or Attributes()

    def prepare(
        self,
        entries: Sequence[Entry],
        in_pieces: Callable[[Entry], bool],
        *,
        afresh: bool,
        passages: Container[tuple[int, bytes]] = (),
    ) -> None:
        """Make every directory, and every file that is written in pieces, at its size.

        ``afresh``: truncate existing files first, so that holes are holes again. ``passages``:
        directories, by root and path, that stay as ``open_passages`` has left them.
        """
        for number, target in enumerate(self._targets):
            os.makedirs(target, mode=0o755, exist_ok=True)
            if not stat.S_ISDIR(os.lstat(target).st_mode):
                raise InvalidInput(
                    f"target {os.fsdecode(target)} of root {number} is not a directory"
                )
        for entry in entries:
            if entry.kind == DIRECTORY and entry.path:
                parent, name = self._parent(entry)
                try:
                    os.mkdir(name, 0o700, dir_fd=parent)
                except FileExistsError:
                    # an interrupted restore made it; its mode may refuse us
                    mode = _passable(entry) if (entry.root, entry.path) in passages else 0o700
                    self._directories.unlock(parent, name, entry.path, stat.S_IFDIR, mode)
            elif entry.kind == FILE and in_pieces(entry):
                fd = self._create(entry)
                try:
                    if afresh:
                        os.ftruncate(fd, 0)
                    os.ftruncate(fd, entry.size)
                finally:
                    os.close(fd)

    def write_whole(self, entry: Entry, data: bytes | bytearray | memoryview) -> None:
        """Create a file with all its content and attributes."""
        parent, name = self._parent(entry)
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        try:
            fd = os.open(name, flags, 0o600, dir_fd=parent)
        except FileExistsError:
            self._unlink(name, parent, entry)  # left by an interrupted restore
            fd = os.open(name, flags, 0o600, dir_fd=parent)
        try:
            write_all(fd, data, 0, entry)
            self.attributes.apply(fd, entry)
        finally:
            os.close(fd)

    def write_at(self, entry: Entry, offset: int, data: bytes | bytearray | memoryview) -> None:
        """Write a run of a file that ``prepare`` made."""
        fd = self._reopen(entry, os.O_WRONLY)
        try:
            write_all(fd, data, offset, entry)
        finally:
            os.close(fd)

    def finish(self, entries: Sequence[Entry], in_pieces: Callable[[Entry], bool]) -> None:
        """Finish files written in pieces; make hard links and symlinks; finish directories."""
        for entry in entries:
            if entry.kind == FILE and (in_pieces(entry) or entry.size == 0):
                fd = self._reopen(entry, os.O_RDONLY) if entry.size else self._create(entry)
                try:
                    self.attributes.apply(fd, entry)
                finally:
                    os.close(fd)
        for entry in entries:
            if entry.kind == HARDLINK:
                self._link(entry)
        for entry in entries:
            if entry.kind == SYMLINK:
                self._symlink(entry)
        for entry in reversed(entries):  # what is inside first: it moves the directory's mtime
            if entry.kind == DIRECTORY:
                self._finish_directory(entry)

    def open_passages(self, entries: Sequence[Entry]) -> None:
        """Give directories that are still written in their owners, and let others through as their
        modes say. What new files would inherit is set by ``finish``: extended attributes (an ACL)
        and set-group-ID."""
        for entry in entries:
            passable = msgspec.structs.replace(entry, mode=_passable(entry), xattrs=())
            self._finish_directory(passable)

    def close(self) -> None:
        """Forget the calling thread's open directories."""
        self._directories.close()

    def _create(self, entry: Entry) -> int:
        parent, name = self._parent(entry)
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        try:
            fd = os.open(name, flags, 0o600, dir_fd=parent)
        except PermissionError:  # finished by an interrupted restore, and read-only
            self._directories.unlock(parent, name, entry.path, stat.S_IFREG, 0o600)
            fd = os.open(name, flags, 0o600, dir_fd=parent)
        except OSError as exc:
            raise self._directories.swapped(exc, entry.path) from None
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            os.close(fd)
            raise self._directories.swapped(None, entry.path)
        return fd

    def _reopen(self, entry: Entry, access: int) -> int:
        parent, name = self._parent(entry)
        try:  # NONBLOCK: a FIFO that replaced the file must not block the agent
            flags = access | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
            return os.open(name, flags, dir_fd=parent)
        except OSError as exc:
            raise self._directories.swapped(exc, entry.path) from None

    def _link(self, entry: Entry) -> None:
        parent, name = self._parent(entry)
        target_parent, target_name = self._directories.parent(entry.root, entry.target)
        self._unlink(name, parent, entry)
        os.link(
            target_name, name, src_dir_fd=target_parent, dst_dir_fd=parent, follow_symlinks=False
        )

    def _symlink(self, entry: Entry) -> None:
        parent, name = self._parent(entry)
        self._unlink(name, parent, entry)
        os.symlink(entry.target, name, dir_fd=parent)
        self.attributes.apply_to_symlink(parent, name, entry)

    def _unlink(self, name: bytes, parent: int, entry: Entry) -> None:
        try:
            os.unlink(name, dir_fd=parent)
        except FileNotFoundError:
            pass
        except IsADirectoryError as exc:
            raise self._directories.swapped(exc, entry.path) from None

    def _finish_directory(self, entry: Entry) -> None:
        fd = os.dup(self._directories.open(entry.root, entry.path))
        try:
            self.attributes.apply(fd, entry)
        finally:
            os.close(fd)

    def _parent(self, entry: Entry) -> tuple[int, bytes]:
        return self._directories.parent(entry.root, entry.path)


def _passable(entry: Entry) -> int:
    """A mode with which the agent can still write in a directory."""
    return entry.mode & ~(stat.S_ISUID | stat.S_ISGID) | stat.S_IRWXU


def write_all(fd: int, data: bytes | bytearray | memoryview, offset: int, entry: Entry) -> None:
    """Write ``data`` at ``offset``; DiskFull says what to do."""
    view = memoryview(data)
    try:
        while view:
            written = os.pwrite(fd, view, offset)
            view = view[written:]
            offset += written
    except OSError as exc:
        if exc.errno not in NO_ROOM:
            raise
        raise DiskFull(
            f"the machine's disk is full ({exc.strerror}) at {os.fsdecode(entry.path)!r}: free "
            "some space, or wake on a machine with a larger disk; the snapshot in the store is "
            "untouched"
        ) from None
