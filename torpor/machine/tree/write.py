"""Writes a tree: never outside its target, never through a symlink.

Everything is opened relative to a descriptor of the target, component by component, without
following links; symlinks are made last. The manifest was checked before (format/checks.py).
"""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Container, Iterator, Sequence
from contextlib import suppress
from itertools import groupby
from typing import BinaryIO, Final, Protocol

import msgspec
from blake3 import blake3

from torpor.machine.tree.attributes import Attributes
from torpor.machine.tree.batch import NewFile, is_plain, write_files
from torpor.machine.tree.directories import Directories
from torpor.machine.tree.links import HardLinks
from torpor.machine.tree.naming import is_taken, take_name
from torpor.machine.tree.refusals import making, set_size, write_all
from torpor.shared.codecs.codec import Buffer
from torpor.shared.errors import InvalidInput
from torpor.shared.format.manifest import DIRECTORY, FILE, HARDLINK, SYMLINK, Entry
from torpor.shared.values import MIB

_DEFAULT_ACL: Final = b"system.posix_acl_default"


class ContentWriter(Protocol):
    """Receives checked content, in any order and from any thread."""

    def write_files(self, files: Sequence[tuple[Entry, int]], data: Buffer) -> None:
        """Write whole files: the content of each begins at that offset of ``data``."""

    def write_at(self, entry: Entry, offset: int, data: Buffer) -> None:
        """Write a run of a file."""

    def close(self) -> None:
        """The calling thread has finished writing."""


