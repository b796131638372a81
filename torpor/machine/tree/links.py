"""Gives a file one more name. Where the file system cannot do so, makes a copy under that name."""

from __future__ import annotations

import errno
import os
import stat
from contextlib import suppress
from typing import Final

from blake3 import blake3

from torpor.machine.tree.attributes import Attributes
from torpor.machine.tree.directories import Directories
from torpor.machine.tree.naming import NO_LINKS, take_name
from torpor.machine.tree.read import all_regions, open_unseen
from torpor.machine.tree.refusals import write_all
from torpor.shared.format.manifest import Entry
from torpor.shared.values import MIB

_COPIED_BYTES: Final = 8 * MIB  # bytes copied at once


class HardLinks:
    """The hard links of one tree; its ``attributes`` know the names that are copies."""

    def __init__(self, directories: Directories, attributes: Attributes) -> None:
        self._directories = directories
        self._attributes = attributes
        self._copies: dict[tuple[int, bytes], bytes] = {}
        """The copy of which further names become links, where a file has as many names as the file
        system allows."""

    def source(self, entry: Entry) -> tuple[int, bytes]:
        """The file of which ``entry`` becomes another name: its directory, and its name in it."""
        path = self._copies.get((entry.root, entry.target), entry.target)
        return self._directories.parent(entry.root, path)

    def make(self, entry: Entry, parent: int, name: bytes) -> None:
        """Make ``name`` in the directory ``parent``. FileExistsError where anything has it."""
        of_parent, of_name = self.source(entry)
        words = "a file has as many names as the file system of the target can give it"
        try:
            os.link(of_name, name, src_dir_fd=of_parent, dst_dir_fd=parent, follow_symlinks=False)
        except OSError as exc:
            if exc.errno not in NO_LINKS:
                raise
            self._copy(entry, (of_parent, of_name), parent, name)
            if exc.errno == errno.EMLINK:
                self._copies[entry.root, entry.target] = entry.path
            else:
                self._attributes.note_apart(entry, f"the target refuses it: {exc.strerror}")
        if (entry.root, entry.target) in self._copies:
            self._attributes.note_apart(entry, words)

    def _copy(self, entry: Entry, source: tuple[int, bytes], parent: int, name: bytes) -> None:
        """Copy the file, first to a name beside the final one, so that a killed run leaves no half
        file there."""
        half = b".torpor-" + blake3(entry.path).hexdigest(16).encode()
        with suppress(FileNotFoundError):
            os.unlink(half, dir_fd=parent)
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        try:
            of = open_unseen(source[1], source[0])
        except OSError as exc:
            raise self._directories.swapped(exc, entry.target) from None
        try:
            if not stat.S_ISREG(os.fstat(of).st_mode):
                raise self._directories.swapped(None, entry.target)
            fd = os.open(half, flags, 0o600, dir_fd=parent)
            try:
                size = os.fstat(of).st_size
                os.ftruncate(fd, size)
                for start, length in all_regions(of, size):
                    for at in range(start, start + length, _COPIED_BYTES):
                        data = os.pread(of, min(_COPIED_BYTES, start + length - at), at)
                        write_all(fd, data, at, entry)
                self._attributes.apply(fd, entry)
            finally:
                os.close(fd)
        finally:
            os.close(of)
        if not take_name(half, name, holder=parent, parent=parent):
            os.unlink(half, dir_fd=parent)
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), name)
