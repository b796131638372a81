"""Removing a tree of any depth, with any modes, without following a symlink."""

from __future__ import annotations

import os
import secrets
import stat
from pathlib import Path
from typing import Final

_DIRECTORY: Final = os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


def remove_tree(root: Path) -> None:
    """Remove ``root`` and all in it; gone already is fine. Killed half-way, a repeat goes on.

    Folders are pulled up into ``root`` and emptied there one after the other. shutil.rmtree needs a
    stack frame and a descriptor for each level and fails at about 1,000 levels.
    """
    try:
        root_fd = _open(root, None)
    except FileNotFoundError:
        return
    try:
        while folders := _unlink_files(root_fd):
            for name in folders:
                fd = _open(name, root_fd)
                try:
                    for inner in _unlink_files(fd):
                        # rename(2) of a folder needs leave to write into it, for its "..".
                        os.close(_open(inner, fd))
                        free = f".removed.{secrets.token_hex(8)}"
                        os.rename(inner, free, src_dir_fd=fd, dst_dir_fd=root_fd)
                finally:
                    os.close(fd)
                os.rmdir(name, dir_fd=root_fd)
    finally:
        os.close(root_fd)
    os.rmdir(root)


def _unlink_files(fd: int) -> list[str]:
    """Unlink all that is no folder; the names of the folders."""
    with os.scandir(f"/proc/self/fd/{fd}") as entries:
        found = [(entry.name, entry.is_dir(follow_symlinks=False)) for entry in entries]
    for name, is_folder in found:
        if not is_folder:
            os.unlink(name, dir_fd=fd)
    return [name for name, is_folder in found if is_folder]


def _open(name: str | Path, dir_fd: int | None) -> int:
    """A descriptor of a real folder that its owner may read, search and write."""
    fd = os.open(name, _DIRECTORY, dir_fd=dir_fd)
    mode = stat.S_IMODE(os.fstat(fd).st_mode)
    if mode & stat.S_IRWXU != stat.S_IRWXU:
        # An O_PATH descriptor cannot be fchmod'ed, its name in /proc can, without any race.
        os.chmod(f"/proc/self/fd/{fd}", mode | stat.S_IRWXU)
    return fd
