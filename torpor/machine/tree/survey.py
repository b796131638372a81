"""The names on a machine's disk, compared with the snapshots that have them.

The walk looks at names. A file with its held signature is unchanged since its snapshot. Any other
file is read and compared with what the snapshots have under its name.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Final, NamedTuple

import msgspec

from torpor.machine.tree.attributes import HOST_XATTRS
from torpor.machine.tree.content import ContentKey, content_of, right_extents
from torpor.machine.tree.names import Signature
from torpor.machine.tree.read import opened
from torpor.machine.tree.walk import Walk
from torpor.shared.format.keys import Seal
from torpor.shared.format.manifest import DIRECTORY, FILE, HARDLINK, SYMLINK, Chunk, Entry

OTHER: Final = -1
"""The kind of a FIFO, socket or device, which no snapshot keeps."""

_THREADS: Final = 8


class Name(NamedTuple):
    """One name on the disk."""

    kind: int  # FILE for every name of a file
    entry: Entry  # as it was walked, without content
    signature: Signature | None
    first: bytes  # one path that all names of a file share
    content: ContentKey | None  # None: in none of the snapshots that were compared
    settled: Signature | None = None  # the signature, if a later change would certainly show in it
    is_held: bool = False  # whether it is as it was when it equalled the last snapshot
    right: frozenset[int] = frozenset()  # extents of the target's file of that name that it holds


class Saved:
    """A snapshot's entries by name."""

    def __init__(self, entries: Sequence[Entry], chunks: Sequence[Chunk]) -> None:
        self.entries = entries
        self.chunks = chunks
        self._at = {(entry.root, entry.path): entry for entry in entries}

    def at(self, root: int, path: bytes) -> Entry | None:
        return self._at.get((root, path))

    def file(self, entry: Entry) -> Entry:
        """The file that a name stands for: itself, or what it is a hard link to."""
        return self._at[entry.root, entry.target] if entry.kind == HARDLINK else entry

    def content(self, entry: Entry) -> ContentKey:
        return content_of(self.file(entry), self.chunks)


class Survey(NamedTuple):
    """Every name below the roots, and those that no snapshot has in this state."""

    names: list[dict[bytes, Name]]
    unsaved: list[tuple[int, bytes]]
    removed: list[tuple[int, bytes]]
    """Names in the last snapshot and in the target that are not on the disk."""


def survey(
    seen: Walk,
    last: Saved | None,
    target: Saved,
    roots: Sequence[bytes],
    seal: Seal,
    *,
    last_is_stored: bool,
    owners: bool,
    strict: bool,
    check: Callable[[], None],
) -> Survey:
    """Compare the walk ``seen`` with ``last``, the snapshot that the machine held, and ``target``.

    The walk was given the names as they were when they equalled ``last``. What only a ``last`` has
    that is not stored any more is unsaved. Not ``strict``: a name is saved when its content is,
    whatever its attributes. ``check`` may raise RunCancelled.
    """
    names = _names(seen, len(roots), last)
    known = [target] if last is None else [target, last]
    _read_unknown(names, known, roots, seal, check)
    saved = known if last_is_stored else [target]
    unsaved = [
        (root, path)
        for root, there in enumerate(names)
        for path, name in there.items()
        if name.kind != OTHER
        and not (last_is_stored and name.is_held)
        and not any(_is_saved(name, root, path, source, owners, strict) for source in saved)
    ]
    removed = [
        (entry.root, entry.path)
        for entry in (last.entries if last else ())
        if entry.path not in names[entry.root] and target.at(entry.root, entry.path)
    ]
    return Survey(names, unsaved, removed)


def same_attributes(have: Entry, want: Entry, *, owners: bool) -> bool:
    """Whether mode, owner, time and extended attributes are the same, without a host's own
    labels."""
    return (
        (have.mode == want.mode or want.kind == SYMLINK)
        and (not owners or (have.uid, have.gid) == (want.uid, want.gid))
        and (have.mtime_ns == want.mtime_ns)
        and _own_xattrs(have) == _own_xattrs(want)
    )


def _own_xattrs(entry: Entry) -> list[tuple[bytes, bytes]]:
    return [pair for pair in entry.xattrs if not pair[0].startswith(HOST_XATTRS)]


