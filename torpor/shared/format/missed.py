"""What an earlier snapshot of a workspace holds and a later one lacks, where its user has probably
not deleted that.

Deleting files is everyday work, and most of a directory seldom goes that way: a disk that is not
mounted any more, a mistake in a command. So a loss is *missed* where a directory of the workspace
lost more than half of its files or bytes, where the machine itself has said that a place is missing
(its disk is not there), and where the later snapshot does not name the directory at all, or has no
file any more. Files that were moved are not lost, and new files make up for old ones, as
checkpoints that follow each other.
"""

from __future__ import annotations

import os
import re
from array import array
from collections import Counter
from collections.abc import Hashable, Iterable, Iterator, Sequence
from typing import Any, Final, NamedTuple

import msgspec

from torpor.shared.format.manifest import (
    DIRECTORY,
    FILE,
    HOLE,
    Chunk,
    Entries,
    Entry,
    EntryHead,
    Manifest,
    described,
)
from torpor.shared.format.rows import NotPlain
from torpor.shared.values import JOB_LOGS, PROGRAMS, learned

FEW_NAMES: Final = 10
FEW_BYTES: Final = 100 << 20
"""Losing fewer files and fewer bytes than these never counts as losing most of a workspace."""
_OWN: Final = re.compile(
    rb"(?:%s)/" % b"|".join(re.escape(os.fsencode(folder)) for folder in (JOB_LOGS, PROGRAMS))
)
"""Torpor's own files: logs, which are written again, and images of frozen programs, which are
deleted once the programs go on."""
MISSING: Final = "missing"
"""The key in the manifest's environment record. Readers that do not know the key ignore it."""
_MOST_PLACES: Final = 100
_NAMED: Final = 3


class Amount(NamedTuple):
    """A number of files, and their bytes."""

    files: int
    size: int

    @classmethod
    def of(cls, sizes: Sequence[int]) -> Amount:
        return cls(len(sizes), sum(sizes))


def is_most(gone: Amount, held: Amount, left: Amount) -> bool:
    """Whether ``gone`` is more than half of what a directory of the workspace held. ``left``: what
    it holds now, new files included."""
    if gone.files >= FEW_NAMES and 2 * left.files < held.files:
        return True
    return gone.size >= FEW_BYTES and 2 * left.size < held.size


def is_torpors(path: bytes) -> bool:
    """Whether a file is torpor's own, and not its user's."""
    return _OWN.match(path) is not None


class Missing(msgspec.Struct, frozen=True, array_like=True):
    """A place that was missing on the machine when the snapshot was made: ``path`` below the root
    number ``root`` of the snapshot; empty if all of the root was missing. ``files`` and ``size``
    say how many files of how many bytes were gone, which were most of the root. Both are 0 for a
    disk that was not mounted: nobody counted its files."""

    root: int
    path: bytes
    files: int = 0
    size: int = 0


def missing_record(places: Sequence[Missing]) -> dict[str, Any]:
    """The fact for a manifest's environment record; empty where nothing was missing."""
    if not places:
        return {}
    return {MISSING: msgspec.to_builtins(places[:_MOST_PLACES], builtin_types=[bytes])}


def recorded_missing(manifest: Manifest) -> list[Missing]:
    """The missing places that a manifest says; none where the fact does not fit, because a machine
    wrote it."""
    try:
        places = msgspec.convert(manifest.environment.get(MISSING, []), learned(list[Missing]))
    except msgspec.ValidationError:
        return []
    return [place for place in places if 0 <= place.root < len(manifest.roots)]


class MissedFiles(NamedTuple):
    """Files that one snapshot holds and a later one misses, and names of some of them."""

    files: int
    size: int
    names: list[str]


class _Run(NamedTuple):
    """The names of one directory, and the positions of their entries."""

    positions: Sequence[int]
    names: bytes  # a zero byte between two

    def split(self) -> list[bytes]:
        return self.names.split(b"\0")


