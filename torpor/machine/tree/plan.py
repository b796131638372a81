"""Cuts what must be read into units of one chunk each, and divides these among workers."""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple, Union

from torpor.machine.tree.names import UnreadFiles
from torpor.machine.tree.read import data_regions
from torpor.shared.format.sizes import BIG_FILE_BYTES, CHUNK_BYTES, GROUP_BYTES


class ChunkRange(NamedTuple):
    """A run of one big file, which becomes one chunk."""

    file: int  # position in the pass's unread files
    offset: int
    length: int


class Group(NamedTuple):
    """Small files that share one chunk."""

    files: Sequence[int]
    length: int


ReadUnit = Union[ChunkRange, Group]  # noqa: UP007 - evaluated at run time, also on Python 3.10


def cut(unread: UnreadFiles, roots: Sequence[bytes]) -> list[ReadUnit]:
    """The units that are read separately, in walk order. Empty files, and files of only holes, need
    none."""
    units: list[ReadUnit] = []
    group = array("L")
    group_bytes = 0
    for number, (size, is_sparse) in enumerate(unread.sizes()):
        if size == 0:
            continue
        if size >= BIG_FILE_BYTES or is_sparse:
            regions = [(0, size)]
            if is_sparse:
                entry = unread[number].entry
                regions = data_regions(roots[entry.root], entry.path, size)
            units.extend(p for at, length in regions for p in _pieces(number, at, length))
            continue
        if group and group_bytes + size > GROUP_BYTES:
            units.append(Group(group, group_bytes))
            group, group_bytes = array("L"), 0
        group.append(number)
        group_bytes += size
    if group:
        units.append(Group(group, group_bytes))
    return units


def share_out(units: Sequence[ReadUnit], most: int, least_bytes: int) -> list[list[ReadUnit]]:
    """At most ``most`` runs of neighbouring units, cut as part_ends says."""
    ends = part_ends(sum(unit.length for unit in units), most, least_bytes)
    shares: list[list[ReadUnit]] = [[] for _ in ends]
    done = 0
    for unit in units:
        shares[min(bisect_right(ends, done + unit.length // 2), len(ends) - 1)].append(unit)
        done += unit.length
    return [share for share in shares if share]


def part_ends(total: int, max_parts: int, part_bytes: int) -> list[int]:
    """The end of each part into which ``total`` bytes are cut.

    Parts are equal, ``part_bytes`` or a little more, except the last quarter: those become smaller
    and smaller, so that all workers end at about the same time.
    """
    count = max(1, min(max_parts, -(-total // max(1, part_bytes))))
    tail = max(1, count // 4)
    done = list(accumulate(min(tail, count - number) for number in range(count)))
    return [total * weight // done[-1] for weight in done]


def _pieces(file: int, start: int, length: int) -> list[ChunkRange]:
    pieces = []
    end = start + length
    while start < end:
        stop = min(end, (start // CHUNK_BYTES + 1) * CHUNK_BYTES)
        pieces.append(ChunkRange(file, start, stop - start))
        start = stop
    return pieces
