"""Entries as rows of MessagePack, one after the other, looked at in C without an object for each.

The C library (gpu_kernels/entries) knows only the form that torpor writes. Functions raise NotPlain
where a row has another form or breaks a claim, or where the C library is missing: the caller then
uses Python, which knows every form and says what is wrong.
"""

from __future__ import annotations

import struct
from array import array
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Final, NamedTuple

from gpu_kernels.native import EntriesLibrary, address_of, entries_library

NO_CHUNK: Final = -1
_LEAST_ROW: Final = 14  # bytes: a head and 13 fields
_TOTALS: Final = struct.Struct("=3Q")
_PLACE: Final = struct.Struct("=7Q")
PLACES: Final = 4096
NAMES_BYTES: Final = 1 << 20
"""How many bytes of names are listed at once, at first."""
_NOT_PLAIN: Final = (1 << 64) - 1


class NotPlain(Exception):
    """The C library cannot read these rows: use Python."""


class Counted(NamedTuple):
    """Totals of the files among some rows; ``used``: one byte for each chunk, 1 where a file has
    it."""

    files: int
    size: int  # of all files, in bytes
    changed: int
    used: bytearray


class Described(NamedTuple):
    """What each entry is. ``chunks``: the chunk of which a file is one run, else NO_CHUNK."""

    kinds: bytearray
    roots: array[int]
    sizes: array[int]  # bytes
    chunks: array[int]

    def of_kind(self, kind: int) -> Iterator[int]:
        """The positions of entries of that kind."""
        at = self.kinds.find(kind)
        while at >= 0:
            yield at
            at = self.kinds.find(kind, at + 1)


class Listed(NamedTuple):
    """A directory's own entry, or a run: the names of a directory that stand one after the other.
    ``names`` has a zero byte between two."""

    row: int  # the number of the first row
    root: int
    path: bytes
    is_run: bool
    names: bytes


def row_ends(rows: memoryview, count: int) -> array[int]:
    """A 0, and where each row ends; there are exactly ``count``."""
    lib = _library()
    if count * _LEAST_ROW > len(rows):
        raise NotPlain
    ends = array("Q", (0,)) * (count + 1)
    with address_of(rows) as start, address_of(ends, writable=True) as found:
        done = lib.torpor_entry_ends(start, len(rows), found + ends.itemsize, count)
    if (done, ends[-1]) != (count, len(rows)):
        raise NotPlain
    return ends


def check_rows(rows: bytearray, ends: array[int], plain: array[int], roots: int) -> bool:
    """Check what each entry claims by itself, and the order of a directory's names. ``plain``:
    bytes of each chunk. True where hard links are among them."""
    count = len(ends) - 1
    linked = bytearray(1)
    with (
        address_of(rows) as start,
        address_of(ends) as bounds,
        address_of(plain) as sizes,
        address_of(linked, writable=True) as link,
    ):
        done = _library().torpor_check_entries(start, bounds, count, sizes, len(plain), roots, link)
    if done != count:
        raise NotPlain
    return bool(linked[0])


def count_rows(rows: bytearray, ends: array[int], chunks: int) -> Counted:
    """Count the files and the chunks that they use, in ``count`` rows."""
    used, totals = bytearray(chunks), bytearray(_TOTALS.size)
    with (
        address_of(rows) as start,
        address_of(ends) as bounds,
        address_of(used, writable=True) as uses,
        address_of(totals, writable=True) as sums,
    ):
        plain = _library().torpor_count_entries(start, bounds, len(ends) - 1, uses, chunks, sums)
    if not plain:
        raise NotPlain
    files, size, changed = _TOTALS.unpack(totals)
    return Counted(files, size, changed, used)


def describe_rows(rows: bytearray, ends: array[int]) -> Described:
    """What each entry is."""
    count = len(ends) - 1
    found = Described(
        bytearray(count),
        array("I", (0,)) * count,
        array("q", (0,)) * count,
        array("q", (0,)) * count,
    )
    with (
        address_of(rows) as start,
        address_of(ends) as bounds,
        address_of(found.kinds, writable=True) as kinds,
        address_of(found.roots, writable=True) as roots,
        address_of(found.sizes, writable=True) as sizes,
        address_of(found.chunks, writable=True) as chunks,
    ):
        plain = _library().torpor_describe_entries(
            start, bounds, count, kinds, roots, sizes, chunks
        )
    if not plain:
        raise NotPlain
    return found


def fill_rows(
    rows: bytearray,
    ends: array[int],
    contents: bytearray,
    content_ends: array[int],
    at: array[int],
) -> tuple[bytearray, array[int]]:
    """Rows with contents filled in, and the end of each row: row i gets content number ``at[i]``,
    and none where that is negative. A content is [size, extents, digest, changed]."""
    lib, count = _library(), len(ends) - 1
    _check_length(len(at), count)
    filled = bytearray(len(rows) + len(contents))
    new_ends = array("Q", (0,)) * len(ends)
    with (
        address_of(rows) as start,
        address_of(ends) as bounds,
        address_of(contents) as content,
        address_of(content_ends) as content_bounds,
        address_of(at) as numbers,
        address_of(filled, writable=True) as target,
        address_of(new_ends, writable=True) as target_bounds,
    ):
        size = lib.torpor_fill_entries(
            *(start, bounds, count, content, content_bounds, len(content_ends) - 1),
            *(numbers, target, len(filled), target_bounds + new_ends.itemsize),
        )
    if size == _NOT_PLAIN:
        raise NotPlain
    del filled[size:]
    return filled, new_ends


def list_rows(
    rows: bytearray, ends: array[int], changed: bytearray | None = None
) -> Iterator[Listed]:
    """The directories and the runs of names, in order. ``changed`` gets a byte for each row: 1
    where the file changed while it was read. Without ``changed``, runs are listed without their
    names."""
    lib, row, count = _library(), 0, len(ends) - 1
    if changed is not None:
        _check_length(len(changed), count)
    room, names_bytes = PLACES, NAMES_BYTES if changed is not None else 0
    while row < count:
        found, listed, names = (
            bytearray(_PLACE.size * room),
            array("Q", (0,)),
            bytearray(names_bytes),
        )
        with (
            address_of(rows) as start,
            address_of(ends) as bounds,
            address_of(found, writable=True) as where,
            address_of(listed, writable=True) as made,
            address_of(names, writable=True) as text,
            nullcontext() if changed is None else address_of(changed, writable=True) as changes,
        ):
            after = lib.torpor_group_entries(
                *(start, bounds, row, count, where, room, made, text, names_bytes, changes)
            )
        if after == _NOT_PLAIN:
            raise NotPlain
        if after == row:
            room, names_bytes = 2 * room, 2 * names_bytes
        row = after
        with memoryview(rows) as view, memoryview(names) as text_view:
            for first, root, at, length, is_run, names_at, size in _PLACE.iter_unpack(
                memoryview(found)[: listed[0] * _PLACE.size]
            ):
                yield Listed(
                    first,
                    root,
                    view[at : at + length].tobytes(),
                    bool(is_run),
                    text_view[names_at : names_at + size].tobytes(),
                )


def _check_length(length: int, count: int) -> None:
    """Check the length of a buffer, which the C library trusts."""
    if length != count:
        raise ValueError(f"{length} values for {count} rows")


def _library() -> EntriesLibrary:
    lib = entries_library()
    if lib is None:
        raise NotPlain
    return lib
