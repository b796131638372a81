"""What was spent, as one page: months, budgets, storage, and what is not counted."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from torpor.control.measure.page import dated, section
from torpor.control.money.advice import Steady
from torpor.control.money.budgets import between
from torpor.control.money.costs import HOUR_US
from torpor.control.money.months import Month
from torpor.control.money.spending import MACHINES, STORAGE, Line
from torpor.control.reports import Row
from torpor.control.store.records import Unread
from torpor.control.store_prices import StorePrice

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
    budgets: Sequence[str],
    price: StorePrice | None,
    timezone: str,
    reserve: Sequence[Steady] = (),
    gpus: Sequence[Row] = (),
    unread: Unread = {},  # noqa: B006 - it is never changed
) -> str:
    """Markdown for Prefect's UI."""
    return "\n".join(
        [
            *section(
                f"Machines by month ({timezone})",
                [_month(month, found) for month in _months(found)],
            ),
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
