"""What storage costs: a small table of list prices, each with its date and its source.

Prices change and differ by region, volume and contract. They are for comparing stores, never for a
bill; an Object Store block may carry its own, which count instead.
"""

from __future__ import annotations

from typing import Final

import msgspec


class StorePrice(msgspec.Struct, frozen=True):
    """US dollars before tax. ``as_of``: the day for which the price is known."""

    gb_month_usd: float
    egress_gb_usd: float
    as_of: str
    source: str
    note: str = ""

    def usd_day(self, stored_bytes: int) -> float:
        """What the store costs for these bytes in a day, with months of 730 hours."""
        return self.usd_month(stored_bytes) * 24 / 730

    def usd_month(self, stored_bytes: int) -> float:
        """What the store costs for these bytes in a month of 730 hours."""
        return stored_bytes / 1e9 * self.gb_month_usd


LIST_PRICES: Final[dict[str, StorePrice]] = {
    "aws-s3": StorePrice(
        0.023, 0.09, "2025-06-01", "https://aws.amazon.com/s3/pricing/",
        "S3 Standard, us-east-1, first 50 TB; the first 100 GB out of each month are free",
    ),
    "cloudflare-r2": StorePrice(
        0.015, 0.0, "2026-08-03", "https://developers.cloudflare.com/r2/pricing/",
        "Standard storage; 10 GB a month are free",
    ),
    "backblaze-b2": StorePrice(
        0.006, 0.01, "2026-04-01", "https://www.backblaze.com/cloud-storage/pricing",
        "downloads up to three times what is stored are free",
    ),
    "wasabi": StorePrice(
        0.00699, 0.0, "2025-06-01", "https://wasabi.com/pricing",
        "at least 1 TB is charged, and each object for at least 90 days",
    ),
}  # fmt: skip
"""List prices by the flavour of the block. A store of one's own (SeaweedFS, MinIO) has no list
price."""


def price_of(
    flavour: str, gb_month_usd: float | None, egress_gb_usd: float | None
) -> StorePrice | None:
    """The list price of a flavour, overridden by the user's; None if both are unknown."""
    listed = LIST_PRICES.get(flavour)
    if gb_month_usd is None and egress_gb_usd is None:
        return listed
    base = listed or StorePrice(0.0, 0.0, "", "")
    return msgspec.structs.replace(
        base,
        gb_month_usd=base.gb_month_usd if gb_month_usd is None else gb_month_usd,
        egress_gb_usd=base.egress_gb_usd if egress_gb_usd is None else egress_gb_usd,
        as_of=base.as_of or "as the block says",
        source="the store block",
        note="",
    )
