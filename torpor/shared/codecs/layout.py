"""The elements of a file and their positions: the input of the ``planes`` codec."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from enum import IntEnum
from itertools import accumulate
from typing import NamedTuple

RUNS_MAX = 4096
"""The most runs in one chunk's stream: a chunk with more runs gains nothing from planes."""


class Element(IntEnum):
    """What a run of bytes is made of; the number is the code in a stream (docs/planes.md)."""

    BYTES = 0
    F8 = 1
    F16 = 2
    BF16 = 3
    F32 = 4
    F64 = 5
    I16 = 6
    I32 = 7
    I64 = 8

    @property
    def width(self) -> int:
        """Bytes of one element, which is also the number of its planes."""
        return _WIDTHS[self]

    @property
    def turned(self) -> bool:
        """Whether the sign bit is moved out of the exponent's byte before the cut into planes. Not
        for doubles: their exponent has 11 bits, and the move would spread it over two bytes."""
        return Element.F16 <= self <= Element.F32


_WIDTHS = (1, 1, 2, 2, 4, 8, 2, 4, 8)


class Run(NamedTuple):
    """``bytes`` of ``element``, the first one whole; an odd rest at the end is allowed."""

    bytes: int
    element: Element


class Layout:
    """A whole file as runs from its first byte to its last. Equal and hashable by its runs."""

    __slots__ = ("_ends", "runs")

    def __init__(self, runs: Iterable[Run]) -> None:
        self.runs = tuple(tidy(runs))
        self._ends = tuple(accumulate(run.bytes for run in self.runs))

    @property
    def bytes(self) -> int:
        return self._ends[-1] if self._ends else 0

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Layout) and self.runs == other.runs

    def __hash__(self) -> int:
        return hash(self.runs)

    def __repr__(self) -> str:
        return f"Layout({len(self.runs)} runs, {self.bytes} bytes)"

    def chunk(self, offset: int, length: int) -> tuple[Run, ...]:
        """The runs of a chunk. Elements that begin before the chunk or end after it become BYTES,
        and so do bytes behind the end that the file had when it was parsed."""
        runs: list[Run] = []
        end = offset + length
        at = offset
        for index in range(bisect_right(self._ends, offset), len(self.runs)):
            if at >= end:
                break
            run = self.runs[index]
            start = self._ends[index] - run.bytes
            taken = min(end, self._ends[index]) - at
            head = min(-(at - start) % run.element.width, taken)
            runs += (Run(head, Element.BYTES), Run(taken - head, run.element))
            at += taken
        runs.append(Run(end - at, Element.BYTES))
        return tuple(tidy(runs))


def layout_of_chunk(layout: Layout, offset: int, length: int) -> tuple[Run, ...]:
    """The runs of the ``length`` bytes at ``offset`` of a file with this layout."""
    return layout.chunk(offset, length)


def tidy(runs: Iterable[Run]) -> Iterator[Run]:
    """Join neighbours of one element and drop empty runs; odd rests become BYTES."""
    held: Run | None = None
    for run in _whole(runs):
        if held is not None and held.element == run.element:
            held = Run(held.bytes + run.bytes, run.element)
            continue
        if held is not None:
            yield held
        held = run
    if held is not None:
        yield held


def _whole(runs: Iterable[Run]) -> Iterator[Run]:
    for size, element in runs:
        rest = size % element.width
        if size > rest:
            yield Run(size - rest, element)
        if rest:
            yield Run(rest, Element.BYTES)


def covered(runs: Sequence[Run]) -> int:
    """How many bytes the runs make together."""
    return sum(run.bytes for run in runs)
