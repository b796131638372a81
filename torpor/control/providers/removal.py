"""Removing a tree of any depth, with any modes, without following a symlink."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Collection
from pathlib import Path

_DIRECTORY = os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_TAKEN = (errno.EEXIST, errno.ENOTEMPTY, errno.ENOTDIR)


def remove_contents(root: Path, *, keep: Collection[str] = ()) -> None:
    """Remove what lies in ``root`` except the entries named in ``keep``.

    Directories are pulled up into ``root`` and emptied there one after the other, so that depth
    costs neither descriptors nor recursion. Killed half-way, a repeat removes the rest.
    """
    root_fd = _open(root, None)
    try:
        pulled = 0
        while True:
            directories = _unlink_files(root_fd, keep)
            if not directories:
                return
            for name in directories:
                pulled = _empty_directory(root_fd, name, pulled)
    finally:
        os.close(root_fd)


def remove_tree(root: Path) -> None:
    """Remove ``root`` and all that is in it; gone already is fine."""
    try:
        remove_contents(root)
        os.rmdir(root)
    except FileNotFoundError:
        if os.path.lexists(root):
            raise


def _empty_directory(root_fd: int, name: str, pulled: int) -> int:
    fd = _open(name, root_fd)
    try:
        for inner in _unlink_files(fd, ()):
            # rename(2) of a directory needs leave to write into it, for its "..".
            os.close(_open(inner, fd))
            pulled = _pull_up(root_fd, fd, inner, pulled)
    finally:
        os.close(fd)
    os.rmdir(name, dir_fd=root_fd)
    return pulled


def _pull_up(root_fd: int, fd: int, inner: str, pulled: int) -> int:
    """Move a directory up under a free name; rename would replace an empty one, which is fine."""
    while True:
        pulled += 1
        try:
            os.rename(inner, f".removed.{pulled}", src_dir_fd=fd, dst_dir_fd=root_fd)
        except OSError as cause:
            if cause.errno not in _TAKEN:
                raise
        else:
            return pulled


def _unlink_files(fd: int, keep: Collection[str]) -> list[str]:
    """Unlink all that is no directory; the names of the directories."""
    directories = []
    with os.scandir(f"/proc/self/fd/{fd}") as entries:
        names = [(entry.name, entry.is_dir(follow_symlinks=False)) for entry in entries]
    for name, is_directory in names:
        if name in keep:
            continue
        if is_directory:
            directories.append(name)
        else:
            os.unlink(name, dir_fd=fd)
    return directories


def _open(name: str | Path, dir_fd: int | None) -> int:
    """A descriptor of a real directory that its owner may read, search and write."""
    fd = os.open(name, _DIRECTORY, dir_fd=dir_fd)
    mode = stat.S_IMODE(os.fstat(fd).st_mode)
    if mode & stat.S_IRWXU != stat.S_IRWXU:
        # An O_PATH descriptor cannot be fchmod'ed, its name in /proc can, without any race.
        os.chmod(f"/proc/self/fd/{fd}", mode | stat.S_IRWXU)
    return fd
