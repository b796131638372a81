"""What the last month says about reserving machines: which were rented most of the time."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from itertools import pairwise
from typing import Final

import msgspec

from torpor.control.money.costs import HOUR_US, charge, dollars, price, span
from torpor.control.money.months import microseconds
from torpor.control.rental.records import Rental

WINDOW_H: Final = 720
"""A month: markets sell hardly any reservation for less."""
STEADY: Final = 0.4
"""The least share of the window. No market discounts a reservation so much that less use pays."""


class Steady(msgspec.Struct, frozen=True, kw_only=True):
    """The ``number``-th machine of a kind that was rented at the same time, in the last WINDOW_H
    hours: microseconds and micro-dollars, those that are certain."""

    provider: str
    gpu: str
    number: int
    us: int
    usd: int

    @property
    def below_usd_h(self) -> float:
        """What an hour of the window, used or not, may cost at most in a reservation that pays."""
        return float(dollars(self.usd)) / WINDOW_H

    def row(self) -> dict[str, str]:
        hours = self.us / HOUR_US
        return {
            "provider": self.provider,
            "GPU": self.gpu,
            "machine": str(self.number),
            "rented": f"{hours:,.0f} of {WINDOW_H} h, {100 * hours / WINDOW_H:.0f} %",
            "cost": f"{dollars(self.usd):,.2f} $",
            "a reservation pays below": f"{self.below_usd_h:.3f} $/h",
        }


def steady(rentals: Iterable[Rental], now_unix: float) -> list[Steady]:
    """The machines that were rented for at least STEADY of the window, the dearest first. Those of
    unknown price are left out: nothing says what a reservation would save."""
    now_us = microseconds(now_unix)
    since_us = now_us - WINDOW_H * HOUR_US
    kinds = defaultdict(list)
    for rental in rentals:
        begin_us, seen_us, _ = span(rental, now_unix)
        begin_us, seen_us = max(begin_us, since_us), min(seen_us, now_us)
        if rental.gpu and price(rental.price_usd_h) and begin_us < seen_us:
            kind = rental.provider, f"{rental.gpu_count} x {rental.gpu}"
            kinds[kind].append((begin_us, seen_us, rental.price_usd_h))
    found = []
    for (provider, gpu), spans in kinds.items():
        rented: dict[int, list[tuple[int, int]]] = defaultdict(list)
        for begin_us, end_us in pairwise(
            sorted({at for begin, end, _ in spans for at in (begin, end)})
        ):
            there = [usd_h for begin, end, usd_h in spans if begin <= begin_us and end_us <= end]
            for number, usd_h in enumerate(sorted(there, reverse=True), 1):
                rented[number].append((end_us - begin_us, charge(usd_h, end_us - begin_us)))
        found += [
            Steady(
                provider=provider,
                gpu=gpu,
                number=number,
                us=sum(us for us, _ in parts),
                usd=sum(usd for _, usd in parts),
            )
            for number, parts in rented.items()
        ]
    most = [machine for machine in found if machine.us >= STEADY * WINDOW_H * HOUR_US]
    return sorted(most, key=lambda its: (-its.usd, its.provider, its.gpu, its.number))
