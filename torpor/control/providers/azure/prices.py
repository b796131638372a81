"""What Azure asks for an hour: its list of retail prices, which needs no login.

https://learn.microsoft.com/rest/api/cost-management/retail-prices/azure-retail-prices
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Final
from urllib.parse import quote

import httpx
import msgspec

from torpor.control.providers.azure.client import below
from torpor.control.providers.market_client import TIMEOUT, MarketClient

PRICES_URL: Final = "https://prices.azure.com"
ADDRESS_USD_H: Final = 0.005
"""USD an hour of a standard static IPv4 address, the same in every region."""
MOST_DISK_GIB: Final = 4095.0  # most GiB of a disk with a system
_PATH: Final = "/api/retail/prices"
_HOURS_A_MONTH: Final = 730
_FRESH_S: Final = 6 * 3600.0
_SIZES_AT_ONCE: Final = 15  # sizes in one filter of a request
_MOST_PAGES: Final = 40
_DISKS: Final = "Premium SSD Managed Disks"
_TIERS: Final = {4: 1, 8: 2, 16: 3, 32: 4, 64: 6, 128: 10, 256: 15, 512: 20, 1024: 30, 2048: 40,
                 4096: 50}  # fmt: skip
"""Disk tiers by GiB. A disk costs as much as the next larger tier: that of 128 GiB is P10."""
_OTHERS: Final = (" Win", "Cloud Services", "CloudServices")
"""Texts in names of products that are no plain Linux machine (SkyPilot's fetch_azure.py)."""
_SPOT: Final = " Spot"
_BATCH: Final = " Low Priority"

Prices = dict[tuple[str, bool], float]
"""Prices by size, and by whether it is spot."""


class _Row(msgspec.Struct, rename="camel"):
    retail_price: float
    currency_code: str
    unit_of_measure: str
    product_name: str
    sku_name: str
    meter_name: str
    arm_sku_name: str | None = None


class _Listed(msgspec.Struct):
    items: list[_Row] = msgspec.field(name="Items")
    next_link: str | None = msgspec.field(name="NextPageLink", default=None)


class AzurePrices:
    """Prices in dollars an hour. Thread-safe."""

    def __init__(
        self,
        *,
        url: str = PRICES_URL,
        timeout: httpx.Timeout = TIMEOUT,
        sleep: Callable[[float], None] = time.sleep,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._client = MarketClient(
            "azure", url, "", identity="Azure's price list", bearer=False, timeout=timeout,
            sleep=sleep,
        )  # fmt: skip
        self._clock, self._lock = clock, threading.Lock()
        self._known: dict[str, tuple[float, list[_Row]]] = {}

    def machines(self, region: str, sizes: Sequence[str]) -> Prices:
        """The prices of those sizes that are sold in the region."""
        found: Prices = {}
        for first in range(0, len(sizes), _SIZES_AT_ONCE):
            named = sizes[first : first + _SIZES_AT_ONCE]
            any_of = " or ".join(f"armSkuName eq '{size}'" for size in named)
            for row in self._rows(region, "Virtual Machines", f"({any_of})"):
                if row.sku_name.endswith(_BATCH) or row.unit_of_measure != "1 Hour":
                    continue
                if any(word in row.product_name for word in _OTHERS) or row.retail_price <= 0:
                    continue
                key = (str(row.arm_sku_name), row.sku_name.endswith(_SPOT))
                found[key] = max(row.retail_price, found.get(key, 0.0))
        return found

    def disk_usd_h(self, region: str, gib: float) -> float:
        """What a premium SSD costs an hour."""
        number = next((tier for most, tier in _TIERS.items() if gib <= most), 50)
        meter = f"P{number} LRS Disk"
        rows = self._rows(region, "Storage", f"productName eq '{_DISKS}'")
        prices = [row.retail_price for row in rows if row.meter_name == meter]
        if not prices:
            raise self._client.unexpected(f"no {meter} in {region}", "the price of disks")
        return max(prices) / _HOURS_A_MONTH

    def _rows(self, region: str, service: str, more: str) -> list[_Row]:
        asked = (
            f"serviceName eq '{service}' and armRegionName eq '{region}' and "
            f"priceType eq 'Consumption' and {more}"
        )
        with self._lock:
            if asked not in self._known or self._clock() - self._known[asked][0] > _FRESH_S:
                self._known[asked] = (self._clock(), self._read(asked))
            return self._known[asked][1]

    def _read(self, asked: str) -> list[_Row]:
        path, rows = f"{_PATH}?$filter={quote(asked)}", []
        for _ in range(_MOST_PAGES):
            page = self._client.read(_Listed, path)
            if any(row.currency_code != "USD" for row in page.items):
                raise self._client.unexpected("another currency", "the price list")
            rows += page.items
            if not page.next_link:
                return rows
            path = below(page.next_link)
        raise self._client.unexpected(f"more than {_MOST_PAGES} pages", "the price list")