class TreeWriter:
    """Creates the entries of one snapshot below ``targets``. Thread-safe from ``prepare`` on.

    A file is private (mode 0600) until its content is complete. ``attributes`` know what an earlier
    writer could not set. ``stage``: the name of a directory, made in each target, in which files
    are written until ``finish`` gives them their names; without it they have these at once.
    """

    def __init__(
        self,
        targets: Sequence[bytes],
        attributes: Attributes | None = None,
        stage: bytes = b"",
    ) -> None:
        self._targets = targets
        self._stage = stage
        self._directories = Directories(targets, "empty the target, and wake again")
        self.attributes = attributes or Attributes()
        self._links = HardLinks(self._directories, self.attributes)

    @property
    def staged(self) -> bool:
        """Whether files get their names only when they are finished."""
        return bool(self._stage)

    def prepare(
        self,
        entries: Sequence[Entry],
        in_pieces: Callable[[Entry], bool],
        *,
        afresh: bool,
        stale: Callable[[Entry], bool] = lambda entry: False,
        passages: Container[tuple[int, bytes]] = (),
    ) -> list[Entry]:
        """Make every directory, and every file that is written in pieces, at its size. Returns the
        files that were not there, unless everything is made ``afresh``.

        ``afresh``: truncate existing files first, so that holes are holes again. ``stale``: files
        whose names are removed before, if files are staged. ``passages``: directories, by root and
        path, that stay as ``open_passages`` has left them.
        """
        for number, target in enumerate(self._targets):
            os.makedirs(target, mode=0o755, exist_ok=True)
            if not stat.S_ISDIR(os.lstat(target).st_mode):
                raise InvalidInput(
                    f"target {os.fsdecode(target)} of root {number} is not a directory"
                )
            if afresh:
                self._refuse_inherited(number, b"")
        self._make_stages(entries)
        made = []
        for entry in entries:
            if self.staged and entry.kind != DIRECTORY and stale(entry):
                self._take_back(entry, afresh)
            if entry.kind == DIRECTORY and entry.path:
                parent, name = self._parent(entry)
                try:
                    with making(entry.path, parent):
                        os.mkdir(name, 0o700, dir_fd=parent)
                except FileExistsError:
                    # an interrupted restore made the file; its mode may forbid opening it
                    mode = _passable(entry) if (entry.root, entry.path) in passages else 0o700
                    self._directories.unlock(parent, name, entry.path, stat.S_IFDIR, mode)
                    if afresh:
                        self._refuse_inherited(entry.root, entry.path)
            elif entry.kind == FILE and in_pieces(entry) and (afresh or not self._is_named(entry)):
                if not afresh and not is_taken(*self._where(entry)):
                    made.append(entry)
                fd = self._create(*self._where(entry), entry)
                try:
                    if afresh:
                        os.ftruncate(fd, 0)
                    set_size(fd, entry)
                finally:
                    os.close(fd)
        return made

    def _refuse_inherited(self, root: int, path: bytes) -> None:
        """Remove the default ACL of a directory: every name that is made in it would get that, and
        somebody could read a file before it has its own attributes."""
        with suppress(OSError):  # there is none, or it is not ours: the comparison finds it
            os.removexattr(self._directories.open(root, path), _DEFAULT_ACL)

    def write_files(self, files: Sequence[tuple[Entry, int]], data: Buffer) -> None:
        """Create files with all their content and attributes."""
        view = memoryview(data)
        for _, together in groupby(files, self._holder):
            for entry, offset in self._left_of([*together], data):
                self.write_whole(entry, view[offset : offset + entry.size])

    def _holder(self, file: tuple[Entry, int]) -> tuple[int, bytes]:
        """The directory that a file is written in."""
        entry, _ = file
        return entry.root, self._stage or entry.path.rpartition(b"/")[0]

    def _left_of(
        self, files: Sequence[tuple[Entry, int]], data: Buffer
    ) -> Iterator[tuple[Entry, int]]:
        """Create files of one directory together, and yield those that have to be made alone."""
        plain = []
        for entry, offset in files:
            if entry.xattrs or not is_plain(entry.mtime_ns):
                yield entry, offset
            else:
                plain.append((entry, offset))
        if not plain:
            return
        parent, _ = self._where(plain[0][0])
        new = [
            NewFile(
                self._name_of(entry),
                offset,
                entry.size,
                entry.mode,
                entry.uid,
                entry.gid,
                entry.mtime_ns,
            )
            for entry, offset in plain
        ]
        for entry, _ in plain:
            self.attributes.warn_of_owner(entry)
            self.attributes.note_time(entry)
        left = write_files(parent, new, data, owners=self.attributes.sets_owners)
        yield from (plain[number] for number in left)

    def write_whole(self, entry: Entry, data: Buffer) -> None:
        """Create a file with all its content and attributes."""
        parent, name = self._where(entry)
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        with making(entry.path, parent):
            try:
                fd = os.open(name, flags, 0o600, dir_fd=parent)
            except FileExistsError:
                self._unlink(name, parent, entry)  # left by an interrupted restore
                fd = os.open(name, flags, 0o600, dir_fd=parent)
        try:
            write_all(fd, data, 0, entry)
            self.attributes.apply(fd, entry)
        finally:
            os.close(fd)

    def write_at(self, entry: Entry, offset: int, data: Buffer) -> None:
        """Write a run of a file that ``prepare`` made."""
        fd = self._reopen(self._where(entry), entry, os.O_WRONLY)
        try:
            write_all(fd, data, offset, entry)
        finally:
            os.close(fd)

    def finish(self, entries: Sequence[Entry], in_pieces: Callable[[Entry], bool]) -> list[Entry]:
        """Finish files written in pieces; make hard links and symlinks; finish directories.

        Where files are staged, nothing is replaced: if something else has their names, or those of
        links, it returns these entries and leaves the directories for later.
        """
        self._make_stages(entries)
        taken: dict[tuple[int, bytes], Entry] = {}
        others: dict[int, list[Entry]] = {HARDLINK: [], SYMLINK: [], DIRECTORY: []}

        def give(entry: Entry) -> None:
            if not self.give(entry, in_pieces):
                taken[entry.root, entry.path] = entry

        for entry in entries:
            if entry.kind == FILE:
                give(entry)
            else:
                others[entry.kind].append(entry)
        for entry in (*others[HARDLINK], *others[SYMLINK]):
            if (entry.root, entry.target) not in taken:
                give(entry)
        if taken:
            return [*taken.values()]
        self._remove_stages(entries)
        for entry in reversed(others[DIRECTORY]):  # what is inside first: it moves their mtimes
            self._finish_directory(entry)
        return []

    def give(self, entry: Entry, in_pieces: Callable[[Entry], bool]) -> bool:
        """Finish a complete file, or make a link; False where something else has its name."""
        if entry.kind == HARDLINK:
            return self._link(entry)
        if entry.kind == SYMLINK:
            return self._symlink(entry)
        if entry.size == 0:
            return self._finish_empty(entry)
        if in_pieces(entry):
            place = self._parent(entry) if self._is_named(entry) else self._where(entry)
            fd = self._reopen(place, entry, os.O_RDONLY)
            try:
                self.attributes.apply(fd, entry)
            finally:
                os.close(fd)
        return not self.staged or self._name(entry)

    def open_passages(self, entries: Sequence[Entry]) -> None:
        """Give directories that are still written in their owners, and let others through as their
        modes say. What new files would inherit is set by ``finish``: extended attributes (an ACL)
        and set-group-ID."""
        for entry in entries:
            passable = msgspec.structs.replace(entry, mode=_passable(entry), xattrs=())
            self._finish_directory(passable)

    def close(self) -> None:
        """Forget the calling thread's open directories."""
        self._directories.close()

    def _finish_empty(self, entry: Entry) -> bool:
        parent, name = self._parent(entry)
        if self.staged and is_taken(parent, name):
            there = _lstat(parent, name)
            if there.st_size or not stat.S_ISREG(there.st_mode):
                return False
        fd = self._create(parent, name, entry)
        try:
            self.attributes.apply(fd, entry)
        finally:
            os.close(fd)
        return True

    def _name(self, entry: Entry) -> bool:
        """Give a staged file its name."""
        parent, name = self._parent(entry)
        holder, staged = self._where(entry)
        try:
            if take_name(staged, name, holder=holder, parent=parent):
                return True
        except FileNotFoundError:
            return True  # a run that was killed has named it; if not, the comparison finds that
        alike = _is_alike(_lstat(parent, name), _lstat(holder, staged))
        if not alike and not _may_replace(entry.path, (parent, name), (holder, staged)):
            return False
        os.rename(staged, name, src_dir_fd=holder, dst_dir_fd=parent)  # an earlier run's
        return True

    def _is_named(self, entry: Entry) -> bool:
        """Whether an earlier run has given a staged file its name."""
        return self.staged and not is_taken(*self._where(entry)) and is_taken(*self._parent(entry))

    def _take_back(self, entry: Entry, afresh: bool) -> None:
        """Take a name back that an earlier run gave: of a file that is still to be written in, or
        where all is begun ``afresh``, of anything."""
        parent, name = self._parent(entry)
        if afresh:
            self._unlink(name, parent, entry)
            return
        holder, staged = self._where(entry)
        if is_taken(parent, name) and not is_taken(holder, staged):
            os.rename(name, staged, src_dir_fd=parent, dst_dir_fd=holder)

    def _make_stages(self, entries: Sequence[Entry]) -> None:
        """Make the directory in which files wait for their names, in each root that has files."""
        if not self.staged:
            return
        for root in {entry.root for entry in entries if entry.kind == FILE}:
            parent = self._directories.open(root, b"")
            try:
                os.mkdir(self._stage, 0o700, dir_fd=parent)
            except FileExistsError:
                pass
            except PermissionError:  # finished by an interrupted restore, and read-only
                os.fchmod(parent, stat.S_IMODE(os.fstat(parent).st_mode) | stat.S_IRWXU)
                os.mkdir(self._stage, 0o700, dir_fd=parent)

    def _remove_stages(self, entries: Sequence[Entry]) -> None:
        """Remove it from the targets in which nothing is still to be written: these are finished
        themselves."""
        for entry in entries if self.staged else ():
            if entry.kind == DIRECTORY and not entry.path:
                with suppress(FileNotFoundError, InvalidInput):  # no file was staged there
                    holder = self._directories.open(entry.root, self._stage)
                    for name in os.listdir(holder):
                        os.unlink(name, dir_fd=holder)
                    self._directories.close()
                    os.rmdir(self._stage, dir_fd=self._directories.open(entry.root, b""))

    def _create(self, parent: int, name: bytes, entry: Entry) -> int:
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        try:
            with making(entry.path, parent):
                fd = os.open(name, flags, 0o600, dir_fd=parent)
        except PermissionError:  # finished by an interrupted restore, and read-only
            self._directories.unlock(parent, name, entry.path, stat.S_IFREG, 0o600)
            fd = os.open(name, flags, 0o600, dir_fd=parent)
        except OSError as exc:
            raise self._directories.swapped(exc, entry.path) from None
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            os.close(fd)
            raise self._directories.swapped(None, entry.path)
        return fd

    def _reopen(self, place: tuple[int, bytes], entry: Entry, access: int) -> int:
        parent, name = place
        try:  # NONBLOCK: a FIFO that replaced the file must not block the agent
            flags = access | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
            return os.open(name, flags, dir_fd=parent)
        except OSError as exc:
            raise self._directories.swapped(exc, entry.path) from None

    def _link(self, entry: Entry) -> bool:
        with self._directories.held(entry.root, os.path.dirname(entry.path)) as parent:
            name = os.path.basename(entry.path)
            if not self.staged:
                self._unlink(name, parent, entry)
            try:
                self._links.make(entry, parent, name)
            except FileExistsError:
                of_parent, of_name = self._links.source(entry)
                there, ours = _lstat(parent, name), _lstat(of_parent, of_name)
                if os.path.samestat(there, ours):
                    return True
                if not _is_alike(there, ours):
                    return False
                os.unlink(name, dir_fd=parent)  # of an earlier run's file
                self._links.make(entry, parent, name)
            except FileNotFoundError as exc:  # a program has removed the file that it links to
                raise self._directories.swapped(exc, entry.target) from None
        return True

    def _symlink(self, entry: Entry) -> bool:
        parent, name = self._parent(entry)
        if not self.staged:
            self._unlink(name, parent, entry)
        try:
            with making(entry.path, parent):
                os.symlink(entry.target, name, dir_fd=parent)
        except FileExistsError:
            there = _lstat(parent, name)
            if not stat.S_ISLNK(there.st_mode) or os.readlink(name, dir_fd=parent) != entry.target:
                return False
        self.attributes.apply_to_symlink(parent, name, entry)
        return True

    def _unlink(self, name: bytes, parent: int, entry: Entry) -> None:
        try:
            os.unlink(name, dir_fd=parent)
        except FileNotFoundError:
            pass
        except IsADirectoryError as exc:
            raise self._directories.swapped(exc, entry.path) from None

    def _finish_directory(self, entry: Entry) -> None:
        fd = os.dup(self._directories.open(entry.root, entry.path))
        try:
            self.attributes.apply(fd, entry, replacing=True)
        finally:
            os.close(fd)

    def _parent(self, entry: Entry) -> tuple[int, bytes]:
        return self._directories.parent(entry.root, entry.path)

    def _where(self, entry: Entry) -> tuple[int, bytes]:
        """Where a file is until it is finished: its directory, and its name in that."""
        if not self.staged:
            return self._parent(entry)
        return self._directories.open(entry.root, self._stage), self._name_of(entry)

    def _name_of(self, entry: Entry) -> bytes:
        """The name of a file until it is finished."""
        if self.staged:
            return blake3(entry.path).hexdigest(16).encode()
        return entry.path.rpartition(b"/")[2]