def _names(seen: Walk, roots: int, last: Saved | None) -> list[dict[bytes, Name]]:
    names: list[dict[bytes, Name]] = [{} for _ in range(roots)]
    fresh = set(seen.fresh)
    for position, entry in enumerate(seen.names.entries):
        there = names[entry.root]
        is_held = position not in fresh
        settled = seen.names.signature(position)
        if entry.kind == HARDLINK:
            of = there[entry.target]
            there[entry.path] = of._replace(entry=entry, is_held=is_held)
        elif entry.kind == FILE:
            signature = seen.names.seen(position)
            content = last.content(entry) if last is not None and is_held else None
            name = Name(FILE, entry, signature, entry.path, content, settled, is_held)
            there[entry.path] = name
        else:
            name = Name(entry.kind, entry, settled, entry.path, None, settled, is_held)
            there[entry.path] = name
    for skipped in seen.skipped:
        entry = Entry(OTHER, skipped.root, skipped.path, 0, 0, 0, 0, 0)
        names[skipped.root][skipped.path] = Name(OTHER, entry, None, skipped.path, None)
    return names


def _read_unknown(
    names: list[dict[bytes, Name]],
    saved: Sequence[Saved],
    roots: Sequence[bytes],
    seal: Seal,
    check: Callable[[], None],
) -> None:
    """Find the content of files that do not have their held signature, or how much of it is
    right."""
    together: dict[tuple[int, bytes], list[bytes]] = {}
    for root, there in enumerate(names):
        for path, name in there.items():
            if name.kind == FILE and name.content is None:
                together.setdefault((root, name.first), []).append(path)

    def read(of: tuple[int, bytes]) -> tuple[ContentKey | None, frozenset[int]]:
        check()
        root, first = of
        name = names[root][first]
        wanted = _wanted(root, together[of], saved)
        return _read(os.path.join(roots[root], first), name, wanted, saved[0], seal)

    with ThreadPoolExecutor(_THREADS) as threads:
        for (root, _), (content, right), paths in zip(
            together, threads.map(read, together), together.values(), strict=True
        ):
            for path in paths:
                names[root][path] = names[root][path]._replace(content=content, right=right)


def _wanted(
    root: int, paths: Sequence[bytes], saved: Sequence[Saved]
) -> Iterator[tuple[Entry, Saved]]:
    """The files that the snapshots have at any of a file's names, the target's first."""
    asked: set[ContentKey] = set()
    for source in saved:
        for path in paths:
            entry = source.at(root, path)
            if entry is not None and entry.kind in (FILE, HARDLINK):
                content = source.content(entry)
                if content not in asked:
                    asked.add(content)
                    yield source.file(entry), source


def _read(
    full: bytes, name: Name, wanted: Iterator[tuple[Entry, Saved]], target: Saved, seal: Seal
) -> tuple[ContentKey | None, frozenset[int]]:
    right: frozenset[int] = frozenset()
    for entry, source in wanted:
        found: set[int] = set()
        is_whole = name.signature is not None and name.signature.size == entry.size
        if is_whole or not entry.digest:
            try:
                with opened(full) as fd:
                    seen = Signature.of(os.fstat(fd))
                    found = right_extents(fd, entry, source.chunks, seal)
                    now = Signature.of(os.fstat(fd))
            except OSError:
                return None, frozenset()  # the file cannot be read: its content is unknown
            if not seen == now == name.signature:
                return None, frozenset()  # the file changes while it is read
            if is_whole and len(found) == len(entry.extents):
                return content_of(entry, source.chunks), frozenset()
        if source is target and entry.path == name.first:
            right = frozenset(found)
    return None, right


def _is_saved(
    name: Name, root: int, path: bytes, source: Saved, owners: bool, strict: bool
) -> bool:
    entry = source.at(root, path)
    if entry is None:
        return False
    if name.kind == FILE:
        if entry.kind not in (FILE, HARDLINK) or name.content != source.content(entry):
            return False
    elif name.kind != entry.kind or name.entry.target != entry.target:
        return False
    want = entry
    if name.kind == DIRECTORY:  # its time changes with every name in it, excluded ones too
        want = msgspec.structs.replace(want, mtime_ns=name.entry.mtime_ns)
    return not strict or same_attributes(name.entry, want, owners=owners)
