"""What a workspace held before and holds no more, where that is most of it: perhaps a disk did not
come back. Files that torpor writes there do not count."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Final

import msgspec

from torpor.machine.tree.absence import is_there
from torpor.machine.tree.disks import Mounts
from torpor.machine.tree.mappings import file_systems
from torpor.machine.tree.names import HELD, Names, Signature
from torpor.machine.tree.walk import Walk, is_inside
from torpor.shared.format.manifest import FILE, Entry
from torpor.shared.format.missed import Amount, Missing, is_most, is_torpors

SAMPLE: Final = 16
NAMED: Final = 10


class Gone(msgspec.Struct, frozen=True, array_like=True):
    """How many files of what size are gone below ``path``, and some of their names."""

    path: bytes
    names: int
    size: int
    sample: list[bytes]

    @property
    def stays_gone(self) -> bool:
        """Whether most of these names are still missing, or that is unknown."""
        return 2 * sum(map(os.path.lexists, self.sample)) < len(self.sample)


def vanished(
    before: Names,
    seen: Walk,
    roots: Sequence[bytes],
    excluded: Callable[[bytes], bool] | None,
) -> list[Gone]:
    """What ``before`` held of a root and ``seen`` does not, if less than half of the files or of
    their bytes are left, or if the whole workspace has no file any more; the largest directories
    first. A file that was moved, or is excluded now, is not gone, and new ones make up for old
    ones. ``before`` is empty where nothing is known."""
    found: list[Gone] = []
    sizes = [_sizes(seen.names, number) for number in range(len(roots))]
    for number, root in enumerate(roots):
        gone = {at: e for at in before.missing(number, seen.names) if (e := _file(before, at))}
        if not gone:
            continue
        files = [e.size for at in before.of_root(number) if (e := _file(before, at))]
        held, left = Amount.of(files), Amount.of(sizes[number])
        if any(sizes) and not is_most(_amount(gone.values()), held, left):
            continue
        moved = {(u.signature.inode, u.signature.size, u.signature.mtime_ns) for u in seen.unread}
        gone = {
            at: entry
            for at, entry in gone.items()
            if not _moved(before.signature(at), moved)
            and not (excluded and any(map(excluded, _with_parents(entry.path))))
        }
        if gone and (not any(sizes) or is_most(_amount(gone.values()), held, left)):
            found += _by_directory(gone.values(), number, seen.names, root)
    return sorted(found, key=lambda loss: (-loss.size, -loss.names))[:NAMED]


def _sizes(names: Names, root: int) -> list[int]:
    """The sizes of the files of a root that the walk has seen, and that count."""
    return [
        names.seen(at).size
        for at in names.of_root(root)
        if (entry := names.entries[at]).kind == FILE and not is_torpors(entry.path)
    ]


def hidden(
    befores: Iterable[Names | None],
    seen: Walk,
    roots: Sequence[bytes],
    mounted: Sequence[bytes],
) -> list[Gone]:
    """What one of ``befores`` held below these mount points and ``seen`` does not: another file
    system lies there now."""
    return [
        _gone(place, below, root)
        for number, root in enumerate(roots)
        for place in mounted
        if is_inside(place, [root])
        for before in befores
        if before and (below := [*_below(place, before, number, seen.names, root)])
    ]


def _below(place: bytes, before: Names, number: int, there: Names, root: bytes) -> Iterator[Entry]:
    for at in before.missing(number, there):
        entry = _file(before, at)
        if entry and is_inside(os.path.join(root, entry.path), [place]):
            yield entry


def distinct(gone: Sequence[Gone]) -> list[Gone]:
    """One loss for each place, the first of several; no more than a record holds."""
    found: dict[bytes, Gone] = {}
    for loss in gone:
        found.setdefault(loss.path, loss)
    return [*found.values()][: 2 * NAMED]


def missing_places(
    roots: Sequence[bytes], gone: Iterable[Gone], unmounted: Iterable[bytes]
) -> list[Missing]:
    """The missing places below the roots, including a root that lies on a disk that is not mounted.
    Files hidden by another disk are not counted."""
    counted = {loss.path: (loss.names, loss.size) for loss in gone}
    lost = [
        (path, *((0, 0) if os.path.ismount(path) else count)) for path, count in counted.items()
    ]
    return [
        Missing(number, path[len(root) :].strip(b"/"), files, size)
        for path, files, size in [*lost, *((disk, 0, 0) for disk in unmounted)]
        for number, root in enumerate(roots)
        if is_inside(path, [root]) or is_inside(root, [path])
    ]


def _file(names: Names, position: int) -> Entry | None:
    """The entry of a file that counts; None for any other."""
    if not names.marks[position] & HELD:
        return None
    entry = names.entry(position)
    return None if entry.kind != FILE or is_torpors(entry.path) else entry


def disks(roots: Sequence[bytes], excluded: Callable[[bytes], bool] | None) -> list[bytes]:
    """The mount points of disks, other than ``/``, on which the roots and what is below them lie;
    network mounts and excluded paths are left out."""
    mounts = Mounts.of_this_machine()
    places = {_mount_point(place) for root in roots for place in file_systems(root, excluded)}
    return sorted(place for place in places - {b"/"} if mounts.is_disk(os.fsdecode(place)))


def _mount_point(place: bytes) -> bytes:
    while not os.path.ismount(place):
        is_there(place)  # raises where the answer is unknown
        place = os.path.dirname(place)
    return place


def _amount(files: Iterable[Entry]) -> Amount:
    return Amount.of([entry.size for entry in files])


def _moved(before: Signature | None, moved: set[tuple[int, int, int]]) -> bool:
    return before is not None and (before.inode, before.size, before.mtime_ns) in moved


def _with_parents(path: bytes) -> Iterator[bytes]:
    while path:
        yield path
        path = os.path.dirname(path)


def _by_directory(gone: Iterable[Entry], number: int, there: Names, root: bytes) -> list[Gone]:
    """Grouped by the nearest directory that still exists."""
    groups: dict[bytes, list[Entry]] = {}
    for entry in gone:
        above = (f for f in _with_parents(entry.path) if there.find(number, f) >= 0)
        groups.setdefault(next(above, b""), []).append(entry)
    return [
        _gone(os.path.join(root, directory).rstrip(b"/"), entries, root)
        for directory, entries in groups.items()
    ]


def _gone(place: bytes, files: Sequence[Entry], root: bytes) -> Gone:
    sample = [os.path.join(root, file.path) for file in files[:: max(1, len(files) // SAMPLE)]]
    return Gone(place, len(files), sum(file.size for file in files), sample)
