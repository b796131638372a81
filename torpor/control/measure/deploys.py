"""What a benchmark of deploys says: tables, and which strategy to use."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from torpor.control.measure.advice import Advice, shown
from torpor.control.measure.figures import Figure, find
from torpor.control.measure.page import joined, measured_on, section

FROM_RENTAL: Final = "from rental"
FROM_SSH: Final = "from SSH"
_WHOLE: Final = (FROM_RENTAL, FROM_SSH)
COLD: Final = "cold"
"""The part of a strategy's name that says that its environment was made and stored first. Such a
strategy is not advised."""


def advise_deploys(figures: Sequence[Figure]) -> list[Advice]:
    """For each stack and provider the strategy with the soonest first completion after the rental;
    of those within its spread, the one that costs least."""
    said = []
    for stack, provider in _places(figures):
        of = find(
            figures, "deploy", phase=FROM_RENTAL, name=stack, measured_from=provider, unit="s"
        )
        ways = [figure for figure in of if COLD not in figure.data]
        if not ways:
            continue
        best = min(ways, key=lambda figure: figure.median)
        equal = [figure for figure in ways if figure.median <= best.high]
        chosen = min(equal, key=lambda figure: (_cost(figures, figure), figure.median))
        ssh = _beside(figures, chosen, FROM_SSH)
        because = (
            f"the first completion comes {shown(chosen)} after the rental and {shown(ssh)} after "
            f"SSH, and a start costs {_cost(figures, chosen):.4f} $"
        )
        if len(ways) == 1:
            because += "; nothing else was measured"
        elif len(equal) > 1:
            names = ", ".join(figure.data for figure in equal if figure is not chosen)
            because += f"; {names} is within the spread"
        if min(figure.n for figure in ways) < 3:
            because += ". Fewer than three starts have no spread: measure more rounds"
        said.append(Advice(f"{stack} at {provider}", chosen.data, because))
    return said


def deploys_page(
    figures: Sequence[Figure],
    said: Sequence[Advice],
    facts: Mapping[str, Any],
    notes: Sequence[str],
) -> str:
    """Markdown for Prefect's UI."""
    tail = [
        *section("Until the first completion", _starts(figures)),
        *section("Seconds by phase, median", _phases(figures)),
        *measured_on(facts, notes),
        "A cold start makes the environment and stores it; a warm one restores it. Phases may run "
        "at the same time, so they do not add up. Nothing is projected.",
    ]
    return joined(said, tail)


def _places(figures: Sequence[Figure]) -> list[tuple[str, str]]:
    return list(dict.fromkeys((f.name, f.measured_from) for f in figures if f.what == "deploy"))


def _beside(figures: Sequence[Figure], figure: Figure, phase: str, unit: str = "s") -> Figure:
    """Another figure from the same starts as ``figure``."""
    (found,) = find(
        figures, "deploy", phase=phase, unit=unit,
        name=figure.name, data=figure.data, measured_from=figure.measured_from,
    )  # fmt: skip
    return found


def _cost(figures: Sequence[Figure], figure: Figure) -> float:
    return _beside(figures, figure, FROM_RENTAL, "$").median


def _starts(figures: Sequence[Figure]) -> Iterator[dict[str, str]]:
    for figure in find(figures, "deploy", phase=FROM_RENTAL, unit="s"):
        ssh = _beside(figures, figure, FROM_SSH)
        yield {
            "stack": figure.name,
            "strategy": figure.data,
            "provider": figure.measured_from,
            "n": str(figure.n),
            "from rental, median": f"{figure.median:.1f} s",
            "p95": f"{figure.p95:.1f} s",
            "from SSH, median": f"{ssh.median:.1f} s",
            "p95 from SSH": f"{ssh.p95:.1f} s",
            "cost per start": f"{_cost(figures, figure):.4f} $",
        }


def _phases(figures: Sequence[Figure]) -> Iterator[dict[str, str]]:
    of = [f for f in figures if f.what == "deploy" and f.unit == "s" and f.phase not in _WHOLE]
    ways = list(dict.fromkeys((f.name, f.data, f.measured_from) for f in of))
    for phase in dict.fromkeys(f.phase for f in of):
        row = {"phase": phase}
        for way in ways:
            found = [f for f in of if (f.phase, f.name, f.data, f.measured_from) == (phase, *way)]
            row[", ".join(way)] = f"{found[0].median:.2f}" if found else ""
        yield row
