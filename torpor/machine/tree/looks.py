"""Look at the names of entries below their targets, many in one call."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import groupby, islice
from typing import Final

from torpor.machine.tree.batch import Stat, stat_names
from torpor.shared.format.manifest import Entry

_NAMES: Final = 1024  # looked at together
_TARGET: Final = os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


@contextmanager
def opened_targets(targets: Sequence[bytes]) -> Iterator[list[int | OSError]]:
    """A descriptor of each directory, or why there is none."""
    places: list[int | OSError] = []
    try:
        for target in targets:
            try:
                places.append(os.open(target, _TARGET))
            except OSError as exc:
                places.append(exc)
        yield places
    finally:
        for place in places:
            if isinstance(place, int):
                os.close(place)


def looked(places: Sequence[int | OSError], entries: Sequence[Entry]) -> Sequence[Stat]:
    """What is on the disk under the names of entries of one root."""
    place = places[entries[0].root]
    if isinstance(place, OSError):
        return [Stat.unknown(place) for _ in entries]
    return stat_names(place, [entry.path for entry in entries])


def runs_of(entries: Sequence[Entry], numbers: Iterable[int]) -> Iterator[list[tuple[int, Entry]]]:
    """These entries, each with its number, in lists of neighbours of one root."""
    numbered = ((number, entries[number]) for number in numbers)
    for _, group in groupby(numbered, lambda numbered: numbered[1].root):
        while run := list(islice(group, _NAMES)):
            yield run
