"""Which files were used, by their access times.

A restore sets the access time of a file to its mtime, and torpor reads files without changing it.
So the first read by anybody else sets it to a time after the last change of the file (ctime), also
under ``relatime``. On a disk that is mounted with ``noatime`` nothing shows.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Sequence
from contextlib import suppress

from torpor.machine.tree.mappings import file_systems, unnamed_file
from torpor.machine.tree.walk import listing


def used_files(
    roots: Sequence[bytes], since_ns: int, check: Callable[[], None]
) -> list[set[bytes]]:
    """The files below each root that were read, or written since then. ``check`` is called once a
    directory and may raise RunCancelled."""
    return [_used_below(root, since_ns, check) for root in roots]


def blind_place(roots: Sequence[bytes], excluded: Callable[[bytes], bool] | None) -> bytes | None:
    """Where a disk below ``roots`` begins on which reads do not show; None if there is none."""
    places = (place for root in roots for place in file_systems(root, excluded))
    return next((place for place in places if not shows_reads(place)), None)


def shows_reads(place: bytes) -> bool:
    """Whether reading changes the access time of a file, tried with a file without a name. If that
    cannot be tried, the options of the mount decide."""
    with suppress(OSError):
        fd = unnamed_file(place)
        try:
            os.write(fd, b"\1")
            os.utime(fd, ns=(0, 0))
            os.pread(fd, 1, 0)
            return os.fstat(fd).st_atime_ns != 0
        finally:
            os.close(fd)
    return not os.statvfs(place).f_flag & os.ST_NOATIME


def _used_below(root: bytes, since_ns: int, check: Callable[[], None]) -> set[bytes]:
    found: set[bytes] = set()
    pending = [b""]
    while pending:
        directory = pending.pop()
        check()
        names, looked = listing(os.path.join(root, directory))
        for name, st in zip(names, looked.stats, strict=True):
            path = os.path.join(directory, name)
            if stat.S_ISDIR(st.mode):
                pending.append(path)
            elif st.is_read or (stat.S_ISREG(st.mode) and st.mtime_ns >= since_ns):
                found.add(path)
    return found
