"""What a market's refusal of a create blocks, told by its words."""

from __future__ import annotations

import re
from typing import Final

from torpor.control.providers.market_client import Refusal
from torpor.control.providers.provider import Order
from torpor.shared.errors import (
    CreateFailed,
    NoCapacity,
    ProviderDenied,
    ProviderError,
    QuotaReached,
)

_MONEY: Final = re.compile(r"insufficient.funds|balance|payment|deposit", re.IGNORECASE)
_CAPACITY: Final = re.compile(
    r"capacity|not available|no available|out of stock|sold out", re.IGNORECASE
)
_QUOTA: Final = re.compile(r"quota|limit", re.IGNORECASE)


def create_refused(market: str, order: Order, refusal: Refusal, *, denied: bool) -> ProviderError:
    """The error for a refusal that certainly rented nothing. ``denied``: it is about the login."""
    asked = f"{market} refused {order.offer.id}: {refusal}"
    if denied or _MONEY.search(refusal.text):
        return ProviderDenied(f"{asked}. Check the login, its permissions and the balance")
    if _CAPACITY.search(refusal.text):
        return NoCapacity(asked)
    return QuotaReached(asked) if _QUOTA.search(refusal.text) else CreateFailed(asked)
