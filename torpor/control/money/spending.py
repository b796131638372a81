"""What was spent, as a table: one line for each month, project, workspace, provider and GPU."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from decimal import Decimal
from typing import TYPE_CHECKING, Any, Final

import msgspec

from torpor.control.money.budgets import between
from torpor.control.money.costs import HOUR_US, Cost, dollars
from torpor.control.money.months import Month
from torpor.control.money.storage import StorageUse
from torpor.control.reports import MOST_ROWS, Row
from torpor.control.store.records import Unread
from torpor.shared.values import WorkspaceName

if TYPE_CHECKING:
    import pandas

MACHINES: Final = "machines"
STORAGE: Final = "storage"


class SpendingLine(msgspec.Struct, frozen=True, kw_only=True):
    """What one kind of machine cost one workspace in one month, or what its storage costs.

    Of machines: hours and micro-dollars, at least and at most; ``spot_us`` and ``unpriced_us`` are
    parts of ``high_us``. Of storage: bytes now, and what they cost in a month.
    """

    month: Month
    kind: str = MACHINES
    project: str = ""
    workspace: str
    provider: str
    gpu: str = ""
    rentals: int = 0
    low_us: int = 0
    high_us: int = 0
    low: int = 0
    high: int = 0
    unpriced_us: int = 0
    spot_us: int = 0
    stored_bytes: int = 0
    stored_usd_month: Decimal | None = None

    @property
    def spot_share(self) -> float | None:
        """The share of the hours on spot machines; None where there are no hours."""
        return self.spot_us / self.high_us if self.high_us else None

    def record(self) -> dict[str, Any]:
        """The line as one of the DataFrame: dollars as exact decimals, hours as floats."""
        return {
            "month": str(self.month),
            "kind": self.kind,
            "workspace": self.workspace,
            "gpu": self.gpu,
            "low_usd": dollars(self.low),
            "high_usd": dollars(self.high),
            "unpriced_hours": self.unpriced_us / HOUR_US,
            "stored_usd_month": self.stored_usd_month,
            "hours_low": self.low_us / HOUR_US,
            "hours_high": self.high_us / HOUR_US,
            "spot_share": self.spot_share,
            "stored_bytes": self.stored_bytes,
            "project": self.project,
            "provider": self.provider,
            "rentals": self.rentals,
        }

    def row(self) -> Row:
        """The line as one of the UI's table."""
        if self.kind == STORAGE:
            usd = self.stored_usd_month
            cost = "no price known" if usd is None else f"{usd:,.2f} $ a month, as it is now"
            hours, spot, unpriced = f"{self.stored_bytes:,} bytes", "", ""
        else:
            cost = between(self.low, self.high)
            low, high = (f"{us / HOUR_US:,.2f}" for us in (self.low_us, self.high_us))
            hours = low if low == high else f"{low} to {high}"
            spot = f"{100 * (self.spot_share or 0):.0f} %"
            unpriced = f"{self.unpriced_us / HOUR_US:,.2f}" if self.unpriced_us else ""
        return {
            "month": str(self.month),
            "workspace": self.workspace,
            "GPU": self.gpu or self.kind,
            "cost": cost,
            "hours": hours,
            "of unknown price": unpriced,
            "spot": spot,
            "project": self.project,
            "provider": self.provider,
        }


def lines(
    costs: Sequence[Cost],
    of: Mapping[WorkspaceName, WorkspaceName],
    stored: Sequence[StorageUse] = (),
    store: str = "",
    now: Month | None = None,
) -> list[SpendingLine]:
    """All lines, the newest month first, and within a month the highest cost first. ``of``: the
    workspace of each name that machines are rented under."""
    groups: dict[tuple[Month, str, str, str, str], list[Cost]] = {}
    for cost in costs:
        rental = cost.rental
        name = of.get(rental.label.workspace, rental.label.workspace)
        gpu = f"{rental.gpu_count} x {rental.gpu}" if rental.gpu else ""
        groups.setdefault((cost.month, rental.project, name, rental.provider, gpu), []).append(cost)
    found = [
        SpendingLine(
            month=month,
            project=project,
            workspace=workspace,
            provider=provider,
            gpu=gpu,
            rentals=len(group),
            low_us=sum(cost.low_us for cost in group),
            high_us=sum(cost.high_us for cost in group),
            low=sum(cost.low for cost in group),
            high=sum(cost.high for cost in group),
            unpriced_us=sum(cost.unpriced_us for cost in group),
            spot_us=sum(cost.high_us for cost in group if cost.rental.spot),
        )
        for (month, project, workspace, provider, gpu), group in groups.items()
    ]
    if now is not None:
        found += [
            SpendingLine(
                month=now,
                kind=STORAGE,
                workspace=usage.workspace,
                provider=store,
                stored_bytes=usage.bytes,
                stored_usd_month=usage.usd_month,
            )
            for usage in stored
        ]
    found.sort(key=lambda line: (line.project, line.workspace, line.kind, line.provider, line.gpu))
    found.sort(key=lambda line: line.high, reverse=True)
    found.sort(key=lambda line: line.month, reverse=True)
    return found


def frame(found: Sequence[SpendingLine]) -> pandas.DataFrame:
    """The lines as a table."""
    import pandas  # importing it takes a second, which other flows need not spend

    columns = list(SpendingLine(month=Month(1970, 1), workspace="", provider="").record())
    return pandas.DataFrame([line.record() for line in found], columns=columns)


def rows(
    found: Sequence[SpendingLine],
    unread: Unread = {},  # noqa: B006 - it is never changed
) -> list[Row]:
    """The UI's table; its last rows say what is left out: lines, and records that cannot be
    trusted."""
    shown = [line.row() for line in found[:MOST_ROWS]]
    if len(found) > MOST_ROWS:
        more = f"and {len(found) - MOST_ROWS:,} more: in Python, spend returns them all"
        shown.append({**dict.fromkeys(shown[0], ""), "month": more})
    lacks = [
        {"month": "not counted", "workspace": key.split("/")[1], "cost": str(why)}
        for key, why in [*unread.items()][:MOST_ROWS]
    ]
    return [*shown, *lacks] or [{"result": "nothing was rented or stored"}]
