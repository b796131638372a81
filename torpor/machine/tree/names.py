"""The names below the roots of a workspace and what is known of each, packed: about 200 bytes a
name, where an object for each took more than a kilobyte."""

from __future__ import annotations

import os
import struct
import threading
from array import array
from collections.abc import Iterable, Iterator, Sequence
from typing import Final, NamedTuple

import msgspec

from torpor.machine.tree.batch import SIGNATURE_BYTES, Stat, is_plain, packed_signature
from torpor.shared.format.computed import Computed
from torpor.shared.format.manifest import Content, Entries, Entry, ReadContents
from torpor.shared.format.rows import NotPlain

_SIGNED: Final = struct.Struct("=Q3q")
_INT64: Final = struct.Struct("=q")
_SIZE_AT: Final = 8
_CTIME_AT: Final = 24

_FEW_RUNS: Final = 32

HELD, SURE, READ = 1, 2, 4
"""Marks of a name: its content is known; a change certainly changes its signature; somebody else
has read the file since it was last changed."""
_ARE_KNOWN: Final = bytes(mark for mark in range(8) if mark & HELD and mark & SURE)
_NOT_HELD: Final = bytes(mark for mark in range(256) if not mark & HELD)
_HELD_UNLESS: Final = bytes((HELD,)) + bytes(255)
_ARE_SURE: Final = bytes(mark for mark in range(8) if mark & SURE)


