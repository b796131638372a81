"""What is known of a rental only later: what its run measured, and what it was billed."""

from __future__ import annotations

import time

from torpor.control.providers.seam import Prices, Provider
from torpor.control.rental.records import Rental
from torpor.shared.errors import TorporError


def billed(provider: Provider, rental: Rental) -> dict[str, float]:
    """What its record says of the price once it ends: the mean price, by its market's history. The
    bound stays in the record where that is not to be had."""
    if not rental.most_usd_h or rental.machine is None or not isinstance(provider, Prices):
        return {}
    try:
        rise = provider.rise_usd_h(rental.offer, rental.created_unix, time.time())
    except TorporError:
        return {}
    return {"price_usd_h": min(rental.price_usd_h + rise, rental.most_usd_h), "most_usd_h": 0.0}


def measured(rental: Rental) -> dict[str, float]:
    """What its run measured of it: written with the next change of state."""
    names = ("answered_unix", "price_usd_h", "fetched_bytes", "fetched_s")
    return {name: value for name in names if (value := getattr(rental, name))}
