"""The changes that make a tree on the disk equal to a snapshot."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import msgspec

from torpor.machine.tree.content import ContentKey, content_of
from torpor.machine.tree.names import Signature
from torpor.machine.tree.survey import OTHER, Name, Saved, same_attributes
from torpor.shared.errors import InvalidInput
from torpor.shared.format.manifest import DIRECTORY, FILE, HARDLINK, HOLE, SYMLINK, Entry, EntryId


class CopySource(NamedTuple):
    """Where a run of bytes is on this disk, and the file's signature when it was surveyed."""

    place: EntryId
    offset: int
    signature: Signature


class Copy(NamedTuple):
    """A run of a staged file that is already on this disk."""

    at: int
    length: int
    source: CopySource


class Staged(NamedTuple):
    """A file that is first made beside the tree. ``holder``: a directory that stays.

    ``patches``: positions of the extents that the existing file lacks. Then only these are staged
    and written into that file; None if the file is made whole.
    """

    number: int  # among the target's entries
    entry: Entry
    holder: bytes
    copies: list[Copy]
    missing: list[int]  # positions of the extents to fetch
    patches: frozenset[int] | None = None


class Changes(NamedTuple):
    """The changes of a sync, in the order in which they are made; and what stays."""

    staged: list[Staged]
    removed: list[tuple[int, bytes, Name]]  # contents of a directory first
    directories: list[Entry]
    symlinks: list[Entry]
    links: list[Entry]
    touched: list[tuple[Entry, Name]]  # names of which only attributes differ
    untouched: dict[int, Signature | None]  # by number among the target's entries; None: look again


def going(changes: Changes, names: Sequence[Mapping[bytes, Name]]) -> list[EntryId]:
    """The names of files on the disk that are removed, or replaced by other files."""
    made = [*(s.entry for s in changes.staged), *changes.symlinks, *changes.links]
    places = [(root, path) for root, path, _ in changes.removed]
    places += [(entry.root, entry.path) for entry in made]
    there = ((place, names[place[0]].get(place[1])) for place in places)
    return [place for place, name in there if name is not None and name.kind == FILE]


def touching(changes: Changes, names: Sequence[Mapping[bytes, Name]]) -> list[EntryId]:
    """The names on the disk that cannot stay as they are: files that are removed or get other
    attributes, and directories in which anything changes."""
    made = [*(s.entry for s in changes.staged), *changes.symlinks, *changes.links]
    made += [*changes.directories, *(entry for entry, _ in changes.touched)]
    changed = [*((e.root, e.path) for e in made), *((root, p) for root, p, _ in changes.removed)]
    above = ((root, path.rpartition(b"/")[0]) for root, path in changed)
    there = ((root, path, names[root].get(path)) for root, path in [*changed, *above])
    kinds = (FILE, DIRECTORY)
    return sorted({(root, path) for root, path, name in there if name and name.kind in kinds})


def leave_out(entries: Sequence[Entry], excluded: Callable[[int, bytes], bool]) -> list[Entry]:
    """``entries`` without excluded names and everything below them. A hard link to a file that is
    left out becomes the file."""
    kept: list[Entry] = []
    out: dict[EntryId, Entry] = {}
    instead: dict[EntryId, bytes] = {}
    for entry in entries:
        place = (entry.root, entry.path)
        parent = (entry.root, entry.path.rpartition(b"/")[0])
        if entry.path and (parent in out or excluded(*place)):
            out[place] = entry
            continue
        if entry.kind == HARDLINK and (first := out.get((entry.root, entry.target))) is not None:
            now = instead.setdefault((entry.root, entry.target), entry.path)
            entry = (
                msgspec.structs.replace(first, path=entry.path)
                if now == entry.path
                else msgspec.structs.replace(entry, target=now)
            )
        kept.append(entry)
    return kept