class Signature(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Values that change whenever a file does. The kernel sets ctime; no program can set it
    back.
    """

    inode: int
    size: int
    mtime_ns: int
    ctime_ns: int

    @classmethod
    def of(cls, st: os.stat_result) -> Signature:
        return cls.among(Stat.of(st))

    @classmethod
    def among(cls, st: Stat) -> Signature:
        inode, size, mtime_ns, ctime_ns = st[:4]
        if is_plain(mtime_ns) and is_plain(ctime_ns):
            return cls(inode, size, mtime_ns, ctime_ns)
        return cls(*_SIGNED.unpack(packed_signature(*st[:4])))  # with times in their packed form

    def is_of(self, st: Stat) -> bool:
        return (
            self.inode == st.inode
            and self.ctime_ns == st.ctime_ns
            and self.mtime_ns == st.mtime_ns
            and self.size == st.size
        ) or Signature.among(st) == self

    def packed(self) -> bytes:
        return packed_signature(self.inode, self.size, self.mtime_ns, self.ctime_ns)


NO_SIGNATURE: Final = bytes(SIGNATURE_BYTES)
"""Stands for an unknown signature: nothing on a disk has inode 0."""


def packed_signatures(signatures: Iterable[Signature | None]) -> bytes:
    return b"".join(NO_SIGNATURE if s is None else s.packed() for s in signatures)


class Signatures(Computed[Signature | None]):
    """Signatures by number, 32 bytes each; at first none is known."""

    def __init__(self, count: int) -> None:
        self.packed = bytearray(SIGNATURE_BYTES * count)

    def __len__(self) -> int:
        return len(self.packed) // SIGNATURE_BYTES

    def __setitem__(self, number: int, signature: Signature | None) -> None:
        at = range(len(self))[number] * SIGNATURE_BYTES
        packed = NO_SIGNATURE if signature is None else signature.packed()
        self.packed[at : at + SIGNATURE_BYTES] = packed

    def at(self, number: int) -> Signature | None:
        at = number * SIGNATURE_BYTES
        found = self.packed[at : at + SIGNATURE_BYTES]
        if not found:
            raise IndexError(number)
        return None if found == NO_SIGNATURE else Signature(*_SIGNED.unpack(found))


class KnownPath(msgspec.Struct, frozen=True, gc=False):
    """What is known of a path: its entry, and the signature that it had then."""

    signature: Signature | None  # None: always look again
    entry: Entry


class DirectoryNames(NamedTuple):
    """The names of one directory: they stand one after the other."""

    first: int
    names: bytes  # in order, with a zero byte between two

    def split(self) -> list[bytes]:
        return self.names.split(b"\0")


class Names:
    """Names by position, in the order of a manifest; found by directory. ``hold`` may be called by
    any thread. ``entries`` lack the content that was read since the last ``settled``.
    """

    def __init__(self, roots: int) -> None:
        self.entries = Entries()
        self.marks = bytearray()
        self._signatures = bytearray()
        self._tops = [-1] * roots
        self._runs: list[dict[bytes, DirectoryNames]] = [{} for _ in range(roots)]
        self._read = ReadContents()  # in the order in which files were read
        self._read_at = array("q")  # by position; -1: no content was read
        self._positions: dict[int, dict[bytes, int]] = {}
        self._lock = threading.Lock()

    @classmethod
    def of(cls, roots: int, entries: Iterable[Entry], signatures: bytes = b"") -> Names:
        """A snapshot's names. ``signatures``: packed, one after the other; without them nothing is
        sure. Of a directory whose names stand apart, as no torpor writes them, only the last ones
        are found. Raises IndexError where a root is missing."""
        names = cls(roots)
        names.entries = Entries.of(entries)
        names._signatures += signatures or bytes(SIGNATURE_BYTES * len(names.entries))
        try:
            changed = names._found()
        except NotPlain:
            changed = names._found_each()
        held = changed.translate(_HELD_UNLESS)
        inodes = memoryview(names._signatures).cast("Q")[:: SIGNATURE_BYTES // 8].tolist()
        names.marks += bytes(
            mark | SURE if inode else mark for mark, inode in zip(held, inodes, strict=True)
        )
        return names

    def _found(self) -> bytearray:
        """Find the names by their directories; returns a byte for each name: 1 where the file
        changed while it was read. Raises NotPlain."""
        changed = bytearray(len(self.entries))
        for place in self.entries.listed(changed):
            if place.is_run:
                self._runs[place.root][place.path] = DirectoryNames(place.row, place.names)
            elif not place.path:
                self._tops[place.root] = place.row
        return changed

    def _found_each(self) -> bytearray:
        """As ``_found``, whatever the entries are."""
        changed = bytearray()
        run: list[bytes] = []
        place: tuple[int, bytes] | None = None
        for position, entry in enumerate(self.entries):
            directory, _, name = entry.path.rpartition(b"/")
            if (entry.root, directory) != place or not name:
                self._end_run(place, position, run)
                place, run = (entry.root, directory), []
            if name:
                run.append(name)
            else:
                self._tops[entry.root] = position
                place = None
            changed.append(entry.changed)
        self._end_run(place, len(self.entries), run)
        return changed

    def __len__(self) -> int:
        return len(self.marks)

    def add(self, entry: Entry, signature: bytes, marks: int) -> None:
        """Append a name; ``end_run`` follows when its directory is complete."""
        self.entries.append(entry)
        self._signatures += signature
        self.marks.append(marks)

    def take(self, held: Names, first: int, marks: bytes | bytearray) -> None:
        """Append what ``held`` has from position ``first`` on, with these marks."""
        end = first + len(marks)
        self.entries.take(held.entries, first, end)
        self._signatures += held._signatures[first * SIGNATURE_BYTES : end * SIGNATURE_BYTES]
        self.marks += marks

    def begin(self, root: int) -> None:
        """Begin a root; its position is the next one."""
        self._tops[root] = len(self)

    def end_run(self, root: int, directory: bytes, names: Sequence[bytes]) -> None:
        """Note that ``names`` were appended, and are all names of a directory."""
        self._end_run((root, directory), len(self), names)

    def _end_run(self, place: tuple[int, bytes] | None, end: int, names: Sequence[bytes]) -> None:
        if place is not None and names:
            self._runs[place[0]][place[1]] = DirectoryNames(end - len(names), b"\0".join(names))

    def top(self, root: int) -> int:
        """The position of a root itself; -1 where it is not there."""
        return self._tops[root]

    def run(self, root: int, directory: bytes) -> DirectoryNames | None:
        return self._runs[root].get(directory)

    def find(self, root: int, path: bytes) -> int:
        """The position of a name; -1 where it is not there."""
        if not path:
            return self._tops[root]
        directory, _, name = path.rpartition(b"/")
        run = self._runs[root].get(directory)
        return -1 if run is None else self.positions(run).get(name, -1)

    def positions(self, run: DirectoryNames) -> dict[bytes, int]:
        """The positions by name. Kept for a while, because a caller that asks for one name of a
        directory asks for its others."""
        found = self._positions.get(run.first)
        if found is None:
            found = {name: at for at, name in enumerate(run.split(), run.first)}
            if len(self._positions) >= _FEW_RUNS:
                self._positions = {}
            self._positions[run.first] = found
        return found

    def held(self, root: int, path: bytes) -> KnownPath | None:
        position = self.find(root, path)
        if position < 0 or not self.marks[position] & HELD:
            return None
        return KnownPath(self.signature(position), self.entry(position))

    def entry(self, position: int) -> Entry:
        """The entry of a name, with its content if the file was read."""
        if self._read_at and (at := self._read_at[position]) >= 0:
            return self._read.at(at).put_into(self.entries[position])
        return self.entries[position]

    def signature(self, position: int) -> Signature | None:
        """The signature of a name; None: look again."""
        return self.seen(position) if self.marks[position] & SURE else None

    def seen(self, position: int) -> Signature:
        """The last known signature of a name, whether or not a change would show in it."""
        return Signature(*_SIGNED.unpack_from(self._signatures, position * SIGNATURE_BYTES))

    def size(self, position: int) -> int:
        """The size of a file in bytes, by its signature."""
        size: int = _INT64.unpack_from(self._signatures, position * SIGNATURE_BYTES + _SIZE_AT)[0]
        return size

    def changed_ns(self, position: int) -> int:
        """The ctime of a file, by its signature."""
        at = position * SIGNATURE_BYTES + _CTIME_AT
        changed_ns: int = _INT64.unpack_from(self._signatures, at)[0]
        return changed_ns

    def packed_signature(self, position: int) -> bytes:
        at = position * SIGNATURE_BYTES
        return bytes(self._signatures[at : at + SIGNATURE_BYTES])

    def signatures(self) -> bytes:
        """All signatures, packed; NO_SIGNATURE where a change might not show."""
        sure = bytearray(self._signatures)
        if self.marks.translate(None, _ARE_SURE):
            for position, mark in enumerate(self.marks):
                if not mark & SURE:
                    at = position * SIGNATURE_BYTES
                    sure[at : at + SIGNATURE_BYTES] = NO_SIGNATURE
        return bytes(sure)

    def is_known(self, first: int, signatures: bytes | bytearray) -> bool:
        """Whether all names from ``first`` on are held, and surely have these signatures."""
        at = first * SIGNATURE_BYTES
        count = len(signatures) // SIGNATURE_BYTES
        return self._signatures[at : at + len(signatures)] == signatures and not self.marks[
            first : first + count
        ].translate(None, _ARE_KNOWN)

    def hold(
        self, positions: Sequence[int], contents: Iterable[Content], unsure: Iterable[int] = ()
    ) -> None:
        """Add the contents of files that were read. ``unsure``: the positions of those that changed
        while they were read; for the others, the walk has said whether a change would show in the
        signature."""
        with self._lock:
            if not self._read_at:
                self._read_at = array("q", (-1,)) * len(self)
            first = len(self._read)
            self._read.extend(contents)
            for number, position in enumerate(positions, first):
                self._read_at[position] = number
                self.marks[position] |= HELD
            for position in unsure:
                self.distrust(position)

    def drop(self, position: int) -> None:
        """Forget the content of a name."""
        self.marks[position] &= ~HELD

    def distrust(self, position: int) -> None:
        """Note that the signature may stay the same when the file changes."""
        self.marks[position] &= ~SURE

    def settled(self) -> Names:
        """A copy of the names as they are now, which later calls of ``hold`` and ``drop`` do not
        change."""
        with self._lock:
            self._settle()
            names = Names(len(self._tops))
            names.entries, names.marks = self.entries, self.marks[:]
            names._signatures, names._tops, names._runs = self._signatures, self._tops, self._runs
            return names

    def _settle(self) -> None:
        """Put the content that was read into new ``entries``."""
        if not self._read_at:
            return
        self.entries = self.entries.filled(self._read, self._read_at)
        self._read, self._read_at = ReadContents(), array("q")

    def without(self, out: set[int]) -> Names:
        """A copy of settled names without these positions."""
        if not out:
            return self
        kept = [position for position in range(len(self)) if position not in out]
        entries = Entries(map(self.entries.__getitem__, kept))
        signatures = b"".join(map(self.packed_signature, kept))
        names = Names.of(len(self._tops), entries, signatures)
        names.marks = bytearray(self.marks[position] for position in kept)
        return names

    def missing(self, root: int, there: Names) -> Iterator[int]:
        """Positions of names of a root that are not in ``there``."""
        for directory, run in self._runs[root].items():
            other = there.run(root, directory)
            if other is not None and other.names == run.names:
                continue
            names = set(() if other is None else other.split())
            for position, name in enumerate(run.split(), run.first):
                if name not in names:
                    yield position

    def of_root(self, root: int) -> Iterator[int]:
        """Positions of the names below a root."""
        for run in self._runs[root].values():
            yield from range(run.first, run.first + run.names.count(b"\0") + 1)

    @property
    def held_count(self) -> int:
        return len(self.marks.translate(None, _NOT_HELD))


class Unread(msgspec.Struct, frozen=True, gc=False):
    """A regular file whose content must be read."""

    entry: Entry  # without its content
    signature: Signature
    sparse: bool
    before: Entry | None = None  # what was held under its name
    mapped: str = ""  # the process that can change the file without changing its times


class SmallFiles(NamedTuple):
    """Files below one root that must be read, and of which nothing was known before."""

    positions: list[int]  # positions among the names
    root: int
    paths: list[bytes]
    signatures: bytes  # 32 bytes each
    sizes: list[int]  # bytes


class UnreadFiles(Computed[Unread]):
    """The files among ``names`` whose content must be read. ``held``: what was known before."""

    def __init__(self, names: Names, held: Names) -> None:
        self.positions = array("Q")  # positions among the names
        self._names = names
        self._held = held
        self._sparse: set[int] = set()
        self._mapped: dict[int, str] = {}

    def add(self, position: int, *, sparse: bool, mapped: str) -> None:
        self.positions.append(position)
        if sparse:
            self._sparse.add(position)
        if mapped:
            self._mapped[position] = mapped

    def paths(self) -> Iterator[bytes]:
        return (place.path for place in self._names.entries.places(self.positions))

    def processes(self) -> dict[bytes, str]:
        """By path: the process that can change a file without changing its times."""
        return {self._names.entries.at(at).path: self._mapped[at] for at in self._mapped}

    def sizes(self) -> Iterator[tuple[int, bool]]:
        """The size of each file in bytes, and whether it is sparse."""
        for position in self.positions:
            yield self._names.size(position), position in self._sparse

    def __len__(self) -> int:
        return len(self.positions)

    def together(self, numbers: Sequence[int]) -> SmallFiles | None:
        """These files as one SmallFiles, without an object for each. None where more must be said
        of one of them."""
        if len(self._held) or self._mapped:
            return None
        positions = [self.positions[number] for number in numbers]
        places = [*self._names.entries.places(positions)]
        root = places[0].root
        if any(place.root != root for place in places):
            return None
        signatures = b"".join(map(self._names.packed_signature, positions))
        paths, sizes = [place.path for place in places], [*map(self._names.size, positions)]
        return SmallFiles(positions, root, paths, signatures, sizes)

    def at(self, number: int) -> Unread:
        position = self.positions[number]
        entry = self._names.entries.at(position)
        before = self._held.held(entry.root, entry.path) if len(self._held) else None
        return Unread(
            entry,
            self._names.seen(position),
            position in self._sparse,
            before.entry if before else None,
            self._mapped.get(position, ""),
        )
