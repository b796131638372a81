"""The system calls that the gate sees: those that name a file, or list a directory."""

from __future__ import annotations

import platform
from collections.abc import Mapping
from typing import Final, NamedTuple

CWD: Final = -100  # AT_FDCWD
EMPTY_PATH: Final = 0x1000  # AT_EMPTY_PATH: an open file, not a name
NO_FOLLOW: Final = 0x100  # AT_SYMLINK_NOFOLLOW


class Argument(NamedTuple):
    """A name among the arguments: its position, and that of the directory it is relative to; None
    for the working directory."""

    path: int
    directory: int | None = None


class FileCall(NamedTuple):
    """``follows``: through a symlink at the end of the name, unless the argument at ``flags`` says
    NO_FOLLOW. ``lists``: its first argument is an open directory. ``runs``: a program, which may
    name another one in its first line."""

    names: tuple[Argument, ...]
    follows: bool = True
    flags: int | None = None
    lists: bool = False
    runs: bool = False


_HERE: Final = (Argument(0),)
_AT: Final = (Argument(1, 0),)
_CALLS: Final[tuple[tuple[FileCall, int | None, int | None], ...]] = (
    (FileCall(_HERE), 2, None),  # open
    (FileCall(_HERE), 85, None),  # creat
    (FileCall(_AT), 257, 56),  # openat
    (FileCall(_AT), 437, 437),  # openat2
    (FileCall(_HERE), 4, None),  # stat
    (FileCall(_HERE, follows=False), 6, None),  # lstat
    (FileCall(_AT, flags=3), 262, 79),  # newfstatat
    (FileCall(_AT, flags=2), 332, 291),  # statx
    (FileCall(_HERE), 21, None),  # access
    (FileCall(_AT), 269, 48),  # faccessat
    (FileCall(_AT, flags=3), 439, 439),  # faccessat2
    (FileCall(_HERE, follows=False), 89, None),  # readlink
    (FileCall(_AT, follows=False), 267, 78),  # readlinkat
    (FileCall(_HERE, runs=True), 59, 221),  # execve
    (FileCall(_AT, runs=True), 322, 281),  # execveat
    (FileCall((), lists=True), 78, None),  # getdents
    (FileCall((), lists=True), 217, 61),  # getdents64
    (FileCall(_HERE), 76, 45),  # truncate
    (FileCall((Argument(0), Argument(1)), follows=False), 82, None),  # rename
    (FileCall((Argument(1, 0), Argument(3, 2)), follows=False), 264, 38),  # renameat
    (FileCall((Argument(1, 0), Argument(3, 2)), follows=False), 316, 276),  # renameat2
    (FileCall((Argument(0), Argument(1)), follows=False), 86, None),  # link
    (FileCall((Argument(1, 0), Argument(3, 2)), follows=False), 265, 37),  # linkat
    (FileCall((Argument(1),), follows=False), 88, None),  # symlink
    (FileCall((Argument(2, 1),), follows=False), 266, 36),  # symlinkat
    (FileCall(_HERE, follows=False), 87, None),  # unlink
    (FileCall(_AT, follows=False), 263, 35),  # unlinkat
    (FileCall(_HERE, follows=False), 83, None),  # mkdir
    (FileCall(_AT, follows=False), 258, 34),  # mkdirat
    (FileCall(_HERE, follows=False), 84, None),  # rmdir
    (FileCall(_HERE, follows=False), 133, None),  # mknod
    (FileCall(_AT, follows=False), 259, 33),  # mknodat
    (FileCall(_HERE), 90, None),  # chmod
    (FileCall(_AT), 268, 53),  # fchmodat
    (FileCall(_AT, flags=3), 452, 452),  # fchmodat2
    (FileCall(_HERE), 92, None),  # chown
    (FileCall(_HERE, follows=False), 94, None),  # lchown
    (FileCall(_AT, flags=4), 260, 54),  # fchownat
    (FileCall(_HERE), 132, None),  # utime
    (FileCall(_HERE), 235, None),  # utimes
    (FileCall(_AT), 261, None),  # futimesat
    (FileCall(_AT, flags=3), 280, 88),  # utimensat
    (FileCall(_HERE), 188, 5),  # setxattr
    (FileCall(_HERE, follows=False), 189, 6),  # lsetxattr
    (FileCall(_HERE), 191, 8),  # getxattr
    (FileCall(_HERE, follows=False), 192, 9),  # lgetxattr
    (FileCall(_HERE), 194, 11),  # listxattr
    (FileCall(_HERE, follows=False), 195, 12),  # llistxattr
    (FileCall(_HERE), 197, 14),  # removexattr
    (FileCall(_HERE, follows=False), 198, 15),  # lremovexattr
    (FileCall((Argument(1),)), 254, 27),  # inotify_add_watch
)


class Machine(NamedTuple):
    """The numbers of one architecture. ``calls``: those that the gate sees. ``with_flags``: of
    calls that may name an open file, the argument whose EMPTY_PATH says so."""

    audit: int
    seccomp: int
    getppid: int
    calls: Mapping[int, FileCall]
    with_flags: Mapping[int, int]


IO_URING_SETUP: Final = 425
FOREIGN_CALLS: Final = 0x40000000
"""On x86-64, from this number on: calls of x32 programs."""


def _machine(audit: int, seccomp: int, getppid: int, column: int) -> Machine:
    calls = {row[column]: row[0] for row in _CALLS}
    known = {number: call for number, call in calls.items() if isinstance(number, int)}
    flags = {number: call.flags for number, call in known.items() if call.flags is not None}
    return Machine(audit, seccomp, getppid, known, flags)


def this_machine() -> Machine | None:
    """The numbers of this machine; None where the gate knows none."""
    name = platform.machine()
    if name == "x86_64":
        return _machine(0xC000003E, 317, 110, 1)
    if name == "aarch64":
        return _machine(0xC00000B7, 277, 173, 2)
    return None
