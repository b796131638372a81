"""What the kernel's errors say of a name: two of them that it is not there, all others nothing.

After EIO, ESTALE, ELOOP, EACCES, EMFILE, ENOMEM, ETIMEDOUT, or ENOTCONN of a dead FUSE, it is
unknown whether the name exists, and never counts as absent. So ``os.path.exists``, ``lexists``,
``ismount`` and the like, which answer False to all of them, do not decide what may be lost.
"""

from __future__ import annotations

import os
from typing import Final

GONE: Final = (FileNotFoundError, NotADirectoryError)
"""ENOENT, and ENOTDIR: a component of the path is no directory any more."""


def is_there(path: bytes | str | os.PathLike[str]) -> bool:
    """Whether anything has that name, also a symlink that leads nowhere. OSError where that is
    unknown."""
    try:
        os.lstat(path)
    except GONE:
        return False
    return True
