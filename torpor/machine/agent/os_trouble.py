"""An error of the operating system that nothing else explains, in words for its reader."""

from __future__ import annotations

import errno
import os
from typing import Final

_NO_PROCESSES: Final = (
    "the login may start no more processes or threads: raise `ulimit -u` or the container's limit "
    "of processes, or end programs there, then run it again"
)
_STEPS: Final = {
    "let the login's user do that (chmod, chown, chattr -i) or log in as the owner": (
        errno.EACCES,
        errno.EPERM,
    ),
    "its file system is mounted read-only: mount it for writing, or see dmesg, where the kernel "
    "says whether its disk has failed": (errno.EROFS,),
    "the disk under it fails, as dmesg on the machine may say: take another machine": (errno.EIO,),
    "the network file system under it is away: mount it again, or exclude it": (
        errno.ESTALE,
        errno.ENOTCONN,
        errno.EREMOTEIO,
        errno.EHOSTDOWN,
    ),
    "the login may open no more files: raise `ulimit -n` on the machine": (
        errno.EMFILE,
        errno.ENFILE,
    ),
    _NO_PROCESSES: (errno.EAGAIN,),
    "the machine has not enough memory for it": (errno.ENOMEM,),
    "see that nothing else changes it, then run it again": (
        errno.ENOENT,
        errno.ENOTDIR,
        errno.EISDIR,
        errno.EEXIST,
        errno.ENOTEMPTY,
        errno.ELOOP,
        errno.EBUSY,
        errno.ETXTBSY,
    ),
    "its file system cannot hold that: take a directory on another disk": (
        errno.EMLINK,
        errno.EFBIG,
        errno.EINVAL,
        errno.ENAMETOOLONG,
        errno.EOPNOTSUPP,
    ),
}
_STEP_OF: Final = {code: step for step, codes in _STEPS.items() for code in codes}


def os_trouble(error: BaseException) -> str:
    """The file, what the system said of it, and the next step; empty for another error."""
    if isinstance(error, RuntimeError) and "start new thread" in str(error):
        return _NO_PROCESSES
    if not isinstance(error, OSError) or not error.errno:
        return ""
    files = " to ".join(filter(None, (name_of(error.filename), name_of(error.filename2))))
    said = f"{error.strerror} ({errno.errorcode.get(error.errno, error.errno)})"
    step = _STEP_OF.get(error.errno, "run it again, and report this if it stays so")
    return f"{files}: {said}; {step}" if files else f"{said}; {step}"


def name_of(filename: object) -> str:
    """A file's name as text; empty where the error has none."""
    if isinstance(filename, bytes):
        return filename.decode("utf-8", "backslashreplace")
    return str(filename) if isinstance(filename, str | os.PathLike) else ""
