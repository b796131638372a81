"""Flags of files that forbid a change to everybody, including root (chattr)."""

from __future__ import annotations

import fcntl
import os
import struct
from contextlib import suppress
from typing import Final

_GET_FLAGS: Final = 0x80086601
"""FS_IOC_GETFLAGS of Linux: _IOR('f', 1, long), on x86-64 and aarch64."""
_FORBIDDING: Final = {0x10: "+i", 0x20: "+a"}
_OPEN: Final = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


def forbidding(path: bytes) -> str:
    """The forbidding flags of a file or directory, in chattr's letters; empty where it has none, or
    where the file system knows no flags."""
    with suppress(OSError):
        fd = os.open(path, _OPEN)
        try:
            answer = fcntl.ioctl(fd, _GET_FLAGS, bytes(8))
        finally:
            os.close(fd)
        flags = struct.unpack("=I", answer[:4])[0]  # the kernel writes an int
        return " ".join(words for flag, words in _FORBIDDING.items() if flags & flag)
    return ""
