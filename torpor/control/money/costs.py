"""What rentals cost by month, each as an interval, in exact arithmetic.

A rental counts from its request, or from the moment when it was last seen in its provider's queue.
It ended between the moment when its provider last showed the machine and the moment when the end
was proven: ``low`` counts to the first, ``high`` to the second, or until now while the rental is
open. Where no machine was ever seen, ``low`` is nothing, and so is ``high`` once the rental has
ended.

Money is in whole micro-dollars, rounded once for each rental and month; all sums are exact.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from decimal import Decimal
from fractions import Fraction
from typing import Final
from zoneinfo import ZoneInfo

import msgspec

from torpor.control.money.months import Month, microseconds, split
from torpor.control.rental.records import Rental, Rentals
from torpor.control.store.records import Unread
from torpor.shared.values import Label

HOUR_US: Final = 3_600_000_000
_AT_ONCE: Final = 8


class Cost(msgspec.Struct, frozen=True, kw_only=True):
    """What one rental cost in one month."""

    month: Month
    rental: Rental
    low_us: int
    high_us: int

    @property
    def low(self) -> int:
        """Micro-dollars at least; 0 where the price is unknown. A price that changes while the
        machine runs counts as it was offered."""
        return charge(self.rental.price_usd_h, self.low_us)

    @property
    def high(self) -> int:
        """Micro-dollars at most, at the known price; 0 where the price is unknown."""
        return charge(self.rental.bound_usd_h, self.high_us)

    @property
    def unpriced_us(self) -> int:
        """Microseconds at most that were rented at an unknown price."""
        return 0 if price(self.rental.bound_usd_h) else self.high_us


def price(usd_h: float) -> Fraction | None:
    """Dollars an hour; None if unknown. No market gives machines away, so 0 means unknown."""
    return Fraction(str(usd_h)) if usd_h > 0 and math.isfinite(usd_h) else None


def charge(usd_h: float, us: int) -> int:
    """Micro-dollars for this many microseconds; 0 if the price is unknown."""
    return round((price(usd_h) or 0) * us / 3600)


def dollars(micro_usd: int) -> Decimal:
    """Micro-dollars in dollars."""
    return Decimal(micro_usd).scaleb(-6)


def costs(rentals: Iterable[Rental], now_unix: float, zone: ZoneInfo) -> list[Cost]:
    """The cost of each rental in each month in which it may have cost anything."""
    found = []
    for rental in rentals:
        begin_us, low_us, high_us = span(rental, now_unix)
        low = dict(split(begin_us, low_us, zone))
        found += [
            Cost(month=month, rental=rental, low_us=low.get(month, 0), high_us=us)
            for month, us in split(begin_us, high_us, zone)
        ]
    return found


def spent_since(rental: Rental, since_us: int, now_unix: float) -> int:
    """Micro-dollars at most since then, at the known price."""
    return charge(rental.bound_usd_h, rented_since(rental, since_us, now_unix))


def rented_since(rental: Rental, since_us: int, now_unix: float) -> int:
    """Microseconds at most for which it was rented since then."""
    begin_us, _, end_us = span(rental, now_unix)
    return max(0, end_us - max(begin_us, since_us))


def read(
    ledgers: Sequence[Rentals], since_unix: float = 0.0, unread: Unread | None = None
) -> list[Rental]:
    """The rentals of these workspaces, open ones and those that ended after ``since_unix``.
    ``unread``: as in Records.read_each."""
    if not ledgers:
        return []
    with ThreadPoolExecutor(_AT_ONCE, thread_name_prefix="rentals") as threads:
        found = threads.map(lambda ledger: ledger.since(since_unix, unread), ledgers)
        return [rental for of in found for rental in of]


def shown_now(
    rentals: Iterable[Rental], shown: Mapping[Label, object], now_unix: float
) -> list[Rental]:
    """The records, with now as the last time seen for machines that providers show now."""
    return [
        msgspec.structs.replace(rental, seen_unix=now_unix)
        if rental.state != "ended" and rental.label in shown
        else rental
        for rental in rentals
    ]


def until(rental: Rental, end_unix: float | None) -> Rental:
    """The record with an end at ``end_unix`` at the latest; None: with its own end."""
    if end_unix is None or (rental.state == "ended" and (rental.ended_unix or 0.0) <= end_unix):
        return rental
    seen_unix = None if rental.seen_unix is None else min(rental.seen_unix, end_unix)
    return msgspec.structs.replace(rental, state="ended", ended_unix=end_unix, seen_unix=seen_unix)


def span(rental: Rental, now_unix: float) -> tuple[int, int, int]:
    """When the rental began, and when it ended at the earliest and at the latest, in microseconds
    since 1970."""
    begin = max(rental.created_unix, rental.queued_unix or 0.0)
    seen = begin if rental.seen_unix is None else rental.seen_unix
    if rental.state != "ended":
        end = now_unix
    elif rental.machine is None:  # nothing was rented, or nothing was seen in two listings
        end = begin
    else:
        end = now_unix if rental.ended_unix is None else rental.ended_unix
    begin_us, end_us = microseconds(begin), microseconds(end)
    end_us = max(begin_us, end_us)  # clocks of control sides may differ
    return begin_us, min(max(begin_us, microseconds(seen)), end_us), end_us