class Tree:
    """The files of a snapshot by directory, for comparing it with others."""

    def __init__(self, manifest: Manifest) -> None:
        self.manifest = manifest
        self.roots = [root.rstrip("/") for root in manifest.roots]
        self._entries = Entries.of(manifest.entries)
        what = described(self._entries)
        self._kinds, self.sizes = what.kinds, what.sizes
        self._runs: list[dict[bytes, _Run]] = [{} for _ in manifest.roots]
        try:
            changed = bytearray(len(self._entries))  # without it, list_rows lists no names
            for row, root, path, is_run, names in self._entries.listed(changed):
                if is_run and not is_torpors(path + b"/"):
                    self._add(root, path, range(row, row + names.count(b"\0") + 1), names)
        except NotPlain:
            self._find_each()

    def _find_each(self) -> None:
        """Group the files by directory one entry at a time, for entries that rows.list_rows
        refuses."""
        found: dict[tuple[int, bytes], tuple[array[int], list[bytes]]] = {}
        for position, entry in enumerate(self._entries):
            directory, _, name = entry.path.rpartition(b"/")
            if name and not is_torpors(entry.path):
                positions, names = found.setdefault((entry.root, directory), (array("Q"), []))
                positions.append(position)
                names.append(name)
        self._runs = [{} for _ in self.roots]
        for (root, directory), (positions, names) in found.items():
            self._runs[root][directory] = _Run(positions, b"\0".join(names))

    def _add(self, root: int, path: bytes, positions: range, names: bytes) -> None:
        there = self._runs[root].get(path)
        # a directory's names stand together in every manifest that torpor writes
        if there is not None:
            raise NotPlain
        self._runs[root][path] = _Run(positions, names)

    def number(self, root: str) -> int | None:
        return self.roots.index(root) if root in self.roots else None

    def amount(self, number: int | None) -> Amount:
        """All files of a root."""
        if number is None:
            return Amount(0, 0)
        files = size = 0
        for run in self._runs[number].values():
            first, end = run.positions[0], run.positions[-1] + 1
            if end - first == len(run.positions):
                files += self._kinds.count(FILE, first, end)
                size += sum(self.sizes[first:end])  # the size of anything but a file is 0
            else:
                files += sum(self._kinds[position] == FILE for position in run.positions)
                size += sum(map(self.sizes.__getitem__, run.positions))
        return Amount(files, size)

    def lacking(self, number: int, there: Tree) -> list[int]:
        """The positions of a root's files whose names are not in ``there``."""
        other = there.number(self.roots[number])
        runs = {} if other is None else there._runs[other]
        found = []
        for directory, run in self._runs[number].items():
            same = runs.get(directory)
            if same is not None and same.names == run.names:
                continue
            names = set(() if same is None else same.split())
            for position, name in zip(run.positions, run.split(), strict=True):
                if name not in names and self._kinds[position] == FILE:
                    found.append(position)
        return found

    def below(self, positions: Sequence[int], places: Sequence[bytes]) -> set[int]:
        """The files at or below one of the places."""
        if not places:
            return set()
        inside = tuple(os.path.join(place, b"") for place in places if place)
        whole = len(inside) < len(places)
        return {
            position
            for position, place in zip(positions, self._entries.places(positions), strict=True)
            if whole or place.path.startswith(inside)
        }

    def content(self, position: int) -> Hashable:
        return self._content_of(self._entries[position])

    def _content_of(self, file: Entry) -> Hashable:
        return content_of(file, self.manifest.chunks)

    def contents(self) -> set[Hashable]:
        """The content of each name, without directories."""
        return {
            (self.roots[one.root], one.path, one.kind, one.target, self._content_of(one))
            for one in self._entries
            if one.kind != DIRECTORY
        }

    def first_of(self, positions: Sequence[int]) -> list[str]:
        """The first names of the directory that has most of the files."""
        directories: dict[tuple[int, bytes], list[EntryHead]] = {}
        for place in self._entries.places(positions):
            key = (place.root, os.path.dirname(place.path))
            directories.setdefault(key, []).append(place)
        most = max(directories.values(), key=len)[:_NAMED]
        return [
            f"{self.roots[place.root]}/{place.path.decode('utf-8', 'backslashreplace')}"
            for place in most
        ]


