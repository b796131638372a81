"""Gives a file that was made elsewhere its name, and never replaces a file that has that name."""

from __future__ import annotations

import errno
import os
from typing import Final

NO_LINKS: Final = {errno.EPERM, errno.EOPNOTSUPP, errno.EMLINK, errno.ENOSYS}
"""Errors of a file system that has no hard links, or not so many of one file."""


def take_name(
    staged: bytes, name: bytes, *, holder: int | None = None, parent: int | None = None
) -> bool:
    """Rename the file ``staged`` to ``name``; False if another file has that name.

    ``holder`` and ``parent``: descriptors of the directories that the two are relative to.
    """
    try:
        os.link(staged, name, src_dir_fd=holder, dst_dir_fd=parent, follow_symlinks=False)
    except FileExistsError:
        there = os.stat(name, dir_fd=parent, follow_symlinks=False)
        ours = os.stat(staged, dir_fd=holder, follow_symlinks=False)
        if not os.path.samestat(there, ours):  # otherwise a killed run has linked the file already
            return False
    except OSError as exc:
        if exc.errno not in NO_LINKS:
            raise
        if is_taken(parent, name):
            return False
        os.rename(staged, name, src_dir_fd=holder, dst_dir_fd=parent)
        return True
    os.unlink(staged, dir_fd=holder)
    return True


def is_taken(parent: int | None, name: bytes) -> bool:
    """Whether anything has a name in a directory, also a symlink that leads nowhere."""
    try:
        os.stat(name, dir_fd=parent, follow_symlinks=False)
    except FileNotFoundError:
        return False
    return True
