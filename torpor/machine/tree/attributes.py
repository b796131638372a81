"""Set the attributes of entries on their names."""

from __future__ import annotations

import errno
import os
import threading
from typing import Final

from torpor.machine.tree.walk import read_xattrs
from torpor.shared.format.manifest import Entry

HOST_XATTRS: Final = (b"security.selinux", b"security.ima", b"security.evm", b"security.SMACK")
"""Labels, or prefixes of labels, that a host sets on every file by its own policy."""


class Attributes:
    """Mode, owner, time and extended attributes; a warning names what cannot be set.
    Thread-safe.
    """

    def __init__(self) -> None:
        self._root = os.geteuid() == 0
        self._own = (os.geteuid(), os.getegid())
        self._lock = threading.Lock()
        self.warnings: list[str] = []
        self.refused_xattrs: set[tuple[int, bytes, bytes]] = set()
        """Root, path and name of extended attributes that this machine refuses."""

    @property
    def sets_owners(self) -> bool:
        """Whether this process may give files away."""
        return self._root

    def warn_of_owner(self, entry: Entry) -> None:
        """Warn where an owner is not restored."""
        if not self._root and (entry.uid, entry.gid) != self._own:
            self._warn_once("owners are not restored: the agent does not run as root")

    def apply(self, fd: int, entry: Entry, *, replacing: bool = False) -> None:
        """Set them on an open file or directory. ``replacing``: first remove extended attributes
        that it has from before.
        """
        if self.sets_owners:
            os.fchown(fd, entry.uid, entry.gid)
        self.warn_of_owner(entry)
        if replacing:
            self._remove_others(fd, entry)
        for key, value in entry.xattrs:  # while we may write: the mode may be read-only
            self._xattr(fd, key, value, entry)
        os.fchmod(fd, entry.mode)  # after chown, which clears set-user-ID
        os.utime(fd, ns=(entry.mtime_ns, entry.mtime_ns))

    def apply_to_symlink(self, parent: int, name: bytes, entry: Entry) -> None:
        """Set them on the symlink ``name`` in the directory ``parent`` itself."""
        if self.sets_owners:
            os.chown(name, entry.uid, entry.gid, dir_fd=parent, follow_symlinks=False)
        if entry.xattrs:
            # security.* and trusted.* only: Linux has no user.* on symlinks
            where = b"/proc/self/fd/%d/%s" % (parent, name)
            for key, value in entry.xattrs:
                self._xattr(where, key, value, entry)
        os.utime(name, ns=(entry.mtime_ns, entry.mtime_ns), dir_fd=parent, follow_symlinks=False)

    def _remove_others(self, fd: int, entry: Entry) -> None:
        wanted = {key for key, _ in entry.xattrs}
        try:
            there = read_xattrs(fd)
        except OSError as exc:
            self._warn(
                f"{os.fsdecode(entry.path)!r}: extended attributes that it may have from before "
                f"are not removed: {exc.strerror}"
            )
            return
        for key, _ in there:
            if key not in wanted and not key.startswith(HOST_XATTRS):
                try:
                    os.removexattr(fd, key)
                except OSError as exc:
                    self._warn(
                        f"{os.fsdecode(entry.path)!r}: extended attribute {os.fsdecode(key)} is "
                        f"not removed: {exc.strerror}"
                    )

    def _xattr(self, where: int | bytes, key: bytes, value: bytes, entry: Entry) -> None:
        try:
            os.setxattr(where, key, value, follow_symlinks=isinstance(where, int))
        except OSError as exc:
            if exc.errno in (errno.ENOSPC, errno.EDQUOT):
                raise
            with self._lock:
                self.refused_xattrs.add((entry.root, entry.path, key))
            self._warn(
                f"{os.fsdecode(entry.path)!r}: extended attribute {os.fsdecode(key)} is not "
                f"restored: {exc.strerror}"
            )

    def _warn(self, text: str) -> None:
        with self._lock:
            self.warnings.append(text)

    def _warn_once(self, text: str) -> None:
        with self._lock:
            if text not in self.warnings:
                self.warnings.append(text)
