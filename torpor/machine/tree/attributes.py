"""Sets the attributes of entries on their names."""

from __future__ import annotations

import errno
import os
import threading
from collections import Counter
from collections.abc import Sequence
from datetime import datetime, timedelta, timezone
from typing import Final

from torpor.machine.tree.abilities import EVERYTHING, FilesystemAbilities
from torpor.machine.tree.names import Signature
from torpor.machine.tree.refusals import NO_ROOM, is_full, write_refused
from torpor.machine.tree.walk import read_xattrs
from torpor.shared.format.manifest import Entry

HOST_XATTRS: Final = (b"security.selinux", b"security.ima", b"security.evm", b"security.SMACK")
"""Extended attributes, or prefixes of them, that a host sets on every file by its own policy."""
_NO_OWNER: Final = {errno.EPERM, errno.EINVAL, errno.EOVERFLOW, errno.EOPNOTSUPP}
"""Errors of a file system without owners, or of a container that lacks the user."""
_NAMED: Final = 5  # files that one warning names
_GRANTING: Final = (b"user.", b"system.posix_acl_", b"security.capability")
"""Prefixes of extended attributes that somebody has set, or that a directory hands down. All others
are a file system's own view of a file, such as system.nfs4_acl on NFS, and cannot be removed."""


class Attributes:
    """Mode, owner, time and extended attributes; a warning names what cannot be set.
    Thread-safe. ``abilities``: of the file system of each root.
    """

    def __init__(self, abilities: Sequence[FilesystemAbilities] = ()) -> None:
        self.abilities = abilities
        self._root = os.geteuid() == 0
        self._own = (os.geteuid(), os.getegid())
        self._lock = threading.Lock()
        self.warnings: list[str] = []
        self.refused_xattrs: set[tuple[int, bytes, bytes]] = set()
        """Root, path and name of extended attributes that this machine refuses."""
        self.refused_owners: set[tuple[int, int]] = set()
        """User and group that this machine refuses."""
        self.apart: set[tuple[int, bytes]] = set()
        """Root and path of hard links that are separate files on this machine."""
        self.unchanged: dict[tuple[int, bytes], Signature] = {}
        """Root and path of names that were compared before, when they had these signatures."""
        self._several: Counter[str] = Counter()
        self._names: dict[str, list[str]] = {}

    @property
    def sets_owners(self) -> bool:
        """Whether this process may give files away."""
        return self._root

    def restores_owner(self, entry: Entry) -> bool:
        """Whether the owner of a name was to be restored, and this machine has not refused it."""
        return self._root and (entry.uid, entry.gid) not in self.refused_owners

    def warn_of_owner(self, entry: Entry) -> None:
        """Warn where an owner is not restored."""
        if not self._root and (entry.uid, entry.gid) != self._own:
            self._warn_once("owners are not restored: the agent does not run as root")

    def able(self, root: int) -> FilesystemAbilities:
        """The abilities of the file system of a root."""
        return self.abilities[root] if self.abilities else EVERYTHING

    def note_time(self, entry: Entry) -> None:
        """Note a file whose time this file system cannot keep."""
        able = self.able(entry.root)
        held_ns, step_ns = able.held_ns(entry.mtime_ns), able.step_ns
        if held_ns != entry.mtime_ns:
            far = abs(held_ns - entry.mtime_ns) >= step_ns
            self._note(
                f"the time of the last change becomes {_moment(held_ns)}, because the file system "
                "of the target holds none before or after that"
                if far
                else "the time of the last change is cut to what the file system of the target "
                f"holds: {step_ns / 1e9:g} s",
                entry,
            )

    def note_apart(self, entry: Entry, words: str) -> None:
        """Note a hard link that is made as a separate file."""
        with self._lock:
            self.apart.add((entry.root, entry.path))
        self._note(f"the hard link is a file of its own here ({words})", entry)

    def noted(self) -> list[str]:
        """Every warning. A problem that many files share is one warning, which names the first
        few."""
        with self._lock:
            several = [
                f"{', '.join(names)}{_more(self._several[words] - len(names))}: {words}"
                for words, names in self._names.items()
            ]
            if any(not able.modes for able in self.abilities):
                several.append("modes are not restored: the file system of a target has none")
            return [*dict.fromkeys([*self.warnings, *several])]

    def apply(self, fd: int, entry: Entry, *, replacing: bool = False) -> None:
        """Set the attributes on an open file or directory. ``replacing``: first remove its present
        extended attributes."""
        self._own_by(fd, entry)
        if replacing:
            self.remove_others(fd, entry)
        for key, value in entry.xattrs:  # set first, because the mode may be read-only
            self._xattr(fd, key, value, entry, fd)
        if self.able(entry.root).modes:
            os.fchmod(fd, entry.mode)  # after chown, which clears the set-user-ID bit
        os.utime(fd, ns=(entry.mtime_ns, entry.mtime_ns))
        self.note_time(entry)

    def apply_to_symlink(self, parent: int, name: bytes, entry: Entry) -> None:
        """Set the attributes on the symlink ``name`` itself, in the directory ``parent``."""
        self._own_by(name, entry, parent)
        if entry.xattrs:
            # only security.* and trusted.*: Linux has no user.* on symlinks
            where = b"/proc/self/fd/%d/%s" % (parent, name)
            for key, value in entry.xattrs:
                self._xattr(where, key, value, entry, parent)
        os.utime(name, ns=(entry.mtime_ns, entry.mtime_ns), dir_fd=parent, follow_symlinks=False)
        self.note_time(entry)

    def _own_by(self, of: int | bytes, entry: Entry, parent: int | None = None) -> None:
        """Set the owner. ``of``: an open file, or a name in the directory ``parent``."""
        self.warn_of_owner(entry)
        if not self.sets_owners:
            return
        try:
            follow = parent is None
            os.chown(of, entry.uid, entry.gid, dir_fd=parent, follow_symlinks=follow)
        except OSError as exc:
            if exc.errno not in _NO_OWNER:
                raise
            with self._lock:
                self.refused_owners.add((entry.uid, entry.gid))
            self._note(f"the owner {entry.uid}:{entry.gid} is not restored: {exc.strerror}", entry)

    def remove_others(self, fd: int, entry: Entry) -> None:
        """Remove extended attributes of an open file or directory that its entry does not have."""
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

    def _xattr(self, where: int | bytes, key: bytes, value: bytes, entry: Entry, near: int) -> None:
        """Set one extended attribute. ``near``: a descriptor on the same file system."""
        try:
            os.setxattr(where, key, value, follow_symlinks=isinstance(where, int))
        except OSError as exc:
            if exc.errno in NO_ROOM and is_full(near, exc):
                raise write_refused(exc, entry.path, near) from None
            too_large = exc.errno in NO_ROOM  # ext4's error for more than a block
            why = f"{len(value):,} bytes are too many for this file system"
            with self._lock:
                self.refused_xattrs.add((entry.root, entry.path, key))
            self._warn(
                f"{os.fsdecode(entry.path)!r}: extended attribute {os.fsdecode(key)} is not "
                f"restored: {why if too_large else exc.strerror}"
            )

    def _note(self, words: str, entry: Entry) -> None:
        with self._lock:
            self._several[words] += 1
            names = self._names.setdefault(words, [])
            if len(names) < _NAMED:
                names.append(
                    repr(os.fsdecode(entry.path)) if entry.path else "the directory itself"
                )

    def _warn(self, text: str) -> None:
        with self._lock:
            self.warnings.append(text)

    def _warn_once(self, text: str) -> None:
        with self._lock:
            if text not in self.warnings:
                self.warnings.append(text)


def widens(key: bytes) -> bool:
    """Whether an extended attribute that a snapshot lacks describes the file, and not its host or
    its file system."""
    return key.startswith(_GRANTING)


def _more(count: int) -> str:
    return f" and {count:,} more" if count > 0 else ""


def _moment(mtime_ns: int) -> str:
    when = datetime(1970, 1, 1, tzinfo=timezone.utc) + timedelta(seconds=mtime_ns // 10**9)
    return f"{when:%Y-%m-%d %H:%M:%S} UTC"
