"""Write a tree: never outside its target, never through a symlink.

Everything is opened relative to a descriptor of the target, component by component, without
following links; symlinks are made last. The manifest was checked before (format/checks.py).
"""

from __future__ import annotations

import errno
import os
import stat
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Final

from torpor.errors import DiskFull, InvalidInput
from torpor.format.manifest import DIRECTORY, FILE, HARDLINK, SYMLINK, Entry

_DIRECTORY_FLAGS: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_CACHED_DIRECTORIES: Final = 16
"""Open directories a thread keeps: neighbours in a chunk are neighbours in the tree."""


class TreeWriter:
    """Creates the entries of one snapshot below ``targets``. Thread-safe from ``prepare`` on.

    A file is private (mode 0600) until its content is complete.
    """

    def __init__(self, targets: Sequence[bytes]) -> None:
        self._targets = targets
        self._threads = threading.local()
        self._root = os.geteuid() == 0
        self._lock = threading.Lock()
        self.warnings: list[str] = []
        self.refused_xattrs: set[tuple[int, bytes, bytes]] = set()
        """Root, path and name of attributes that this machine does not let us set."""

    def prepare(self, entries: Sequence[Entry], in_pieces: Callable[[Entry], bool]) -> None:
        """Make every directory, and every file that will be written in pieces, at its size."""
        for number, target in enumerate(self._targets):
            os.makedirs(target, mode=0o755, exist_ok=True)
            if not stat.S_ISDIR(os.lstat(target).st_mode):
                raise InvalidInput(f"target {os.fsdecode(target)} of root {number} is no directory")
        for entry in entries:
            if entry.kind == DIRECTORY and entry.path:
                parent, name = self._parent(entry)
                try:
                    os.mkdir(name, 0o700, dir_fd=parent)
                except FileExistsError:
                    # an interrupted restore made it; its mode may keep us out by now
                    self._unlock(entry, parent, name, 0o700)
            elif entry.kind == FILE and in_pieces(entry):
                fd = self._create(entry)
                try:
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
            _unlink_if_there(name, parent, entry)  # left by an interrupted restore
            fd = os.open(name, flags, 0o600, dir_fd=parent)
        try:
            _write_all(fd, data, 0, entry)
            self._attributes(fd, entry)
        finally:
            os.close(fd)

    def write_at(self, entry: Entry, offset: int, data: bytes | bytearray | memoryview) -> None:
        """Write a run of a file that ``prepare`` made."""
        fd = self._reopen(entry, os.O_WRONLY)
        try:
            _write_all(fd, data, offset, entry)
        finally:
            os.close(fd)

    def finish(self, entries: Sequence[Entry], in_pieces: Callable[[Entry], bool]) -> None:
        """Attributes of files written in pieces, hard links, symlinks, then directories."""
        for entry in entries:
            if entry.kind == FILE and (in_pieces(entry) or entry.size == 0):
                fd = self._reopen(entry, os.O_RDONLY) if entry.size else self._create(entry)
                try:
                    self._attributes(fd, entry)
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

    def close(self) -> None:
        """Forget the calling thread's open directories."""
        cache = getattr(self._threads, "directories", None)
        if cache:
            for fd in cache.values():
                os.close(fd)
            cache.clear()

    def _create(self, entry: Entry) -> int:
        parent, name = self._parent(entry)
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        try:
            fd = os.open(name, flags, 0o600, dir_fd=parent)
        except PermissionError:  # finished by an interrupted restore, and read-only
            self._unlock(entry, parent, name, 0o600)
            fd = os.open(name, flags, 0o600, dir_fd=parent)
        except OSError as exc:
            raise _swapped(exc, entry) from None
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            os.close(fd)
            raise _swapped(None, entry)
        return fd

    def _reopen(self, entry: Entry, access: int) -> int:
        parent, name = self._parent(entry)
        try:  # NONBLOCK: a FIFO that took the file's place must not hold the agent
            flags = access | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
            return os.open(name, flags, dir_fd=parent)
        except OSError as exc:
            raise _swapped(exc, entry) from None

    def _unlock(self, entry: Entry, parent: int, name: bytes, mode: int) -> None:
        """chmod what is ours already; never what a symlink leads to, as plain chmod would."""
        try:
            fd = os.open(name, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=parent)
        except OSError as exc:
            raise _swapped(exc, entry) from None
        try:
            kind = stat.S_IFMT(os.fstat(fd).st_mode)
            if kind != (stat.S_IFDIR if entry.kind == DIRECTORY else stat.S_IFREG):
                raise _swapped(None, entry)
            os.chmod(b"/proc/self/fd/%d" % fd, mode)
        finally:
            os.close(fd)

    def _link(self, entry: Entry) -> None:
        parent, name = self._parent(entry)
        target_parent, target_name = self._parent_of(entry.root, entry.target)
        _unlink_if_there(name, parent, entry)
        os.link(
            target_name, name, src_dir_fd=target_parent, dst_dir_fd=parent, follow_symlinks=False
        )

    def _symlink(self, entry: Entry) -> None:
        parent, name = self._parent(entry)
        _unlink_if_there(name, parent, entry)
        os.symlink(entry.target, name, dir_fd=parent)
        if self._root:
            os.chown(name, entry.uid, entry.gid, dir_fd=parent, follow_symlinks=False)
        if entry.xattrs:
            # security.* and trusted.* only: Linux has no user.* on symlinks
            where = b"/proc/self/fd/%d/%s" % (parent, name)
            for key, value in entry.xattrs:
                self._xattr(where, key, value, entry)
        os.utime(name, ns=(entry.mtime_ns, entry.mtime_ns), dir_fd=parent, follow_symlinks=False)

    def _finish_directory(self, entry: Entry) -> None:
        fd = os.dup(self._directory(entry.root, entry.path))
        try:
            self._attributes(fd, entry)
        finally:
            os.close(fd)

    def _attributes(self, fd: int, entry: Entry) -> None:
        if self._root:
            os.fchown(fd, entry.uid, entry.gid)
        elif (entry.uid, entry.gid) != (os.geteuid(), os.getegid()):
            self._warn_once("owners are not restored: the agent does not run as root")
        os.fchmod(fd, entry.mode)  # after chown, which clears set-user-ID
        for key, value in entry.xattrs:
            self._xattr(fd, key, value, entry)
        os.utime(fd, ns=(entry.mtime_ns, entry.mtime_ns))

    def _xattr(self, where: int | bytes, key: bytes, value: bytes, entry: Entry) -> None:
        try:
            os.setxattr(where, key, value, follow_symlinks=isinstance(where, int))
        except OSError as exc:
            if exc.errno in (errno.ENOSPC, errno.EDQUOT):
                raise
            with self._lock:
                self.refused_xattrs.add((entry.root, entry.path, key))
            self._warn(
                f"{os.fsdecode(entry.path)!r}: extended attribute {os.fsdecode(key)} is not "
                f"restored: {exc.strerror}"
            )

    def _warn(self, text: str) -> None:
        with self._lock:
            self.warnings.append(text)

    def _warn_once(self, text: str) -> None:
        with self._lock:
            if text not in self.warnings:
                self.warnings.append(text)

    def _parent(self, entry: Entry) -> tuple[int, bytes]:
        return self._parent_of(entry.root, entry.path)

    def _parent_of(self, root: int, path: bytes) -> tuple[int, bytes]:
        directory, _, name = path.rpartition(b"/")
        return self._directory(root, directory), name

    def _directory(self, root: int, path: bytes) -> int:
        """A descriptor of a directory, kept open by this thread for a while."""
        cache: OrderedDict[tuple[int, bytes], int] | None
        cache = getattr(self._threads, "directories", None)
        if cache is None:
            cache = self._threads.directories = OrderedDict()
        fd = cache.get((root, path))
        if fd is not None:
            cache.move_to_end((root, path))
            return fd
        if path:
            parent, _, name = path.rpartition(b"/")
            above = self._directory(root, parent)
            try:
                fd = os.open(name, _DIRECTORY_FLAGS, dir_fd=above)
            except OSError as exc:
                raise _swapped(exc, path) from None
        else:
            try:
                fd = os.open(self._targets[root], _DIRECTORY_FLAGS)
            except OSError as exc:
                raise _swapped(exc, self._targets[root]) from None
        cache[(root, path)] = fd
        if len(cache) > _CACHED_DIRECTORIES:
            os.close(cache.popitem(last=False)[1])
        return fd