def missed(before: Tree, now: Tree, later: Tree | None = None) -> MissedFiles | None:
    """The files of ``before`` that ``now`` misses; None where there are none. Files that ``now``
    lacks and does not miss were deleted by their user. What ``later`` has again, by its name or by
    a new one, is back."""
    lost: list[int] = []
    new: Counter[Hashable] | None = None
    is_empty = not any(now.amount(number).files for number in range(len(now.roots)))
    for number, root in enumerate(before.roots):
        gone = before.lacking(number, now)
        if not gone:
            continue
        other = now.number(root)
        places = [b""] if other is None or is_empty else _places(now, other)
        held, left = before.amount(number), now.amount(other)
        if not (is_most(_amount(before, gone), held, left) or before.below(gone, places)):
            continue
        new = _new_files(now, before) if new is None else new
        gone = [*_not_moved(before, gone, new)]
        if is_most(_amount(before, gone), held, left):
            lost += gone
        else:
            lost += sorted(before.below(gone, places))
    if later is not None:
        lost = _not_back(before, lost, later)
    if not lost:
        return None
    return MissedFiles(*_amount(before, lost), before.first_of(lost))


def has_all(now: Tree, before: Tree) -> bool:
    """Whether ``now`` has each file of ``before``, by its name or by a new one."""
    numbers = range(len(before.roots))
    gone = [at for number in numbers for at in before.lacking(number, now)]
    return not _not_back(before, gone, now)


def holds_all(now: Tree, before: Tree) -> bool:
    """Whether ``now`` has each file and each link of ``before`` under the same name, with the same
    content."""
    return before.contents() <= now.contents()


def _not_back(before: Tree, lost: Sequence[int], later: Tree) -> list[int]:
    """The files that ``later`` has neither under their names nor under new ones."""
    numbers = range(len(before.roots))
    lacking = {at for number in numbers for at in before.lacking(number, later)}
    gone = [position for position in lost if position in lacking]
    return [*_not_moved(before, gone, _new_files(later, before))] if gone else []


def content_of(file: Entry, chunks: Sequence[Chunk]) -> Hashable:
    """A key that is equal for files of equal content, whichever chunks they share."""
    if file.digest:
        return (file.size, file.digest)
    whole = [
        (HOLE if extent.chunk == HOLE else chunks[extent.chunk].name, extent.length)
        for extent in file.extents
    ]
    if len(whole) == 1 and isinstance(whole[0][0], bytes):
        return (file.size, whole[0][0][:16])  # the digest of a file that is one chunk
    return (file.size, tuple(whole))


def _amount(tree: Tree, positions: Sequence[int]) -> Amount:
    return Amount(len(positions), sum(map(tree.sizes.__getitem__, positions)))


def _places(tree: Tree, number: int) -> list[bytes]:
    """The places of disks that were not mounted."""
    return [
        place.path
        for place in recorded_missing(tree.manifest)
        if place.root == number and not place.files
    ]


def _new_files(tree: Tree, before: Tree) -> Counter[Hashable]:
    """How many files of each content have names that ``before`` does not have."""
    positions = (at for number in range(len(tree.roots)) for at in tree.lacking(number, before))
    return Counter(map(tree.content, positions))


def _not_moved(tree: Tree, gone: Iterable[int], new: Counter[Hashable]) -> Iterator[int]:
    """The files that were not moved: each new file of equal content accounts for one of them."""
    for position in gone:
        content = tree.content(position)
        if new[content] > 0:
            new[content] -= 1
        else:
            yield position
