"""What a workspace held before and holds no more, where that is most of it: perhaps a disk did not
come back."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Final

import msgspec

from torpor.machine.tree.disks import Mounts
from torpor.machine.tree.mappings import file_systems
from torpor.machine.tree.walk import Held, Holding, Walk
from torpor.shared.format.manifest import FILE
from torpor.shared.values import PROGRAMS

FEW_NAMES: Final = 10
FEW_BYTES: Final = 100 << 20
"""Losing less than both of these is never most of a workspace."""
_FROZEN: Final = re.compile(rb"%s/[0-9a-f]{12}/" % re.escape(os.fsencode(PROGRAMS)))
"""What was frozen of programs is gone once they go on."""
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
        """Whether most of these names are still not there."""
        return 2 * sum(map(os.path.lexists, self.sample)) < len(self.sample)


def vanished(
    before: Holding,
    seen: Walk,
    roots: Sequence[bytes],
    excluded: Callable[[bytes], bool] | None,
) -> list[Gone]:
    """What ``before`` held of a root and ``seen`` does not, if less than half of the files or of
    their bytes are left; the largest directories first. A file that was moved, or is excluded now,
    is not gone, and new ones make up for old ones. ``before`` is empty where nothing is known."""
    if not before:
        return []
    found: list[Gone] = []
    moved = {(u.signature.inode, u.signature.size, u.signature.mtime_ns) for u in seen.unread}
    fresh: list[dict[bytes, int]] = [{} for _ in roots]
    for file in seen.unread:
        fresh[file.entry.root][file.entry.path] = file.signature.size
    for held, now, new, root in zip(before, seen.held, fresh, roots, strict=True):
        if not seen.fresh and len(now) == len(held):
            continue  # all is as it was held
        gone = [
            path
            for path, known in held.items()
            if path not in now and path not in new and _counts(path, known)
        ]
        if not gone:
            continue
        files = {path: known for path, known in held.items() if _counts(path, known)}
        kept = [known.entry.size for path, known in now.items() if _counts(path, known)]
        left = [*kept, *(size for path, size in new.items() if not _FROZEN.match(path))]
        if not _is_most(gone, files, left):
            continue
        gone = [
            path
            for path in gone
            if not _moved(files[path], moved)
            and not (excluded and any(map(excluded, _with_parents(path))))
        ]
        if _is_most(gone, files, left):
            found += _by_directory(gone, files, {*now, b""}, root)
    return sorted(found, key=lambda loss: (-loss.size, -loss.names))[:NAMED]


def _counts(path: bytes, known: Held) -> bool:
    return known.entry.kind == FILE and not _FROZEN.match(path)


def disks(roots: Sequence[bytes], excluded: Callable[[bytes], bool] | None) -> list[bytes]:
    """The mount points of disks, other than ``/``, on which the roots and what is below them lie;
    networks and what is excluded left out."""
    mounts = Mounts.of_this_machine()
    places = {_mount_point(place) for root in roots for place in file_systems(root, excluded)}
    return sorted(place for place in places - {b"/"} if mounts.is_disk(os.fsdecode(place)))


def _mount_point(place: bytes) -> bytes:
    while not os.path.ismount(place):
        place = os.path.dirname(place)
    return place


def _is_most(gone: Sequence[bytes], files: Mapping[bytes, Held], left: Sequence[int]) -> bool:
    """``left``: the sizes of the files that are there now."""
    if len(gone) >= FEW_NAMES and 2 * len(left) < len(files):
        return True
    lost = sum(files[path].entry.size for path in gone)
    return lost >= FEW_BYTES and 2 * sum(left) < sum(known.entry.size for known in files.values())


def _moved(held: Held, moved: set[tuple[int, int, int]]) -> bool:
    before = held.signature
    return before is not None and (before.inode, before.size, before.mtime_ns) in moved


def _with_parents(path: bytes) -> Iterator[bytes]:
    while path:
        yield path
        path = os.path.dirname(path)


def _by_directory(
    gone: Sequence[bytes], files: Mapping[bytes, Held], there: set[bytes], root: bytes
) -> list[Gone]:
    """Grouped by the directory that is still there."""
    groups: dict[bytes, list[bytes]] = {}
    for path in gone:
        directory = next((folder for folder in _with_parents(path) if folder in there), b"")
        groups.setdefault(directory, []).append(path)
    return [
        Gone(
            os.path.join(root, directory).rstrip(b"/"),
            len(paths),
            sum(files[path].entry.size for path in paths),
            [os.path.join(root, path) for path in paths[:: max(1, len(paths) // SAMPLE)]],
        )
        for directory, paths in groups.items()
    ]
