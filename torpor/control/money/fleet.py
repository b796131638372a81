"""What the machines of each workspace cost now, today and this month, by project and capacity type.

Days and months are UTC's, and bounds are the upper ones, as budgets count. A sum that includes an
unknown price is unknown.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final
from zoneinfo import ZoneInfo

import msgspec

from torpor.control.money.budgets import BudgetStatus
from torpor.control.money.costs import HOUR_US, dollars, price, rented_since, spent_since
from torpor.control.money.months import Month, microseconds
from torpor.control.rental.records import OWN_HOST, Rental
from torpor.shared.values import WorkspaceName

_UTC: Final = ZoneInfo("UTC")
_DAY_US: Final = 24 * HOUR_US
_QUEUED_S: Final = 180.0
"""Seconds after a run last saw a machine in its provider's queue for which it counts as queued. A
run looks each minute; after the run was killed, nobody looks, and the machine may have left the
queue."""


class WorkspaceCost(msgspec.Struct, frozen=True, kw_only=True):
    """One workspace, one project that it was rented for, on spot machines or on others. None: a
    price that belongs to the sum is not known. ``gpus``: how many are rented now."""

    workspace: WorkspaceName
    project: str
    spot: bool
    usd_h: float | None
    day_usd: float | None
    month_usd: float | None
    gpus: int


class BudgetUse(msgspec.Struct, frozen=True, kw_only=True):
    """A budget's month. ``spent_usd``: at most; None where a price or a record that it counts is
    not known. Without a name and ``usd_month``: no budget can be opened."""

    budget: str = ""
    usd_month: float | None = None
    spent_usd: float | None = None


class LastWake(msgspec.Struct, frozen=True):
    """What the newest wake of a workspace read from its store, and how long that took."""

    workspace: WorkspaceName
    bytes: int
    seconds: float


def budget_use(status: BudgetStatus) -> BudgetUse:
    """What a budget allows and has spent."""
    spent_usd = None if status.unpriced_us else float(dollars(status.high))
    usd_month = float(status.budget.usd_month)
    return BudgetUse(budget=status.budget.name, usd_month=usd_month, spent_usd=spent_usd)


def month_began_unix(now_unix: float, zone: ZoneInfo) -> float:
    """The begin of the time whose records are needed: of this month in the budget's zone.
    ``workspace_costs`` uses UTC."""
    return Month.of(microseconds(now_unix), zone).begin_us(zone) / 1e6


def workspace_costs(
    workspace: WorkspaceName, project: str, rentals: Sequence[Rental], now_unix: float
) -> list[WorkspaceCost]:
    """The costs of all rentals of this month. ``project``: the workspace's own project, which has a
    line for each capacity type even where nothing is rented for it, because its cost is then known
    to be 0."""
    groups: dict[tuple[str, bool], list[Rental]] = {(project, False): [], (project, True): []}
    for rental in rentals:
        if price(rental.bound_usd_h) is None and rental.provider.startswith(OWN_HOST):
            continue  # machines on a host of one's own cost nothing
        groups.setdefault((rental.project, rental.spot), []).append(rental)
    now_us = microseconds(now_unix)
    day_us = now_us - now_us % _DAY_US
    month_us = Month.of(now_us, _UTC).begin_us(_UTC)
    found = []
    for (of, spot), group in groups.items():
        rented = [one for one in group if one.state != "ended" and not _in_queue(one, now_unix)]
        found.append(
            WorkspaceCost(
                workspace=workspace,
                project=of,
                spot=spot,
                usd_h=_hourly(rented),
                day_usd=_spent(group, day_us, now_unix),
                month_usd=_spent(group, month_us, now_unix),
                gpus=sum(one.gpu_count for one in rented if one.machine),
            )
        )
    return found


def last_wake(workspace: WorkspaceName, rentals: Iterable[Rental]) -> LastWake | None:
    """What the newest wake read; None where no rental of this month says it."""
    woken = [one for one in rentals if one.fetched_bytes and one.fetched_s]
    if not woken:
        return None
    newest = max(woken, key=lambda one: one.created_unix)
    return LastWake(workspace, newest.fetched_bytes, newest.fetched_s)


def _in_queue(rental: Rental, now_unix: float) -> bool:
    """Whether the rental's machine waits at its provider, at no cost."""
    return rental.queued_unix is not None and now_unix - rental.queued_unix < _QUEUED_S


def _hourly(rented: Sequence[Rental]) -> float | None:
    prices = [price(one.bound_usd_h) for one in rented]
    known = [one for one in prices if one is not None]
    return float(sum(known)) if len(known) == len(prices) else None


def _spent(group: Sequence[Rental], since_us: int, now_unix: float) -> float | None:
    """Micro-dollars spent since then; None if unknown. A rental of unknown price makes it unknown
    if its machine existed, or may have existed, since then."""
    unpriced = (one for one in group if price(one.bound_usd_h) is None)
    if any(rented_since(one, since_us, now_unix) for one in unpriced):
        return None
    return float(dollars(sum(spent_since(one, since_us, now_unix) for one in group)))
