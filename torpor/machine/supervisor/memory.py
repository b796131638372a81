"""A file that is never on a disk: what a child process reads as its standard input."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def in_memory(data: bytes = b"") -> Iterator[int]:
    """A file descriptor from which ``data`` is read. A child may keep it open."""
    fd = os.memfd_create("torpor")
    try:
        left = memoryview(data)
        while left:
            left = left[os.write(fd, left) :]
        os.lseek(fd, 0, os.SEEK_SET)
        yield fd
    finally:
        os.close(fd)
