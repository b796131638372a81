"""What was spent, as one page: months, budgets, storage, and what is not counted."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Final

from torpor.control.measure.page import dated, section
from torpor.control.money.budgets import between
from torpor.control.money.costs import HOUR_US
from torpor.control.money.months import Month
from torpor.control.money.spending import MACHINES, STORAGE, SpendingLine
from torpor.control.store.records import Unread
from torpor.control.store_prices import StorePrice

RESERVED_H: Final = 290.0
"""Hours of use in a month, 40 %, from which a reservation may pay. No market's discount is so large
that less use pays."""
MOST_RESERVED: Final = 5

_NOT_COUNTED: Final = (
    "A rental counts from its request, at the price of that moment. Not counted: traffic, taxes, "
    "what a provider rounds up, disks that outlive a machine (`reconcile` lists them), and hours "
    "at unknown prices, which have a column of their own. A lower and an upper bound are shown "
    "where the end of a machine is known only to lie between its last sight and the proof."
)


def page(
    found: Sequence[SpendingLine],
    budgets: Sequence[str],
    price: StorePrice | None,
    timezone: str,
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
            *_worth_a_reservation(found),
            *section(
                "Records that cannot be believed, and are not counted",
                [{"record": key, "why": str(why)} for key, why in unread.items()],
            ),
            _NOT_COUNTED,
        ]
    )


def _worth_a_reservation(found: Sequence[SpendingLine]) -> list[str]:
    """One line naming what was rented for most of a month; empty where nothing was."""
    hours: Counter[tuple[str, str, str]] = Counter()
    for line in found:
        if line.kind == MACHINES and line.gpu:
            hours[str(line.month), line.gpu, line.provider] += line.low_us
    most = [
        f"{gpu} at {provider} ({us / HOUR_US:,.0f} h in {month})"
        for (month, gpu, provider), us in hours.most_common(MOST_RESERVED)
        if us >= RESERVED_H * HOUR_US
    ]
    return [f"A reservation may cost less: {', '.join(most)}.", ""] if most else []


def _months(found: Sequence[SpendingLine]) -> list[Month]:
    """Rows about machines, newest month first."""
    return list(dict.fromkeys(line.month for line in found if line.kind == MACHINES))


def _month(month: Month, found: Sequence[SpendingLine]) -> dict[str, str]:
    of = [line for line in found if line.kind == MACHINES and line.month == month]
    hours = sum(line.high_us for line in of)
    return {
        "month": str(month),
        "cost": between(sum(line.low for line in of), sum(line.high for line in of)),
        "hours": f"{hours / HOUR_US:,.2f}",
        "of unknown price": f"{sum(line.unpriced_us for line in of) / HOUR_US:,.2f}",
        "spot": f"{100 * sum(line.spot_us for line in of) / hours:.0f} %" if hours else "",
    }


def _storage(found: Sequence[SpendingLine], price: StorePrice | None) -> list[dict[str, str]]:
    """A row for each workspace: its bytes, and what they cost if they stay for a month."""
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
