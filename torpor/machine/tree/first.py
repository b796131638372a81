"""What a restore brings first: what the user names, or what was used; and what comes with it."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence, Set
from typing import Final, NamedTuple

from torpor.machine.tree.walk import compile_excludes
from torpor.shared.format.file_use import BEFORE_READY, NEVER
from torpor.shared.format.manifest import DIRECTORY, FILE, HARDLINK, SYMLINK, Entry, EntryId
from torpor.shared.format.sizes import BIG_FILE_BYTES

MOST_HOPS: Final = 8
"""How many symlinks in a row are followed."""


class First(NamedTuple):
    """Entries, by their number in the manifest, with their position in the user's list.

    ``passages``: directories above them in which something else is still to be written. ``then``:
    entries that follow, before the rest.
    """

    ranks: dict[int, int]
    passages: set[int]
    unmatched: list[str]
    then: Set[int] = frozenset()

    def places(self, entries: Sequence[Entry]) -> set[EntryId]:
        return {(entries[n].root, entries[n].path) for n in self.passages}


NO_FIRST: Final = First({}, set(), [])


def find_first(entries: Sequence[Entry], patterns: Sequence[str]) -> First:
    """What ``patterns`` name, as those of ``exclude`` do: a directory with everything below it.

    All names of a file come together. A relative symlink brings what it leads to, unless that is a
    directory above it. Directories above come too, complete if nothing else is below them.
    """
    if not patterns:
        return NO_FIRST
    numbers = {(entry.root, entry.path): number for number, entry in enumerate(entries)}
    seeds, unmatched = _matched(entries, patterns)
    ranks = _with_all_below(entries, seeds)
    for _ in range(MOST_HOPS):
        led_to = _led_to(entries, numbers, ranks)
        if not led_to:
            break
        ranks = _with_all_below(entries, ranks | led_to)
    ranks, passages = _with_directories(entries, numbers, ranks, len(patterns))
    return First(ranks, passages, unmatched)


def find_used(entries: Sequence[Entry], classes: bytes) -> First:
    """The files that were used before the machine was ready; those that were used later follow.

    With it come what it may look for and never read, such as the source of a compiled Python
    module: all symlinks, and small files in directories in which anything was used.
    """
    if not classes:
        return NO_FIRST
    files = {n for n, e in enumerate(entries) if e.kind in (FILE, HARDLINK)}
    used = {n for n, when in enumerate(classes) if when != NEVER and n in files}
    early = {n for n in used if classes[n] == BEFORE_READY}
    if not early:
        return NO_FIRST._replace(then=used)
    beside = set(_around(entries[n] for n in used))
    seeds = {
        number
        for number, entry in enumerate(entries)
        if number in early
        or entry.kind == SYMLINK
        or (
            entry.kind == FILE
            and entry.size < BIG_FILE_BYTES
            and (entry.root, os.path.dirname(entry.path)) in beside
        )
    }
    numbers = {(entry.root, entry.path): number for number, entry in enumerate(entries)}
    ranks, passages = _with_directories(entries, numbers, dict.fromkeys(seeds, 0), 1)
    return First(ranks, passages, [], used)


def _around(used: Iterable[Entry]) -> Iterator[EntryId]:
    """The directories of these files; for compiled Python modules, also those of their sources."""
    for entry in used:
        directory = os.path.dirname(entry.path)
        yield entry.root, directory
        if os.path.basename(directory) == b"__pycache__":
            yield entry.root, os.path.dirname(directory)


def _with_directories(
    entries: Sequence[Entry], numbers: dict[EntryId, int], ranks: dict[int, int], last: int
) -> tuple[dict[int, int], set[int]]:
    """These entries with all names of their files, and the directories above them: those that are
    complete with them, at position ``last``, and the others."""
    ranks = _with_every_name(entries, numbers, ranks)
    above = _above(entries, numbers, ranks)
    rest = [n for n in range(len(entries)) if n not in ranks and n not in above]
    busy = _above(entries, numbers, rest)
    return dict.fromkeys(above - busy, last) | ranks, above & busy


def _matched(entries: Sequence[Entry], patterns: Sequence[str]) -> tuple[dict[int, int], list[str]]:
    seeds: dict[int, int] = {}
    unmatched = []
    for rank, pattern in enumerate(patterns):
        matches = compile_excludes([pattern])
        found = [n for n, e in enumerate(entries) if e.path and matches and matches(e.path)]
        if not found:
            unmatched.append(pattern)
        for number in found:
            seeds.setdefault(number, rank)
    return seeds, unmatched


def _with_all_below(entries: Sequence[Entry], seeds: dict[int, int]) -> dict[int, int]:
    """These entries, and the contents of the directories among them, which come after them."""
    ranks: dict[int, int] = {}
    inside: dict[EntryId, int] = {}
    for number, entry in enumerate(entries):
        above = inside.get((entry.root, os.path.dirname(entry.path))) if entry.path else None
        rank = min((r for r in (seeds.get(number), above) if r is not None), default=None)
        if rank is not None:
            ranks[number] = rank
            if entry.kind == DIRECTORY:
                inside[(entry.root, entry.path)] = rank
    return ranks


def _led_to(
    entries: Sequence[Entry], numbers: dict[EntryId, int], ranks: dict[int, int]
) -> dict[int, int]:
    """The entries to which symlinks among ``ranks`` lead, unless they are among them already."""
    found: dict[int, int] = {}
    for number, rank in ranks.items():
        entry = entries[number]
        if entry.kind != SYMLINK or entry.target.startswith(b"/"):
            continue
        path = os.path.normpath(os.path.join(os.path.dirname(entry.path), entry.target))
        target = numbers.get((entry.root, path))
        if target is not None and target not in ranks and not entry.path.startswith(path + b"/"):
            found[target] = min(rank, found.get(target, rank))
    return found


def _with_every_name(
    entries: Sequence[Entry], numbers: dict[EntryId, int], ranks: dict[int, int]
) -> dict[int, int]:
    files: dict[int, int] = {}  # by the number of the name that has the content
    names = [(n, numbers[e.root, e.target]) for n, e in enumerate(entries) if e.kind == HARDLINK]
    for number, file in names:
        if number in ranks:
            files[file] = min(ranks[number], files.get(file, ranks[number]))
    found = {**ranks, **{file: min(rank, ranks.get(file, rank)) for file, rank in files.items()}}
    for number, file in names:
        if file in found:
            found[number] = min(found[file], found.get(number, found[file]))
    return found


def _above(entries: Sequence[Entry], numbers: dict[EntryId, int], below: Iterable[int]) -> set[int]:
    """The directories above these entries that are not among them."""
    found: set[int] = set()
    for number in below:
        root, path = entries[number].root, entries[number].path
        while path:
            path = os.path.dirname(path)
            directory = numbers[root, path]
            if directory in found:
                break
            found.add(directory)
    return found