def plan_changes(
    target: Saved,
    names: Sequence[dict[bytes, Name]],
    roots: Sequence[bytes],
    holders: Mapping[EntryId, bytes],
    *,
    owners: bool,
) -> Changes:
    """Compare ``target`` with the ``names`` on the disk. ``holders``: where an interrupted run
    has staged files already. Looks at the disk for links that lead elsewhere; writes nothing."""
    return _Planner(target, names, roots, holders, owners).plan()


class _Planner:
    def __init__(
        self,
        target: Saved,
        names: Sequence[dict[bytes, Name]],
        roots: Sequence[bytes],
        holders: Mapping[EntryId, bytes],
        owners: bool,
    ) -> None:
        self._target = target
        self._names = names
        self._roots = roots
        self._holders = holders
        self._owners = owners
        self._changes = Changes([], [], [], [], [], [], {})
        self._claimed: dict[EntryId, bytes] = {}
        """By file on the disk that stays (root, first name): the target's file that it becomes."""
        self._count: dict[EntryId, int] = {}
        for root, there in enumerate(names):
            for name in there.values():
                if name.kind == FILE:
                    place = (root, name.first)
                    self._count[place] = self._count.get(place, 0) + 1

    def plan(self) -> Changes:
        changes = self._changes
        for number, entry in enumerate(self._target.entries):
            name = self._names[entry.root].get(entry.path)
            if entry.kind == FILE:
                self._plan_file(number, entry, name)
            elif entry.kind == HARDLINK:
                if (
                    name is None
                    or name.kind != FILE
                    or self._claimed.get((entry.root, name.first)) != entry.target
                ):
                    changes.links.append(entry)
            elif entry.kind == DIRECTORY:
                if name is None or name.kind != DIRECTORY:
                    changes.directories.append(entry)
            elif (
                name is None
                or name.kind != SYMLINK
                or name.entry.target != entry.target
                or not same_attributes(name.entry, entry, owners=self._owners)
            ):
                changes.symlinks.append(entry)
            else:
                changes.untouched[number] = name.settled
        self._plan_removals()
        self._find_copies()
        return changes

    def _plan_file(self, number: int, entry: Entry, name: Name | None) -> None:
        if name is not None and name.kind == FILE:
            place = (entry.root, name.first)
            content = content_of(entry, self._target.chunks)
            if name.content == content and place not in self._claimed:
                same = same_attributes(name.entry, entry, owners=self._owners)
                if same or self._is_alone(place):
                    self._claimed[place] = entry.path
                    if not same:
                        self._changes.touched.append((entry, name))
                    elif self._count[place] == 1:
                        self._changes.untouched[number] = name.settled
                    return
        holder = self._holders.get((entry.root, entry.path))
        if holder is None:
            holder = self._holder(entry.root, entry.path)
        self._changes.staged.append(Staged(number, entry, holder, [], []))

    def _is_alone(self, place: EntryId) -> bool:
        """Whether every name of a file is in this tree: a change must not affect a name outside of
        it."""
        try:
            st = os.lstat(os.path.join(self._roots[place[0]], place[1]))
        except OSError:
            return False
        return st.st_nlink == self._count[place]

    def _holder(self, root: int, path: bytes) -> bytes:
        """The nearest existing directory above the name that stays."""
        while path:
            path = path.rpartition(b"/")[0]
            name = self._names[root].get(path)
            entry = self._target.at(root, path)
            if name and name.kind == DIRECTORY and entry and entry.kind == DIRECTORY:
                return path
        return path

    def _plan_removals(self) -> None:
        for root, there in enumerate(self._names):
            for path, name in reversed(there.items()):
                entry = self._target.at(root, path)
                if name.kind == OTHER:
                    if entry is not None or self._parent_goes(root, path):
                        self._changes.removed.append((root, path, name))
                elif entry is None or (entry.kind == DIRECTORY) != (name.kind == DIRECTORY):
                    if path:
                        self._changes.removed.append((root, path, name))
                    if entry is not None and name.kind == DIRECTORY:
                        self._check_nothing_else(root, path)

    def _parent_goes(self, root: int, path: bytes) -> bool:
        entry = self._target.at(root, path.rpartition(b"/")[0])
        return entry is None or entry.kind != DIRECTORY

    def _check_nothing_else(self, root: int, path: bytes) -> None:
        """Refuse to replace a directory that holds excluded or kept files."""
        top = os.path.join(self._roots[root], path)
        for place, _, files in os.walk(top):
            for full in (place, *(os.path.join(place, file) for file in files)):
                below = os.path.relpath(full, self._roots[root])
                if below not in self._names[root]:
                    raise InvalidInput(
                        f"{os.fsdecode(full)} on the machine is excluded or was kept, but the "
                        f"snapshot has {os.fsdecode(path)!r} as something other than a directory: "
                        "move it away, and sync again"
                    )

    def _find_copies(self) -> None:
        """Plan copies of content that is on this disk: renamed, copied and half-changed files."""
        chunks = self._target.chunks
        files = {content_of(staged.entry, chunks) for staged in self._changes.staged}
        runs = {run for content in files for run in content.runs}
        whole: dict[ContentKey, CopySource] = {}
        parts: dict[tuple[bytes, int], CopySource] = {}
        for root, there in enumerate(self._names):
            for path, name in there.items():
                if name.content is None or name.signature is None or name.first != path:
                    continue
                if name.content in files:
                    whole.setdefault(name.content, CopySource((root, path), 0, name.signature))
                at = 0
                for run in name.content.runs:
                    if run in runs:
                        parts.setdefault(run, CopySource((root, path), at, name.signature))
                    at += run[1]
        staged = self._changes.staged
        for number, file in enumerate(staged):
            self._find_copies_for(file, whole, parts)
            if self._may_be_patched(file):
                staged[number] = file._replace(copies=[], patches=frozenset(file.missing))

    def _may_be_patched(self, file: Staged) -> bool:
        """Whether most of a big file is already in place, so that it is patched: a copy would cost
        its whole size, in time and on the disk."""
        entry = file.entry
        name = self._names[entry.root].get(entry.path)
        if name is None or name.kind != FILE or name.content is None or not name.content.runs:
            return False
        place = (entry.root, entry.path)
        if name.first != entry.path or place in self._claimed or not self._is_alone(place):
            return False
        here = {copy.at for copy in file.copies if copy.source[:2] == (place, copy.at)}
        if len(here) != len(file.copies):
            return False
        kept = sum(copy.length for copy in file.copies)
        fetched = sum(entry.extents[number].length for number in file.missing)
        return kept > fetched and _holes(content_of(entry, self._target.chunks)) <= _holes(
            name.content
        )

    def _find_copies_for(
        self,
        staged: Staged,
        whole: Mapping[ContentKey, CopySource],
        parts: Mapping[tuple[bytes, int], CopySource],
    ) -> None:
        entry = staged.entry
        content = content_of(entry, self._target.chunks)
        name = self._names[entry.root].get(entry.path)
        twin = whole.get(content)
        at = 0
        for number, extent in enumerate(entry.extents):
            if extent.chunk != HOLE:
                source = None
                if name is not None and name.signature is not None and number in name.right:
                    source = CopySource((entry.root, entry.path), at, name.signature)
                elif twin is not None:
                    source = twin._replace(offset=at)
                elif content.runs:
                    source = parts.get(content.runs[number])
                if source is None:
                    staged.missing.append(number)
                else:
                    staged.copies.append(Copy(at, extent.length, source))
            at += extent.length


def _holes(content: ContentKey) -> set[tuple[int, int]]:
    """Where a file has holes: offset and length."""
    holes = set()
    at = 0
    for chunk, length in content.runs:
        if not chunk:
            holes.add((at, length))
        at += length
    return holes