def _write_all(fd: int, data: bytes | bytearray | memoryview, offset: int, entry: Entry) -> None:
    view = memoryview(data)
    try:
        while view:
            written = os.pwrite(fd, view, offset)
            view = view[written:]
            offset += written
    except OSError as exc:
        if exc.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise DiskFull(
            f"the machine's disk is full ({exc.strerror}) at {os.fsdecode(entry.path)!r}: wake on "
            "a machine with a larger disk; the snapshot in the store is untouched"
        ) from None


_SWAPPED: Final = {errno.ELOOP, errno.ENOTDIR, errno.EISDIR, errno.ENOENT, errno.ENXIO}


def _swapped(exc: OSError | None, what: Entry | bytes) -> OSError | InvalidInput:
    """What to raise when a name that the restore made is of another kind now, or gone."""
    if exc is not None and exc.errno not in _SWAPPED:
        return exc
    path = what if isinstance(what, bytes) else what.path
    return InvalidInput(
        f"{os.fsdecode(path)!r} in the target is not what the restore made there: something else "
        "writes into the target; end that, empty the target, and wake again"
    )


def _unlink_if_there(name: bytes, parent: int, entry: Entry) -> None:
    try:
        os.unlink(name, dir_fd=parent)
    except FileNotFoundError:
        pass
    except IsADirectoryError as exc:
        raise _swapped(exc, entry) from None
