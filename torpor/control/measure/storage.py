"""What a store does for one machine: raw random bytes up and down.

Every byte is fresh and every object is read once, so that neither deduplication nor a cache of what
was read before can help. A store that keeps in memory what was just written may still answer a
download faster than its disks would.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Final, NamedTuple

from torpor.control.measure.figures import MB, Figure
from torpor.control.store.object_store import ObjectStore
from torpor.shared.transfer.throughput import Moved
from torpor.shared.values import MIB, Grant, ObjectKey, object_key

CONNECTIONS: Final = 8
"""Connections, as many as an agent uses."""
OBJECT_BYTES: Final = 8 * MIB
OBJECTS: Final = 8
"""Objects that one sample moves."""
_GRANT_S: Final = 3600

Move = Callable[[Sequence[Grant], Sequence[Grant], int, int], Moved]
"""Writes and reads objects of a size over connections, on the machine that is measured from."""


class Rates(NamedTuple):
    """Decimal MB a second in each direction. The two are never added."""

    up: float
    down: float


def measure_storage(
    store: ObjectStore, name: str, prefix: str, move: Move, rounds: Iterable[int]
) -> list[Figure]:
    """The line rate of the store called ``name``, up and down.

    A first batch, for which the store makes room, does not count. Objects lie below ``prefix`` and
    are deleted.
    """
    _moved(store, f"{prefix}/first", move)
    moved = [_moved(store, f"{prefix}/round-{number}", move) for number in rounds]
    return [
        Figure("line", name, "MB/s", tuple(rates.up for rates in moved), "up"),
        Figure("line", name, "MB/s", tuple(rates.down for rates in moved), "down"),
    ]


def _moved(store: ObjectStore, where: str, move: Move) -> Rates:
    """Write a batch of fresh objects, and read each once."""
    keys = [object_key(f"{where}/{n}") for n in range(OBJECTS)]
    puts = [store.grant("PUT", key, expires_s=_GRANT_S) for key in keys]
    gets = [store.grant("GET", key, expires_s=_GRANT_S) for key in keys]
    with _deleted(store, keys):
        seconds = move(puts, gets, OBJECT_BYTES, CONNECTIONS)
    megabytes = OBJECT_BYTES * OBJECTS / MB
    return Rates(megabytes / seconds.up_s, megabytes / seconds.down_s)


@contextmanager
def _deleted(store: ObjectStore, keys: Sequence[ObjectKey]) -> Iterator[None]:
    try:
        yield
    finally:
        store.delete(keys)
