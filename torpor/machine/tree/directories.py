"""Open directories below a target: component by component, never through a symlink."""

from __future__ import annotations

import errno
import os
import stat
import threading
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Final

from torpor.shared.errors import InvalidInput

_FLAGS: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_KEPT_OPEN: Final = 16
"""Open directories that a thread keeps: neighbours in a chunk are neighbours in the tree."""
_SWAPPED: Final = {errno.ELOOP, errno.ENOTDIR, errno.EISDIR, errno.ENOENT, errno.ENXIO}


class Directories:
    """Descriptors of directories below ``targets``. Thread-safe: each thread keeps its own.

    ``remedy`` is the end of the message for a name that has become another kind of file, or is
    gone.
    """

    def __init__(self, targets: Sequence[bytes], remedy: str) -> None:
        self._targets = targets
        self._remedy = remedy
        self._threads = threading.local()

    def parent(self, root: int, path: bytes) -> tuple[int, bytes]:
        """The directory that holds ``path``, and the name in it."""
        directory, _, name = path.rpartition(b"/")
        return self.open(root, directory), name

    @contextmanager
    def held(self, root: int, path: bytes) -> Iterator[int]:
        """A descriptor that stays open while others are opened."""
        fd = os.dup(self.open(root, path))
        try:
            yield fd
        finally:
            os.close(fd)

    def open(self, root: int, path: bytes) -> int:
        """A descriptor that this object owns, and that the calling thread keeps open for a
        while."""
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
            above = self.open(root, parent)
            try:
                fd = os.open(name, _FLAGS, dir_fd=above)
            except OSError as exc:
                raise self.swapped(exc, path) from None
        else:
            try:
                fd = os.open(self._targets[root], _FLAGS)
            except OSError as exc:
                raise self.swapped(exc, self._targets[root]) from None
        cache[(root, path)] = fd
        if len(cache) > _KEPT_OPEN:
            os.close(cache.popitem(last=False)[1])
        return fd

    def unlock(self, parent: int, name: bytes, path: bytes, kind: int, mode: int) -> None:
        """chmod a file that we own; never follow a symlink, as plain chmod would. ``kind``: S_IFDIR
        or S_IFREG; a file of another kind is left alone."""
        try:
            fd = os.open(name, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=parent)
        except OSError as exc:
            raise self.swapped(exc, path) from None
        try:
            if stat.S_IFMT(os.fstat(fd).st_mode) != kind:
                raise self.swapped(None, path)
            os.chmod(b"/proc/self/fd/%d" % fd, mode)
        finally:
            os.close(fd)

    def close(self) -> None:
        """Close the calling thread's descriptors."""
        cache = getattr(self._threads, "directories", None)
        if cache:
            for fd in cache.values():
                os.close(fd)
            cache.clear()

    def swapped(self, exc: OSError | None, path: bytes) -> OSError | InvalidInput:
        """The error for a name that has become another kind of file, or is gone."""
        if exc is not None and exc.errno not in _SWAPPED:
            return exc
        return InvalidInput(
            f"{os.fsdecode(path)!r} in the target is not what torpor found or made there: "
            f"something else writes into the target; end that, {self._remedy}"
        )
