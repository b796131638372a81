"""Makes a tree on the disk equal to a snapshot, after every needed byte is on the machine. Each
name changes by a rename, so a reader or a killed run finds the old file or the new one. A file that
changed since it was surveyed is neither replaced nor removed."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress

import msgspec

from torpor.machine.tree.abilities import FilesystemAbilities
from torpor.machine.tree.attributes import Attributes
from torpor.machine.tree.changes import Changes, Staged
from torpor.machine.tree.directories import Directories
from torpor.machine.tree.links import HardLinks
from torpor.machine.tree.names import Signature
from torpor.machine.tree.patch import kept_runs, patch
from torpor.machine.tree.staging import Staging
from torpor.machine.tree.survey import Name, same_attributes
from torpor.machine.tree.walk import read_xattrs
from torpor.machine.tree.writers import is_written
from torpor.shared.errors import StillChanging
from torpor.shared.format.manifest import DIRECTORY, FILE, SYMLINK, Entry


class TreeChanger:
    """Applies the changes of one sync. ``names``: the names on the disk when it was surveyed.
    ``written_too``: also replace or remove files that a program has open for writing."""

    def __init__(
        self,
        names: Sequence[dict[bytes, Name]],
        directories: Directories,
        staging: Staging,
        *,
        written_too: bool,
        abilities: Sequence[FilesystemAbilities] = (),
    ) -> None:
        self._names = names
        self._written_too = written_too
        self._directories = directories
        self._staging = staging
        self.attributes = Attributes(abilities)
        self._links = HardLinks(directories, self.attributes)
        self._owners = os.geteuid() == 0
        self._unlocked: set[tuple[int, bytes]] = set()
        self.kept: list[str] = []
        """Directories that stay because they hold other files, such as excluded ones."""

    def apply(
        self,
        changes: Changes,
        entries: Sequence[Entry],
        leftovers: Sequence[tuple[int, bytes, bytes]],
        check: Callable[[], None],
    ) -> None:
        """Make ``changes``, and give every directory of ``entries`` its attributes. ``leftovers``
        (root, path, holder) are staged files that may no longer be needed. ``check`` may raise
        RunCancelled; the next run continues from there."""
        try:
            for root, path, found in changes.removed:
                check()
                self._remove(root, path, found)
            for entry in changes.directories:
                parent, name = self._open(entry)
                self._check_unchanged(entry, parent, name)
                os.mkdir(name, 0o700, dir_fd=parent)
            for staged in changes.staged:
                check()
                self._place(staged, check)
            for entry in changes.symlinks:
                self._symlink(entry)
            for entry in changes.links:
                self._link(entry)
            for entry, found in changes.touched:
                check()
                self._touch(entry, found)
            for root, path, holder in leftovers:
                self._staging.remove(root, path, holder)
            # contents first, because changing them changes the directory's mtime
            for entry in reversed(entries):
                if entry.kind == DIRECTORY:
                    self._finish_directory(entry)
        finally:
            self._directories.close()

    def _remove(self, root: int, path: bytes, name: Name) -> None:
        parent, last = self._directories.parent(root, path)
        self._unlock(root, path, parent)
        self._check_goes(name.entry, parent, last)
        try:
            if name.kind == DIRECTORY:
                os.rmdir(last, dir_fd=parent)
            else:
                os.unlink(last, dir_fd=parent)
        except FileNotFoundError:
            pass
        except OSError as exc:
            if name.kind != DIRECTORY or exc.errno not in (
                errno.ENOTEMPTY,
                errno.EEXIST,
                errno.EBUSY,
            ):
                raise
            self.kept.append(os.fsdecode(path))

    def _place(self, file: Staged, check: Callable[[], None]) -> None:
        entry = file.entry
        with self._held(entry) as (parent, name):
            self._check_goes(entry, parent, name)
            if file.patches is not None:
                found = self._names[entry.root].get(entry.path)
                seen = None if found is None else found.signature
                if patch(file, seen, parent, name, self._staging, self.attributes):
                    return
                if seen is not None:  # in use: processes that have the file open keep the old one
                    whole = file._replace(copies=kept_runs(file, seen))
                    self._staging.copy([whole], lambda _: None, check)
            with self._staging.opened(entry, os.O_RDONLY) as fd:
                # including an ACL that its directory handed down
                self.attributes.apply(fd, entry, replacing=True)
            self._check_goes(entry, parent, name)
            self._staging.place(entry, parent, name)

    def _symlink(self, entry: Entry) -> None:
        parent, name = self._open(entry)
        made = self._free_name(entry, parent)
        os.symlink(entry.target, made, dir_fd=parent)
        self.attributes.apply_to_symlink(parent, made, entry)
        self._check_goes(entry, parent, name)
        os.rename(made, name, src_dir_fd=parent, dst_dir_fd=parent)

    def _link(self, entry: Entry) -> None:
        with self._held(entry) as (parent, name):
            made = self._free_name(entry, parent)
            self._links.make(entry, parent, made)
            self._check_goes(entry, parent, name)
            os.rename(made, name, src_dir_fd=parent, dst_dir_fd=parent)

    def _touch(self, entry: Entry, found: Name) -> None:
        parent, name = self._directories.parent(entry.root, entry.path)
        self._check_unchanged(entry, parent, name)
        fd = self._open_any(name, parent, entry)
        try:
            self.attributes.apply(fd, entry, replacing=True)
        finally:
            os.close(fd)

    def _open_any(self, name: bytes, parent: int, entry: Entry) -> int:
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        try:
            return os.open(name, flags, dir_fd=parent)
        except PermissionError:  # a file of ours whose mode forbids opening it
            self._directories.unlock(parent, name, entry.path, stat.S_IFREG, 0o600)
            return os.open(name, flags, dir_fd=parent)
        except OSError as exc:
            raise self._directories.swapped(exc, entry.path) from None

    def _finish_directory(self, entry: Entry) -> None:
        with self._directories.held(entry.root, entry.path) as fd:
            if not self._is_finished(fd, entry):
                self.attributes.apply(fd, entry, replacing=True)

    def _is_finished(self, fd: int, entry: Entry) -> bool:
        """Whether an open directory has the attributes of its entry."""
        st = os.fstat(fd)
        try:
            xattrs = read_xattrs(fd)
        except OSError:
            return False  # the warning of `apply` says why
        found = msgspec.structs.replace(
            entry,
            mode=stat.S_IMODE(st.st_mode),
            uid=st.st_uid,
            gid=st.st_gid,
            mtime_ns=st.st_mtime_ns,
            xattrs=xattrs,
        )
        return same_attributes(found, entry, owners=self._owners)

    @contextmanager
    def _held(self, entry: Entry) -> Iterator[tuple[int, bytes]]:
        """The directory of a name, which stays open while others are opened, and the name in it."""
        directory, _, name = entry.path.rpartition(b"/")
        with self._directories.held(entry.root, directory) as parent:
            self._unlock(entry.root, entry.path, parent)
            yield parent, name

    def _open(self, entry: Entry) -> tuple[int, bytes]:
        parent, name = self._directories.parent(entry.root, entry.path)
        self._unlock(entry.root, entry.path, parent)
        return parent, name

    def _unlock(self, root: int, path: bytes, parent: int) -> None:
        """Within this context, an ordinary user may write to a read-only directory of theirs; its
        mode is set again at the end."""
        place = (root, path.rpartition(b"/")[0])
        if self._owners or place in self._unlocked:
            return
        mode = stat.S_IMODE(os.fstat(parent).st_mode)
        if mode & 0o700 != 0o700:
            os.fchmod(parent, mode | 0o700)
        self._unlocked.add(place)

    def _free_name(self, entry: Entry, parent: int) -> bytes:
        name = self._staging.name(entry.root, entry.path)
        with suppress(FileNotFoundError):
            os.unlink(name, dir_fd=parent)  # left by a killed run
        return name

    def _check_goes(self, entry: Entry, parent: int, name: bytes) -> None:
        """Raise as ``_check_unchanged`` does, and StillChanging also if a program has the file open
        for writing."""
        self._check_unchanged(entry, parent, name)
        found = self._names[entry.root].get(entry.path)
        if found is None or found.kind != FILE or self._written_too:
            return
        if is_written(name, parent):
            raise StillChanging(
                f"{os.fsdecode(entry.path)!r} was opened for writing on the machine during the "
                "sync: it was left as it is; stop the program that has it open for writing, and "
                "sync again"
            )

    def _check_unchanged(self, entry: Entry, parent: int, name: bytes) -> None:
        """Raise StillChanging unless the name is as it was surveyed, or missing."""
        found = self._names[entry.root].get(entry.path)
        try:
            st = os.lstat(name, dir_fd=parent)
        except FileNotFoundError:
            return
        if found is not None and _is(found, st, name, parent):
            return
        raise StillChanging(
            f"{os.fsdecode(entry.path)!r} was {'changed' if found else 'made'} on the machine "
            "during the sync: it was left as it is; sync again"
        )


def _is(found: Name, st: os.stat_result, name: bytes, parent: int) -> bool:
    if found.kind == FILE:
        was = found.signature
        if was is None or not stat.S_ISREG(st.st_mode):
            return False
        now = Signature.of(st)  # ctime changes when another name of the file is removed
        return (now.inode, now.size, now.mtime_ns) == (was.inode, was.size, was.mtime_ns)
    if found.kind == SYMLINK:
        return stat.S_ISLNK(st.st_mode) and os.readlink(name, dir_fd=parent) == found.entry.target
    if found.kind == DIRECTORY:
        return stat.S_ISDIR(st.st_mode)
    return not (stat.S_ISREG(st.st_mode) or stat.S_ISDIR(st.st_mode))
