"""A benchmark as one page: what it advises, tables, and what it was measured on."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torpor.control.measure.advice import Advice, shown
from torpor.control.measure.figures import Figure, find
from torpor.control.store_prices import StorePrice


def page(
    figures: Sequence[Figure],
    said: Sequence[Advice],
    prices: Mapping[str, StorePrice | None],
    by_line: Sequence[Mapping[str, str]],
    facts: Mapping[str, Any],
    notes: Sequence[str],
) -> str:
    """Markdown for Prefect's UI. ``by_line``: which encoding is the fastest over which line."""
    tail = [
        *section("Stores", _stores(figures, prices)),
        *section("Encodings", _codecs(figures)),
        *section("The fastest encoding by line, and its seconds for 1 GB (computed)", by_line),
        *measured_on(facts, notes),
        "Every figure is the median of n samples with the lowest and the highest. Rates up and "
        "down are two things and are never added. The table by line is computed from them: the "
        "longer of the line's time for the stored bytes and the time of all cores.",
    ]
    return joined(said, tail)


def measured_on(facts: Mapping[str, Any], notes: Sequence[str]) -> list[str]:
    """The section about the host, and the notes."""
    rows = ({"what": name, "value": str(value)} for name, value in facts.items())
    return [*section("What it was measured on", rows), *(f"* {note}" for note in notes), ""]


def joined(said: Sequence[Advice], tail: Sequence[str]) -> str:
    """The page, which begins with the advice."""
    head = [
        "## What it advises",
        *(
            f"* **{advice.about}: {advice.choice}.** "
            f"{advice.because[:1].upper()}{advice.because[1:]}."
            for advice in said
        ),
    ]
    return "\n".join([*head, "", *tail])


def section(title: str, rows: Iterable[Mapping[str, str]]) -> list[str]:
    """A heading and a table in Markdown; nothing where there are no rows."""
    rows = list(rows)
    if not rows:
        return []
    columns = list(rows[0])
    lines = [" | ".join(columns), " | ".join("---" for _ in columns)]
    lines += [" | ".join(row.get(column, "") for column in columns) for row in rows]
    return [f"## {title}", "", *(f"| {line} |" for line in lines), ""]


def _stores(
    figures: Sequence[Figure], prices: Mapping[str, StorePrice | None]
) -> Iterable[dict[str, str]]:
    for up in find(figures, "line", direction="up"):
        down = find(figures, "line", direction="down", name=up.name)
        price = prices.get(up.name)
        yield {
            "store": up.name,
            "line rate up": shown(up),
            "line rate down": shown(down[0]) if down else "",
            "a TB kept for a month": f"{1000 * price.gb_month_usd:.2f} $" if price else "no price",
            "a TB read": f"{1000 * price.egress_gb_usd:.2f} $" if price else "no price",
            "price of": dated(price),
        }


def _codecs(figures: Sequence[Figure]) -> Iterable[dict[str, str]]:
    for share in (f for f in figures if (f.what, f.phase) == ("codec", "stored")):
        up = find(figures, "codec", direction="up", name=share.name, data=share.data)
        down = find(figures, "codec", direction="down", name=share.name, data=share.data)
        if share.name != "raw":
            yield {
                "content": share.data,
                "encoding": share.name,
                "stored": f"{100 * share.median:.1f} %",
                "by": share.measured_from,
                "encode": shown(up[0]) if up else "",
                "decode": shown(down[0]) if down else "stored raw",
            }


def dated(price: StorePrice | None) -> str:
    """When and where a price was true, in Markdown."""
    if price is None:
        return ""
    linked = price.source.startswith("https://")
    return f"[{price.as_of}]({price.source})" if linked else price.source
