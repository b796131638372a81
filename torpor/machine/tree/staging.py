"""Makes files beside a tree, before they are renamed into it.

A staged file has a name of its own in a directory that stays, so that a rename puts it in its
place at once. That name finds what a killed run has staged.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from typing import Final

from blake3 import blake3

from torpor.machine.tree.changes import Copy, Staged
from torpor.machine.tree.content import right_extents
from torpor.machine.tree.directories import Directories
from torpor.machine.tree.names import Signature
from torpor.machine.tree.read import open_unseen
from torpor.machine.tree.refusals import NO_ROOM, making, set_size, write_all
from torpor.shared.codecs.codec import Buffer
from torpor.shared.errors import InvalidInput, StillChanging
from torpor.shared.format.keys import Seal
from torpor.shared.format.manifest import HOLE, Chunk, Entry, EntryId
from torpor.shared.values import MIB

TOKEN_BYTES: Final = 8
_PREFIX: Final = b".torpor-"
_THREADS: Final = 8
_COPY_BYTES: Final = 8 * MIB
_NO_COPY_IN_KERNEL: Final = {errno.ENOSYS, errno.EXDEV, errno.EINVAL, errno.EOPNOTSUPP, errno.EBADF}


def staged_names(token: bytes) -> Callable[[bytes], bool]:
    """A test of paths: whether a name is that of a file staged under ``token``."""
    prefix = _PREFIX + token.hex().encode()

    def is_staged(path: bytes) -> bool:
        return path.rpartition(b"/")[2].startswith(prefix)

    return is_staged


class Staging:
    """The files of one sync that are made beside the tree. Thread-safe."""

    def __init__(self, token: bytes, directories: Directories) -> None:
        self._token = token
        self._directories = directories
        self._holders: dict[EntryId, bytes] = {}

    def name(self, root: int, path: bytes) -> bytes:
        """The name of a staged file until it is renamed to ``path``."""
        place = blake3(b"%d/%b" % (root, path)).digest(length=8).hex().encode()
        return _PREFIX + self._token.hex().encode() + b"-" + place

    def aside(self, root: int, path: bytes) -> bytes:
        """The name of a file while it is patched, in its own directory."""
        return self.name(root, path) + b"-aside"

    def prepare(
        self, staged: Sequence[Staged], chunks: Sequence[Chunk], seal: Seal
    ) -> list[Staged]:
        """Make every file at its size. What an interrupted run put into one is neither copied nor
        fetched again."""
        self._holders = {(s.entry.root, s.entry.path): s.holder for s in staged}

        def prepared(file: Staged) -> Staged:
            try:
                file = self._go_on_patching(file, chunks, seal)
                right = self._take_up(file, chunks, seal)
                if right is None:
                    self._make(file.entry)
                    return file
            finally:
                self._directories.close()
            starts = _starts(file.entry)
            return file._replace(
                copies=[copy for copy in file.copies if starts[copy.at] not in right],
                missing=[number for number in file.missing if number not in right],
            )

        with ThreadPoolExecutor(_THREADS) as threads:
            return list(threads.map(prepared, staged))

    def copy(
        self, staged: Sequence[Staged], progress: Callable[[int], None], check: Callable[[], None]
    ) -> None:
        """Copy content that is on this disk; StillChanging if a source has changed."""

        def copied(of: tuple[Entry, Copy]) -> int:
            check()
            entry, run = of
            try:
                self._copy(entry, run)
            finally:
                self._directories.close()
            return run.length

        done = 0
        with ThreadPoolExecutor(_THREADS) as threads:
            for length in threads.map(copied, [(s.entry, c) for s in staged for c in _joined(s)]):
                done += length
                progress(done)

    def write_files(self, files: Sequence[tuple[Entry, int]], data: Buffer) -> None:
        """Write whole files. They get their attributes when they are put in their places."""
        view = memoryview(data)
        for entry, offset in files:
            self.write_at(entry, 0, view[offset : offset + entry.size])

    def write_at(self, entry: Entry, offset: int, data: Buffer) -> None:
        """Write a run of a file."""
        with self.opened(entry, os.O_WRONLY) as fd:
            write_all(fd, data, offset, entry)

    def close(self) -> None:
        """Close what the calling thread has open."""
        self._directories.close()

    def verify(
        self,
        staged: Sequence[Staged],
        chunks: Sequence[Chunk],
        seal: Seal,
        progress: Callable[[int], None],
        check: Callable[[], None],
    ) -> list[bytes]:
        """Read every staged file back; remove those that differ from the snapshot and return their
        paths."""

        def read_back(file: Staged) -> tuple[int, bool]:
            check()
            entry = file.entry
            try:
                wanted = range(len(entry.extents)) if file.patches is None else file.patches
                with self.opened(entry, os.O_RDONLY) as fd:
                    right = right_extents(fd, entry, chunks, seal, wanted)
                    is_right = right >= set(wanted) and os.fstat(fd).st_size == entry.size
                if not is_right:
                    self.remove(entry.root, entry.path, file.holder)
            finally:
                self._directories.close()
            return entry.size, is_right

        wrong = []
        done = 0
        with ThreadPoolExecutor(_THREADS) as threads:
            for file, (size, is_right) in zip(staged, threads.map(read_back, staged), strict=True):
                done += size
                progress(done)
                if not is_right:
                    wrong.append(file.entry.path)
        return wrong

    @contextmanager
    def opened(self, entry: Entry, access: int) -> Iterator[int]:
        """A descriptor of a staged file."""
        parent, name = self._where(entry)
        try:
            fd = os.open(name, access | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=parent)
        except OSError as exc:
            raise self._directories.swapped(exc, entry.path) from None
        try:
            yield fd
        finally:
            os.close(fd)

    def place(self, entry: Entry, parent: int, name: bytes) -> None:
        """Put a staged file in its place: ``name`` in the directory ``parent``."""
        holder, staged = self._where(entry)
        os.rename(staged, name, src_dir_fd=holder, dst_dir_fd=parent)

    def remove(self, root: int, path: bytes, holder: bytes) -> None:
        """Remove a staged file and one that was being patched, if they exist."""
        self._remove(root, holder, self.name(root, path))
        self._remove(root, path.rpartition(b"/")[0], self.aside(root, path))

    def _remove(self, root: int, directory: bytes, name: bytes) -> None:
        with suppress(FileNotFoundError, InvalidInput):  # its directory is gone or was replaced
            parent = self._directories.open(root, directory)
            os.stat(name, dir_fd=parent, follow_symlinks=False)
            with _writable(parent):
                os.unlink(name, dir_fd=parent)

    def _go_on_patching(self, file: Staged, chunks: Sequence[Chunk], seal: Seal) -> Staged:
        """Continue to patch a file that a killed run had set aside."""
        entry = file.entry
        try:
            parent, name = self._directories.parent(entry.root, entry.path)
            aside = self.aside(entry.root, entry.path)
            fd = os.open(aside, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=parent)
        except (OSError, InvalidInput):
            return file
        with suppress(FileNotFoundError):
            os.stat(name, dir_fd=parent, follow_symlinks=False)
            os.close(fd)
            return file  # another file has its name now: that file counts
        try:
            right = right_extents(fd, entry, chunks, seal)
        finally:
            os.close(fd)
        lacking = [n for n, e in enumerate(entry.extents) if n not in right]
        if any(entry.extents[number].chunk == HOLE for number in lacking):
            return file
        return file._replace(copies=[], missing=lacking, patches=frozenset(lacking))

    def _where(self, entry: Entry) -> tuple[int, bytes]:
        """The directory and the name of a staged file."""
        holder = self._holders[entry.root, entry.path]
        return self._directories.open(entry.root, holder), self.name(entry.root, entry.path)

    def _take_up(self, file: Staged, chunks: Sequence[Chunk], seal: Seal) -> set[int] | None:
        """The extents that a staged file of an earlier run already holds; None if no usable one
        exists."""
        entry = file.entry
        parent, name = self._where(entry)
        try:
            fd = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=parent)
        except FileNotFoundError:
            return None
        except OSError:  # a finished file whose mode forbids opening it
            self._remove(entry.root, file.holder, name)
            return None
        try:
            st = os.fstat(fd)
            if stat.S_ISREG(st.st_mode) and st.st_size == entry.size and st.st_nlink == 1:
                os.fchmod(fd, 0o600)
                right = right_extents(fd, entry, chunks, seal, file.patches)
                holes = {n for n, e in enumerate(entry.extents) if e.chunk == HOLE}
                if file.patches is not None or holes <= right or not right:
                    return right
        finally:
            os.close(fd)
        self._remove(entry.root, file.holder, name)
        return None

    def _make(self, entry: Entry) -> None:
        parent, name = self._where(entry)
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        with _writable(parent), making(entry.path, parent):
            fd = os.open(name, flags, 0o600, dir_fd=parent)
        try:
            set_size(fd, entry)
        finally:
            os.close(fd)

    def _copy(self, entry: Entry, run: Copy) -> None:
        root, path = run.source.place
        parent, name = self._directories.parent(root, path)
        try:
            source = open_unseen(name, parent)
        except OSError:
            raise _changed(path) from None
        try:
            if _signature(source) != run.source.signature:
                raise _changed(path)
            with self.opened(entry, os.O_WRONLY) as fd:
                copy_range(source, run.source.offset, fd, run.at, run.length, entry)
            if _signature(source) != run.source.signature:
                raise _changed(path)
        finally:
            os.close(source)


def _joined(staged: Staged) -> list[Copy]:
    """Neighbouring runs of one source, joined up to a size limit."""
    joined: list[Copy] = []
    for copy in staged.copies:
        before = joined[-1] if joined else None
        if (
            before is not None
            and before.source.place == copy.source.place
            and before.at + before.length == copy.at
            and before.source.offset + before.length == copy.source.offset
            and before.length + copy.length <= 8 * _COPY_BYTES
        ):
            joined[-1] = before._replace(length=before.length + copy.length)
        else:
            joined.append(copy)
    return joined


def copy_range(source: int, offset: int, fd: int, at: int, length: int, entry: Entry) -> None:
    """Copy inside the kernel if possible: with reflinks, nothing is copied at all."""
    in_kernel = hasattr(os, "copy_file_range")
    while length > 0:
        moved = 0
        if in_kernel:
            try:
                moved = os.copy_file_range(source, fd, length, offset, at)
            except OSError as exc:
                if exc.errno not in _NO_COPY_IN_KERNEL | NO_ROOM:
                    raise  # if the disk is full, the write below raises
            in_kernel = moved > 0
        if not moved:
            data = os.pread(source, min(length, _COPY_BYTES), offset)
            if not data:
                raise _changed(entry.path)
            write_all(fd, data, at, entry)
            moved = len(data)
        offset, at, length = offset + moved, at + moved, length - moved


def _starts(entry: Entry) -> dict[int, int]:
    """By offset in the file: the position of the extent that begins there."""
    starts = {}
    at = 0
    for number, extent in enumerate(entry.extents):
        starts[at] = number
        at += extent.length
    return starts


def _signature(fd: int) -> Signature:
    return Signature.of(os.fstat(fd))


def _changed(path: bytes) -> StillChanging:
    return StillChanging(
        f"{os.fsdecode(path)!r} changed on the machine while it was being synced: sync again"
    )


@contextmanager
def _writable(directory: int) -> Iterator[None]:
    """Within this context, the owner may write to a read-only directory."""
    mode = stat.S_IMODE(os.fstat(directory).st_mode)
    if os.geteuid() == 0 or mode & 0o300 == 0o300:
        yield
        return
    os.fchmod(directory, mode | 0o300)
    try:
        yield
    finally:
        os.fchmod(directory, mode)
