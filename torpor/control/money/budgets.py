"""Budgets: how much of a month's money is spent, what may still be rented, and until when."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from decimal import Decimal
from fractions import Fraction
from typing import Final

import msgspec

from torpor.control.money.costs import HOUR_US, costs, dollars, price, read
from torpor.control.money.months import Month, microseconds
from torpor.control.rental.records import Rental, Rentals
from torpor.control.time_zones import zone_named
from torpor.shared.errors import BudgetUnread, InvalidInput
from torpor.shared.values import WorkspaceName, names_of

RESERVE_S: Final = 3600.0
"""Seconds for which the budget must pay for a machine and for all that run; otherwise the machine
is not rented."""
WARN_SHARE: Final = 0.8
"""The share of the budget at which an event is sent."""


class Budget(msgspec.Struct, frozen=True, kw_only=True):
    """What ``workspaces``, or all workspaces of ``project``, may cost in a calendar month."""

    name: str
    usd_month: Decimal
    timezone: str = "UTC"
    workspaces: tuple[WorkspaceName, ...] = ()
    project: str = ""

    def __post_init__(self) -> None:
        """Raises InvalidInput."""
        zone_named(self.timezone)
        if not self.usd_month > 0:
            raise InvalidInput(f"budget {self.name}: {self.usd_month} $ is no budget: use more")
        if bool(self.workspaces) == bool(self.project):
            raise InvalidInput(
                f"budget {self.name}: it is for workspaces or for a project: name one of the two"
            )

    def covers(self, workspace: WorkspaceName, project: str) -> bool:
        """Whether the budget limits what a workspace of this project rents under this name."""
        if self.project:
            return project == self.project
        return any(workspace in names_of(name) for name in self.workspaces)


class BudgetStatus(msgspec.Struct, frozen=True, kw_only=True):
    """How a budget stands: what its rentals have cost this month, and what runs."""

    budget: Budget
    month: Month
    low: int  # micro-dollars
    high: int
    running: int  # how many rentals are open
    usd_h: Fraction  # what the open rentals cost together
    unpriced_us: int  # micro-dollars of rentals at unknown prices, which are not in the sums

    @property
    def limit(self) -> int:
        """Micro-dollars in a month."""
        return math.floor(self.budget.usd_month * 1_000_000)

    @property
    def left(self) -> int:
        """Micro-dollars that are certainly left; negative where more was spent."""
        return self.limit - self.high

    @property
    def share(self) -> float:
        """The share of the budget that may have been spent."""
        return self.high / self.limit

    def refusal(self, usd_h: float = 0.0, count: int = 0, for_s: float = RESERVE_S) -> str:
        """Why ``count`` more machines of this price may not be rented; empty where the budget pays
        for them, and for all that run, for ``for_s`` seconds. With ``count`` 0: whether what is
        rented already is too much."""
        more = price(usd_h)
        if count and more is None:
            return self.refusal_of_price(usd_h)
        needed = (self.usd_h + count * (more or 0)) * Fraction(for_s) / 3600
        if self.high + needed * 1_000_000 <= self.limit:
            return ""
        machines = f"{count} more at {float(more or 0):.4g} $/h" if count else "another one"
        time = "an hour" if for_s == RESERVE_S else f"{for_s / 3600:.1f} hours"
        return (
            f"{self.message()}; with {machines} {time} would exceed the budget: hibernate a "
            f"machine, raise the budget, or wait for {self.month.plus(1)}"
        )

    def refusal_of_price(self, usd_h: float) -> str:
        """Why a machine of this price may not be rented, whatever is left; empty if it may."""
        if price(usd_h) is not None:
            return ""
        return f"its price is unknown, and budget {self.budget.name} allows known prices only"

    def message(self) -> str:
        """One sentence: what is spent and what is left."""
        name, zone = self.budget.name, self.budget.timezone
        unknown = ""
        if self.unpriced_us:
            unknown = f", {self.unpriced_us / HOUR_US:.1f} hours at unknown prices not counted"
        return (
            f"budget {name}: {between(self.low, self.high)} of {self.budget.usd_month:.2f} $ spent "
            f"in {self.month} ({zone}), {dollars(max(0, self.left)):.2f} $ left; "
            f"{self.running} open rental{'' if self.running == 1 else 's'} at "
            f"{float(self.usd_h):.4g} $/h{unknown}"
        )


class OpenBudget(msgspec.Struct, frozen=True):
    """A budget, and how to open the records that it counts. ``trouble``: why they cannot be known;
    the budget's workspaces are then those that it may cover."""

    budget: Budget
    ledgers: Callable[[], Sequence[Rentals]]
    trouble: str = ""

    def rentals(self, now_unix: float) -> list[Rental]:
        """What counts in the month of ``now_unix``. Any store that does not answer is an error, and
        so is ``trouble``."""
        if self.trouble:
            raise BudgetUnread(self.trouble)
        zone = zone_named(self.budget.timezone)
        month = Month.of(microseconds(now_unix), zone)
        found = read(self.ledgers(), month.begin_us(zone) / 1e6)
        of = self.budget
        return [rental for rental in found if of.covers(rental.label.workspace, rental.project)]

    def status(self, now_unix: float) -> BudgetStatus:
        """The status of the budget now."""
        return budget_status(self.budget, self.rentals(now_unix), now_unix)


def budget_status(budget: Budget, rentals: Iterable[Rental], now_unix: float) -> BudgetStatus:
    """The status of the budget; ``rentals`` are those that it counts, of this month at least."""
    rentals = list(rentals)
    zone = zone_named(budget.timezone)
    month = Month.of(microseconds(now_unix), zone)
    now = [cost for cost in costs(rentals, now_unix, zone) if cost.month == month]
    still_open = [rental for rental in rentals if rental.state != "ended"]
    return BudgetStatus(
        budget=budget,
        month=month,
        low=sum(cost.low for cost in now),
        high=sum(cost.high for cost in now),
        running=len(still_open),
        usd_h=sum((price(rental.bound_usd_h) or Fraction(0) for rental in still_open), Fraction(0)),
        unpriced_us=sum(cost.unpriced_us for cost in now),
    )


def exhausted_unix(budget: Budget, rentals: Iterable[Rental], now_unix: float) -> float | None:
    """When the budget's cost reaches 100 %, if all open rentals go on and none is added.

    ``rentals`` are those that the budget counts. ``now_unix`` if it has been reached; None if the
    open rentals never reach it, because each month begins with nothing spent, or none has a known
    price.
    """
    now = budget_status(budget, rentals, now_unix)
    if now.left <= 0:
        return now_unix
    if not now.usd_h:
        return None
    zone, month, left = zone_named(budget.timezone), now.month, now.left
    begin_us = microseconds(now_unix)
    for _ in range(13):  # this month and a whole year, which contains the longest month
        reached_us = begin_us + left * 3600 / now.usd_h
        end_us = month.plus(1).begin_us(zone)
        if reached_us <= end_us:
            return float(reached_us / 1_000_000)
        begin_us, month, left = end_us, month.plus(1), now.limit
    return None


def between(low: int, high: int) -> str:
    """An interval of micro-dollars, for a person: one number where cents do not differ."""
    words = [f"{dollars(bound):,.2f}" for bound in (low, high)]
    return f"{' to '.join(dict.fromkeys(words))} $"
