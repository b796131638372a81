"""One thing that was measured several times, and tables of such figures."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final, Literal

import msgspec

if TYPE_CHECKING:
    import pandas

What = Literal["line", "codec", "deploy"]
Direction = Literal["up", "down", ""]
Unit = Literal["MB/s", "s", "ratio", "$"]

MB: Final = 1e6


class Figure(msgspec.Struct, frozen=True):
    """All samples of one figure. Fields that do not apply are empty or None.

    ``line``: raw random bytes to one store, the most that this host and store were seen to move.
    ``codec``: one encoding on one kind of data. ``deploy``: starts of the stack ``name`` by the
    strategy ``data``, until the first completion. Rates are decimal MB of stored bytes a second of
    wall time; of codecs, plain bytes a second of CPU time on one core, or of wall time on a GPU.
    """

    what: What
    name: str
    unit: Unit
    values: tuple[float, ...]
    direction: Direction = ""
    phase: str = ""
    data: str = ""
    measured_from: str = ""

    @property
    def n(self) -> int:
        return len(self.values)

    @property
    def median(self) -> float:
        return statistics.median(self.values)

    @property
    def low(self) -> float:
        return min(self.values)

    @property
    def high(self) -> float:
        return max(self.values)

    @property
    def p95(self) -> float:
        """The smallest sample that 95 % of them do not exceed."""
        return sorted(self.values)[math.ceil(0.95 * self.n) - 1]

    def row(self) -> dict[str, Any]:
        """One line of the table: the samples summed up, and kept."""
        fields = {name: getattr(self, name) for name in self.__struct_fields__ if name != "values"}
        summed = {"n": self.n, "median": self.median, "min": self.low, "max": self.high}
        summed |= {"p95": self.p95}
        return fields | summed | {"samples": list(self.values)}


def frame(figures: Sequence[Figure]) -> pandas.DataFrame:
    """The figures as a table, one line each."""
    import pandas  # importing it takes a second of CPU, which other flows need not spend

    columns = list(Figure("line", "", "s", (0.0,)).row())
    return pandas.DataFrame([figure.row() for figure in figures], columns=columns)


def find(figures: Sequence[Figure], what: What, *, phase: str = "", **wanted: Any) -> list[Figure]:
    """The figures of one kind whose other fields are as ``wanted``."""
    return [
        figure
        for figure in figures
        if (figure.what, figure.phase) == (what, phase)
        and all(getattr(figure, name) == value for name, value in wanted.items())
    ]
