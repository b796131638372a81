"""What a store does for one host: raw random bytes up and down, by connections and object size.

Every byte is fresh and every object is read once, so that neither deduplication nor a cache of what
was read before can help. What a store keeps in memory after a write may still make a download
faster than its disks; the line rate is measured in the same way, so the two can be compared.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Final, Literal, NamedTuple

from msgspec.structs import replace

from torpor.control.measure.figures import MB, Figure
from torpor.control.store.seam import ObjectStore
from torpor.shared.transfer.line import Moved
from torpor.shared.values import MIB, Grant, ObjectKey, object_key

HERE: Final = "this host"
MACHINE: Final = "the machine"
LINE_CONNECTIONS: Final = 8
"""As many as an agent uses."""
LINE_OBJECT_BYTES: Final = 8 * MIB
CACHED_ABOVE: Final = 1.1
"""Rates this far above the line rate's best sample are not noise: some cache answered."""
_GRANT_S: Final = 3600

Move = Callable[[Sequence[Grant], Sequence[Grant], int, int], Moved]
"""Writes and reads objects of a size over connections, on the host that is measured from."""


class Cell(NamedTuple):
    """One object size over one number of connections."""

    what: Literal["line", "storage"]
    object_bytes: int
    connections: int


class Rates(NamedTuple):
    """Decimal MB a second each way. They are two things, and never added."""

    up: float
    down: float


_LINE: Final = Cell("line", LINE_OBJECT_BYTES, LINE_CONNECTIONS)


def measure_storage(
    store: ObjectStore,
    name: str,
    prefix: str,
    move: Move,
    *,
    measured_from: str,
    object_bytes: Sequence[int],
    parts: Sequence[int],
    batch_bytes: int,
    rounds: Iterable[int],
) -> list[Figure]:
    """The line rate, and each object size by each number of connections, up and down.

    Each sample moves ``batch_bytes``, or one object where that is more; a number of connections
    above the number of objects would measure nothing and is left out. A round goes over all
    cells, so that a slow minute touches all alike, with the line rate before and after them; a
    first batch, for which the store makes room, does not count. Objects lie below ``prefix`` and
    are deleted.
    """
    cells = [
        Cell("storage", size, count)
        for size in object_bytes
        for count in parts
        if count <= max(1, batch_bytes // size)
    ]
    moved: dict[Cell, list[Rates]] = {cell: [] for cell in (_LINE, *cells)}
    _moved(store, f"{prefix}/first", _LINE, batch_bytes, move)
    for number in rounds:
        for at, cell in enumerate((_LINE, *cells, _LINE)):
            where = f"{prefix}/round-{number}/{at}"
            moved[cell].append(_moved(store, where, cell, batch_bytes, move))
    whole = Figure("line", name, "MB/s", (), measured_from=measured_from)
    line_up = replace(whole, values=tuple(r.up for r in moved[_LINE]), direction="up")
    line_down = replace(whole, values=tuple(r.down for r in moved[_LINE]), direction="down")
    figures = [line_up, line_down]
    for cell in cells:
        of = replace(whole, what=cell.what, parts=cell.connections, object_bytes=cell.object_bytes)
        ups = tuple(rates.up for rates in moved[cell])
        downs = tuple(rates.down for rates in moved[cell])
        figures += [
            replace(of, values=ups, direction="up", cached=above_line(ups, line_up)),
            replace(of, values=downs, direction="down", cached=above_line(downs, line_down)),
        ]
    return figures


def above_line(values: Sequence[float], line: Figure | None) -> bool:
    """Whether each rate is above all that raw random bytes were seen to do the same way."""
    return line is not None and min(values) > CACHED_ABOVE * line.high


def _moved(store: ObjectStore, where: str, cell: Cell, batch_bytes: int, move: Move) -> Rates:
    """Write a batch of fresh objects and read each once."""
    size = cell.object_bytes
    keys = [object_key(f"{where}/{n}") for n in range(max(1, batch_bytes // size))]
    puts = [store.grant("PUT", key, expires_s=_GRANT_S) for key in keys]
    gets = [store.grant("GET", key, expires_s=_GRANT_S) for key in keys]
    with _deleted(store, keys):
        seconds = move(puts, gets, size, min(cell.connections, len(keys)))
    megabytes = size * len(keys) / MB
    return Rates(megabytes / seconds.up_s, megabytes / seconds.down_s)


@contextmanager
def _deleted(store: ObjectStore, keys: Sequence[ObjectKey]) -> Iterator[None]:
    try:
        yield
    finally:
        store.delete(keys)