def _passable(entry: Entry) -> int:
    """A mode with which the agent can still write in a directory."""
    return entry.mode & ~(stat.S_ISUID | stat.S_ISGID) | stat.S_IRWXU


def _lstat(parent: int, name: bytes) -> os.stat_result:
    return os.stat(name, dir_fd=parent, follow_symlinks=False)


def _is_alike(there: os.stat_result, ours: os.stat_result) -> bool:
    """Whether a file has the size and the time of one that was restored: no program has made or
    changed it."""
    is_file = stat.S_ISREG(there.st_mode)
    return is_file and (there.st_size, there.st_mtime_ns) == (ours.st_size, ours.st_mtime_ns)


def _may_replace(path: bytes, there: tuple[int, bytes], ours: tuple[int, bytes]) -> bool:
    """Whether nothing is lost with a program's file: Python makes it again, or it has the same
    bytes."""
    try:
        with _opened(*there) as theirs, _opened(*ours) as other:
            if not stat.S_ISREG(os.fstat(theirs.fileno()).st_mode):
                return False
            if b"__pycache__/" in path and path.endswith(b".pyc"):
                return True
            size = os.fstat(theirs.fileno()).st_size
            if size != os.fstat(other.fileno()).st_size:
                return False
            return all(theirs.read(MIB) == other.read(MIB) for _ in range(0, size, MIB))
    except OSError:
        return False


def _opened(parent: int, name: bytes) -> BinaryIO:
    fd = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=parent)
    return os.fdopen(fd, "rb")
