"""What Azure sells in the regions of a provider block: sizes of machines, on demand and spot.

Azure does not say which GPU a size has, so the family of the size does. A family that is not in the
table is not on sale, nor is one whose sizes are parts of a GPU: Azure counts such a part as one.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import Any, Final

import msgspec

from torpor.control.providers.azure.client import AzureClient
from torpor.control.providers.azure.image import AzureImages, Image
from torpor.control.providers.azure.prices import ADDRESS_USD_H, MOST_DISK_GIB, AzurePrices, Prices
from torpor.control.providers.gpus import GpuModel
from torpor.control.providers.offers import Offer
from torpor.control.providers.rows import offer_rows
from torpor.shared.errors import CreateFailed
from torpor.shared.values import Want

_SKUS: Final = "2021-07-01"
_USAGES: Final = "2024-07-01"
_GPUS: Final = "Standard_N"
"""How the names of all sizes with GPUs begin, also of sizes for which Azure states no GPU."""
_SPOT_QUOTA: Final = "lowprioritycores"
FAMILIES: Final = {
    "standardncasv3_t4family": GpuModel("T4", "", 16),
    "standardncadsa10v4family": GpuModel("A10", "", 24),
    "standardncadsa100v4family": GpuModel("A100", "PCIe", 80),
    "standardndasv4_a100family": GpuModel("A100", "SXM", 40),
    "standardndamsv4_a100family": GpuModel("A100", "SXM", 80),
    "standardncadsh100v5family": GpuModel("H100", "NVL", 94),
    "standardndsh100v5family": GpuModel("H100", "SXM", 80),
    "standardndisrh200v5family": GpuModel("H200", "SXM", 141),
}
"""The GPU of each family, by Azure's name of the family in lower case and without blanks, because
Azure writes it in several ways. NVadsA10v5 is missing: its sizes are parts of GPUs, for which the
default image has no driver."""


class _Capability(msgspec.Struct):
    name: str
    value: str


class _Restriction(msgspec.Struct, rename="camel"):
    type: str


class _Sku(msgspec.Struct, rename="camel"):
    resource_type: str
    name: str
    family: str | None = None
    locations: list[str] | None = None
    capabilities: list[_Capability] | None = None
    restrictions: list[_Restriction] | None = None

    def says(self, name: str) -> str:
        return next((told.value for told in self.capabilities or () if told.name == name), "")

    def fits(self, region: str) -> bool:
        """Whether Azure rents this size to this subscription in the region, and it runs images for
        x64."""
        refused = any(limit.type == "Location" for limit in self.restrictions or ())
        there = region in map(str.lower, self.locations or ()) and not refused
        arm = self.says("CpuArchitectureType") == "Arm64"
        return there and not arm and self.resource_type == "virtualMachines"


class _Named(msgspec.Struct):
    value: str


class _Usage(msgspec.Struct, rename="camel"):
    name: _Named
    current_value: float
    limit: float


class _Ware(msgspec.Struct):
    """One size in one region. ``gpu`` is None where it has none."""

    sku: _Sku
    region: str
    gpu: GpuModel | None
    image: Image


class AzureOffers:
    """``sizes``: those to sell, also without a GPU; empty: all of the families in the table."""

    def __init__(
        self,
        client: AzureClient,
        images: AzureImages,
        prices: AzurePrices,
        regions: Sequence[str],
        sizes: Sequence[str],
    ) -> None:
        self._client, self._images, self._prices = client, images, prices
        self._regions, self._sizes = list(regions), list(sizes)

    def found(self, want: Want) -> list[Offer]:
        return [
            offer
            for region in self._regions
            if not want.regions or region in want.regions
            for offer in self._in(region, want)
        ]

    def quotas(self, region: str) -> list[str]:
        """The quotas of GPUs and of spot machines that are not 0. They are 0 in a new
        subscription."""
        path = f"/providers/Microsoft.Compute/locations/{region}/usages"
        rows = self._client.pages(_Usage, self._client.at(path, _USAGES))
        named = [
            f"{row.name.value} {row.current_value:.0f} of {row.limit:.0f} vCPUs"
            for row in rows
            if row.limit > 0 and _plain(row.name.value) in (*FAMILIES, _SPOT_QUOTA)
        ]
        return [f"quotas in {region}: {', '.join(named) or 'no GPU'}"]

    def _in(self, region: str, want: Want) -> list[Offer]:
        asked = f"&$filter=location%20eq%20'{region}'"
        path = self._client.at("/providers/Microsoft.Compute/skus", _SKUS, asked)
        rows = self._client.pages(Any, path)
        skus, unread = offer_rows(self._client.identity, _Sku, rows)
        wares = list(self._wares(region, want, skus))
        if not wares:
            return unread
        prices = self._prices.machines(region, [ware.sku.name for ware in wares])
        spots = {"never": [False], "only": [True]}.get(want.spot, [False, True])
        return unread + [
            self._offer(want, ware, prices, spot)
            for ware in wares
            for spot in spots
            if (ware.sku.name, spot) in prices
            and (not spot or ware.sku.says("LowPriorityCapable") == "True")
        ]

    def _wares(self, region: str, want: Want, skus: Sequence[_Sku]) -> Iterator[_Ware]:
        image = self._images.image(region, want.image)
        for sku in skus:
            gpu = FAMILIES.get(_plain(sku.family or "")) if sku.says("GPUs") else None
            sold = sku.name in self._sizes if self._sizes else gpu is not None
            if sold and sku.fits(region) and (gpu is not None or not sku.name.startswith(_GPUS)):
                yield _Ware(sku, region, gpu, image)

    def _offer(self, want: Want, ware: _Ware, prices: Prices, spot: bool) -> Offer:
        sku, image = ware.sku, ware.image
        name = f"{sku.name}/{ware.region}" + ("/spot" if spot else "")
        beside_usd_h = self.beside_usd_h(ware.region, image.gib + want.disk_gib)
        on_demand_usd_h = None
        if spot and (sku.name, False) in prices:
            on_demand_usd_h = prices[sku.name, False] + beside_usd_h
        most_usd_h = on_demand_usd_h  # Azure never asks for more
        # then the user's limit is the limit of the request
        if spot and want.max_price_usd_h is not None:
            most_usd_h = min(most_usd_h or want.max_price_usd_h, want.max_price_usd_h)
        return Offer(
            id=name,
            provider=self._client.identity,
            gpu=ware.gpu,
            gpu_count=int(sku.says("GPUs")) if ware.gpu is not None else 0,
            price_usd_h=prices[sku.name, spot] + beside_usd_h,
            region=ware.region,
            disk_gib=MOST_DISK_GIB - image.gib,
            image_gib=image.gib,
            domain=name,
            priced_unix=time.time(),
            spot=spot,
            most_usd_h=most_usd_h,
            on_demand_usd_h=on_demand_usd_h,
            ram_gib=float(sku.says("MemoryGB") or 0) or None,
            cores=float(sku.says("vCPUs") or 0) or None,
        )

    def beside_usd_h(self, region: str, disk_gib: float) -> float:
        """What disk and address cost an hour."""
        return self._prices.disk_usd_h(region, disk_gib) + ADDRESS_USD_H


def offer_parts(offer: str) -> tuple[str, str, bool]:
    """The size, the region, and whether the offer is spot."""
    size, _, rest = offer.partition("/")
    region, _, market = rest.partition("/")
    if not size or not region or market not in ("", "spot"):
        raise CreateFailed(f"{offer!r} is no offer of Azure")
    return size, region, market == "spot"


def _plain(family: str) -> str:
    return family.lower().replace(" ", "")
