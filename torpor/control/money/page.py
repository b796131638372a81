"""What was spent, as one page: months, a picture, budgets, storage, and what is not counted."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from typing import Final

from torpor.control.drawing import COLOURS, INK, canvas, svg
from torpor.control.measure.page import dated, section
from torpor.control.measure.results import INSTALL, left_out
from torpor.control.money.advice import Steady
from torpor.control.money.budgets import between
from torpor.control.money.costs import HOUR_US, dollars
from torpor.control.money.months import Month
from torpor.control.money.spending import MACHINES, STORAGE, Line
from torpor.control.reports import Row
from torpor.control.store.records import Unread
from torpor.control.store_prices import StorePrice

MOST_COLOURS: Final = len(COLOURS) - 1
"""Workspaces with a colour of their own; the others share the last one."""

_NOT_COUNTED: Final = (
    "A rental counts from its request, at the price of that moment. Not counted: traffic, taxes, "
    "what a provider rounds up, disks that outlive a machine (`reconcile` lists them), and hours "
    "at unknown prices, which have a column of their own. A lower and an upper bound are shown "
    "where the end of a machine is known only to lie between its last sight and the proof."
)

_HOW: Final = (
    "Busy: the mean of the busiest GPU's rate; a second in which any kernel ran may count as a "
    "full one. Memory: the most that was in use on one GPU, looked at once a second; some programs "
    "reserve nearly all of it in advance. Jobs on several machines are left out."
)


def page(
    found: Sequence[Line],
    plot: bytes | None,
    budgets: Sequence[str],
    price: StorePrice | None,
    timezone: str,
    reserve: Sequence[Steady] = (),
    gpus: Sequence[Row] = (),
    unread: Unread = {},  # noqa: B006 - it is never changed
) -> str:
    """Markdown for Prefect's UI."""
    image = "No plot: no machine had a known price."
    if plot is not None:
        encoded = base64.b64encode(plot).decode()
        image = f"![Cost by month](data:image/svg+xml;base64,{encoded})"
    elif "matplotlib" in left_out():
        image = f"No plot: matplotlib is missing. {INSTALL}"
    return "\n".join(
        [
            f"## Machines by month ({timezone})",
            "",
            image,
            "",
            *section("Months", [_month(month, found) for month in _months(found)]),
            *section("Budgets of this workspace", [{"budget": words} for words in budgets]),
            *section("Storage, as it is now", _storage(found, price)),
            *section("Worth a reservation", [machine.row() for machine in reserve]),
            *section("What jobs used of their GPUs", gpus),
            *([_HOW, ""] if gpus else []),
            *section(
                "Records that cannot be believed, and are not counted",
                [{"record": key, "why": str(why)} for key, why in unread.items()],
            ),
            _NOT_COUNTED,
        ]
    )


def picture(found: Sequence[Line]) -> bytes | None:
    """Dollars by month, one colour a workspace, as SVG; a line shows lower and upper bound. None
    where there is nothing to draw, or without matplotlib."""
    months = sorted(_months(found))
    totals: dict[str, int] = {}
    for line in found:
        totals[line.workspace] = totals.get(line.workspace, 0) + line.high
    names = sorted((name for name in totals if totals[name]), key=lambda name: -totals[name])
    if not names or "matplotlib" in left_out():
        return None
    shown = names[:MOST_COLOURS]
    groups = {name: {name} for name in shown} | {"others": set(names[MOST_COLOURS:])}
    drawn, (axes,) = canvas(3.2, 1, share_y=False)
    at, under = range(len(months)), [0.0] * len(months)
    for colour, (label, members) in zip(COLOURS, groups.items(), strict=False):
        if members:
            heights = [_usd(found, month, members)[1] for month in months]
            axes.bar(at, heights, 0.66, under, color=colour, label=label)
            under = [low + height for low, height in zip(under, heights, strict=True)]
    for place, month in zip(at, months, strict=True):
        axes.plot([place, place], _usd(found, month, set(names)), color=INK, linewidth=1.2)
    axes.set_xticks(at, [str(month) for month in months], rotation=45 if len(months) > 8 else 0)
    axes.set_xlim(-0.6, max(len(months), 4) - 0.4)  # one month is no wall
    axes.set_ylabel("dollars")
    axes.legend(frameon=False, fontsize=8, ncols=4, loc="lower left", bbox_to_anchor=(0, 1.0))
    return svg(drawn)


def _usd(found: Sequence[Line], month: Month, names: set[str]) -> tuple[float, float]:
    of = [line for line in found if line.month == month and line.workspace in names]
    return (
        float(dollars(sum(line.low for line in of))),
        float(dollars(sum(line.high for line in of))),
    )


def _months(found: Sequence[Line]) -> list[Month]:
    """Rows about machines, newest month first."""
    return list(dict.fromkeys(line.month for line in found if line.kind == MACHINES))


def _month(month: Month, found: Sequence[Line]) -> dict[str, str]:
    of = [line for line in found if line.kind == MACHINES and line.month == month]
    hours = sum(line.high_us for line in of)
    return {
        "month": str(month),
        "cost": between(sum(line.low for line in of), sum(line.high for line in of)),
        "hours": f"{hours / HOUR_US:,.2f}",
        "of unknown price": f"{sum(line.unpriced_us for line in of) / HOUR_US:,.2f}",
        "spot": f"{100 * sum(line.spot_us for line in of) / hours:.0f} %" if hours else "",
    }


def _storage(found: Sequence[Line], price: StorePrice | None) -> list[dict[str, str]]:
    """A row for each workspace; what its bytes cost if they stay for a month."""
    return [
        {
            "workspace": line.workspace,
            "bytes": f"{line.stored_bytes:,}",
            "a month": "no price known"
            if line.stored_usd_month is None
            else f"{line.stored_usd_month:,.2f} $",
            "price of": dated(price),
        }
        for line in found
        if line.kind == STORAGE
    ]
