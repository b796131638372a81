"""Have the disk take what is restored, while the rest still arrives, and hear what it refuses.

The kernel tells an error of a disk once, to each descriptor of the file system that was open
before the error. Nobody learns of it by reading the file: its pages in memory are as they were
written. So each file system is opened before the first byte is written, and synced through that
descriptor.
"""

from __future__ import annotations

import ctypes
import errno
import os
import re
import threading
import weakref
from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import Final

from torpor.machine.tree.directories import Directories
from torpor.machine.tree.disks import Mounts
from torpor.machine.tree.mappings import NO_SYNCFS, syncfs
from torpor.machine.tree.refusals import NO_ROOM
from torpor.shared.errors import DiskFull, MachineError
from torpor.shared.format.manifest import Entry
from torpor.shared.values import MIB

EVERY_BYTES: Final = 256 * MIB
"""A sync begins when so much was written since the last one began: what the last one of all still
has to write takes a disk of 500 MB/s half a second."""
_TELLS_SINCE: Final = (5, 8)
"""Before Linux 5.8, syncfs says nothing of files that could not be written."""
_WAIT_AND_WRITE: Final = 7  # sync_file_range: all three of its flags
_FLAGS: Final = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


class WriteBack:
    """The file systems of some directories, which are there. Thread-safe."""

    def __init__(self, targets: Sequence[bytes], every_bytes: int = EVERY_BYTES) -> None:
        self._targets = targets
        self._every_bytes = every_bytes
        self._lock = threading.Lock()
        self._written = 0
        self._thread: threading.Thread | None = None
        self._error: OSError | None = None
        self._places: dict[int, int] = {}  # a descriptor of each device
        for target in targets:
            fd = os.open(target, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            if self._places.setdefault(os.fstat(fd).st_dev, fd) != fd:
                os.close(fd)
        self._release = weakref.finalize(self, _close, [*self._places.values()])

    def wrote(self, size: int) -> None:
        """So many bytes more were written: now and then, a thread has the disks take them."""
        with self._lock:
            self._written += size
            if self._written < self._every_bytes or self._thread is not None:
                return
            self._written = 0
            self._thread = threading.Thread(target=self._begin, name="write-back", daemon=True)
            self._thread.start()

    def complete(self, entries: Iterable[Entry]) -> None:
        """Return when the disks have taken everything. DiskFull or MachineError where one has not;
        ``entries``: the files that were written, which are asked one by one where the kernel does
        not tell."""
        self._wait()
        self._sync()
        if self._error is None and not self._is_told():
            self._ask_each(entries)
        if self._error is not None:
            raise _refused(self._error)

    def close(self) -> None:
        """Let go of the file systems, which can be unmounted then. Idempotent."""
        self._wait()
        self._places.clear()
        self._release()

    def _begin(self) -> None:
        self._sync()
        with self._lock:
            self._thread = None

    def _wait(self) -> None:
        thread = self._thread
        if thread is not None:
            thread.join()

    def _sync(self) -> None:
        for fd in [*self._places.values()]:
            try:
                syncfs(fd)
            except OSError as error:
                if error.errno not in NO_SYNCFS:
                    self._error = self._error or error  # no later sync says it again
                else:
                    os.sync()

    def _is_told(self) -> bool:
        """Whether syncfs tells of each file that could not be written. An overlay does not pass on
        what the disk below it says."""
        found = re.match(r"(\d+)\.(\d+)", os.uname().release)
        if found is None or (int(found[1]), int(found[2])) < _TELLS_SINCE:
            return False
        mounts = Mounts.of_this_machine()
        return not any(
            mounts.kind_of(os.fsdecode(os.path.realpath(target))) in ("overlay", "aufs", "")
            for target in self._targets
        )

    def _ask_each(self, entries: Iterable[Entry]) -> None:
        directories = Directories(self._targets, "empty the target, and wake again")
        ask = ctypes.CDLL(None, use_errno=True).sync_file_range
        ask.argtypes = (ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint)
        try:
            for entry in entries:
                with suppress(FileNotFoundError):  # the comparison finds that
                    parent, name = directories.parent(entry.root, entry.path)
                    fd = os.open(name, _FLAGS, dir_fd=parent)
                    try:
                        if ask(fd, 0, 0, _WAIT_AND_WRITE):
                            code = ctypes.get_errno()
                            raise OSError(code, os.strerror(code), entry.path)
                    finally:
                        os.close(fd)
        except OSError as error:
            if error.errno not in (errno.ENOSYS, errno.EPERM, errno.EINVAL, errno.ESPIPE):
                self._error = error
        finally:
            directories.close()


def _close(fds: Iterable[int]) -> None:
    for fd in fds:
        os.close(fd)


def _refused(error: OSError) -> DiskFull | MachineError:
    words = (
        f"the machine's disk did not take what was restored: {error.strerror} (errno "
        f"{error.errno}); nothing counts as restored"
    )
    if error.errno in NO_ROOM:
        return DiskFull(
            f"{words}: free some space, or wake on a machine with a larger disk; the snapshot in "
            "the store is untouched"
        )
    return MachineError(
        f"{words}: wake on another machine, and look for errors of this one's disk with `dmesg`; "
        "the snapshot in the store is untouched"
    )
