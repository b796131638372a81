"""What EC2 sells in one region: instance types by zone, on demand and spot, with GPU and price."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import Any, Final

import msgspec

from torpor.control.providers.ec2.client import Ec2Client
from torpor.control.providers.ec2.prices import Ec2Prices
from torpor.control.providers.ec2.setup import DLAMI_CUDA, Ec2Setup, Image
from torpor.control.providers.gpus import GpuModel, parse_gpu
from torpor.control.providers.offers import Offer
from torpor.control.providers.rows import offer_rows
from torpor.shared.errors import CreateFailed
from torpor.shared.values import Want

_WITH_GPU: Final = ("g*", "p*")
_VALUES: Final = 200  # values in one filter of a request
_MOST_DISK_GIB: Final = 16384.0
_ARCHITECTURES: Final = {"x86_64": "x86_64", "arm64": "aarch64"}
_NAMES: Final = {"RTX PRO Server 6000": "RTX PRO 6000 Server"}
_BY_FAMILY: Final = {"p5e": "H200", "p5en": "H200"}
"""GPUs that AWS has only called "NVIDIA", by family (skypilot-org/skypilot #4652 and #8465; moto's
list of 2026 says H200)."""
_SXM: Final = frozenset({"A100", "H100", "H200", "B200", "B300"})
"""GPUs that EC2 has only in the SXM form, which EC2 does not say."""
_TOO_OLD: Final = frozenset({"K80", "M60", "V100"})
"""GPUs that NVIDIA's open driver, which is in AWS's image, does not support."""


class _GpuItem(msgspec.Struct, rename="pascal"):
    name: str
    manufacturer: str
    count: int
    memory_info: dict[str, int] = {}
    gpu_partition_size: float = 1.0


class _GpuInfo(msgspec.Struct, rename="pascal"):
    gpus: list[_GpuItem]


class _Cores(msgspec.Struct, rename={"count": "DefaultVCpus"}):
    count: int


class _Memory(msgspec.Struct, rename={"mib": "SizeInMiB"}):
    mib: int


class _Processor(msgspec.Struct, rename="pascal"):
    supported_architectures: list[str]


class _Card(msgspec.Struct, rename="pascal"):
    peak_bandwidth_in_gbps: float | None = None


class _Network(msgspec.Struct, rename="pascal"):
    network_cards: list[_Card] = []


class _Type(msgspec.Struct, rename="pascal"):
    instance_type: str
    v_cpu_info: _Cores
    memory_info: _Memory
    processor_info: _Processor
    supported_usage_classes: list[str]
    network_info: _Network
    gpu_info: _GpuInfo | None = None


class _Types(msgspec.Struct, rename="pascal"):
    instance_types: list[Any]
    next_token: str = ""


class _Offering(msgspec.Struct, rename="pascal"):
    instance_type: str
    location: str


class _Offerings(msgspec.Struct, rename="pascal"):
    instance_type_offerings: list[Any]
    next_token: str = ""


class _Ware(msgspec.Struct):
    """One instance type that a machine of torpor's can have."""

    type: _Type
    gpu: GpuModel | None
    gpu_count: int
    image: Image


class Ec2Offers:
    """``types``: the instance types to sell; empty: all that have an NVIDIA GPU."""

    def __init__(
        self, client: Ec2Client, setup: Ec2Setup, prices: Ec2Prices, types: Sequence[str]
    ) -> None:
        self._client, self._setup, self._prices = client, setup, prices
        self._types = list(types)

    def found(self, want: Want) -> list[Offer]:
        zones = self._setup.network().subnets
        kinds, unread = self._kinds()
        wares = {ware.type.instance_type: ware for ware in self._wares(want, kinds)}
        found, odd_places = self._places(sorted(wares))
        places = [
            (wares[place.instance_type], place.location)
            for place in found
            if place.instance_type in wares and place.location in zones
        ]
        listed, odd_prices = self._prices.on_demand(self._types)
        offers = [*unread, *odd_places, *odd_prices]
        if want.spot != "only":
            offers += [
                self._offer(want, ware, zone, listed[ware.type.instance_type])
                for ware, zone in places
                if ware.type.instance_type in listed
                and "on-demand" in ware.type.supported_usage_classes
            ]
        if want.spot != "never":
            sold = [name for name, ware in wares.items() if _has_spot(ware.type)]
            bids, odd_bids = self._prices.spot(sold)
            offers += odd_bids
            offers += [
                self._offer(
                    want,
                    ware,
                    zone,
                    bids[ware.type.instance_type, zone],
                    listed[ware.type.instance_type],
                )
                for ware, zone in places
                if (ware.type.instance_type, zone) in bids and ware.type.instance_type in listed
            ]
        return offers

    def _kinds(self) -> tuple[list[_Type], list[Offer]]:
        asked = [{"Name": "instance-type", "Values": self._types or list(_WITH_GPU)}]
        pages = self._client.pages(_Types, "describe_instance_types", Filters=asked)
        rows = (row for page in pages for row in page.instance_types)
        return offer_rows(self._client.identity, _Type, rows)

    def _wares(self, want: Want, kinds: Sequence[_Type]) -> Iterator[_Ware]:
        images: dict[str, Image | None] = {}
        default = self._setup.is_default(want.image)
        for kind in kinds:
            item = kind.gpu_info.gpus[0] if kind.gpu_info and kind.gpu_info.gpus else None
            gpu = _gpu(kind.instance_type, item) if item is not None else None
            if item is not None and (gpu is None or (default and gpu.model in _TOO_OLD)):
                continue
            architecture = _architecture(kind)
            if architecture not in images:
                images[architecture] = self._setup.image(want.image, architecture)
            image = images[architecture]
            if image is not None:
                yield _Ware(kind, gpu, item.count if item is not None else 0, image)

    def _places(self, types: Sequence[str]) -> tuple[list[_Offering], list[Offer]]:
        pages = [
            page
            for first in range(0, len(types), _VALUES)
            for page in self._client.pages(
                _Offerings,
                "describe_instance_type_offerings",
                LocationType="availability-zone",
                Filters=[{"Name": "instance-type", "Values": types[first : first + _VALUES]}],
            )
        ]
        rows = (row for page in pages for row in page.instance_type_offerings)
        return offer_rows(self._client.identity, _Offering, rows)

    def _offer(
        self, want: Want, ware: _Ware, zone: str, usd_h: float, most_usd_h: float | None = None
    ) -> Offer:
        """One offer. ``most_usd_h``: for spot, the price on demand, which AWS never exceeds."""
        kind, image, spot = ware.type, ware.image, most_usd_h is not None
        name = f"{kind.instance_type}/{zone}" + ("/spot" if spot else "")
        default = self._setup.is_default(want.image)
        disk_usd_h = self._prices.disk_usd_h(image.gib + want.disk_gib)
        beside_usd_h = disk_usd_h + self._setup.address_usd_h
        on_demand_usd_h = None
        if most_usd_h is not None:
            most_usd_h += beside_usd_h
            on_demand_usd_h = most_usd_h
            # then the user's limit is the limit of the request
            if want.max_price_usd_h is not None:
                most_usd_h = min(most_usd_h, want.max_price_usd_h)
        peaks = [card.peak_bandwidth_in_gbps or 0.0 for card in kind.network_info.network_cards]
        return Offer(
            id=name,
            provider=self._client.identity,
            gpu=ware.gpu,
            gpu_count=ware.gpu_count,
            price_usd_h=usd_h + beside_usd_h,
            region=self._client.region,
            disk_gib=_MOST_DISK_GIB - image.gib,
            image_gib=image.gib,
            domain=name,
            priced_unix=time.time(),
            spot=spot,
            most_usd_h=most_usd_h,
            on_demand_usd_h=on_demand_usd_h,
            architecture=image.architecture,
            cuda=DLAMI_CUDA if default and ware.gpu is not None else None,
            ram_gib=kind.memory_info.mib / 1024,
            cores=kind.v_cpu_info.count,
            link_mbit_s=max(peaks, default=0.0) * 1000 or None,
        )


def offer_parts(offer: str) -> tuple[str, str, bool]:
    """Instance type, zone, and whether it is spot."""
    kind, _, rest = offer.partition("/")
    zone, _, market = rest.partition("/")
    if not kind or not zone or market not in ("", "spot"):
        raise CreateFailed(f"{offer!r} is no offer of EC2")
    return kind, zone, market == "spot"


def _gpu(kind: str, item: _GpuItem) -> GpuModel | None:
    """The GPUs of an instance type; None for a part of a GPU, and for GPUs that are not
    NVIDIA's."""
    # For g6f and gr6f, AWS has stated 1 GPU (SkyPilot's fetch_aws.py) and 0 (moto's list of 2026).
    if item.manufacturer != "NVIDIA" or item.count < 1 or item.gpu_partition_size < 1:
        return None
    vram_gib = item.memory_info.get("SizeInMiB", 0) / 1024
    named = parse_gpu(_NAMES.get(item.name, item.name), vram_gib)
    gpu = named or parse_gpu(_BY_FAMILY.get(kind.partition(".")[0], ""), vram_gib)
    if gpu is not None and gpu.model in _SXM:
        return msgspec.structs.replace(gpu, form="SXM")
    return gpu


def _architecture(kind: _Type) -> str:
    """As ``uname -m`` says it."""
    names = [_ARCHITECTURES[a] for a in kind.processor_info.supported_architectures
             if a in _ARCHITECTURES]  # fmt: skip
    return names[0] if names else "unknown"


def _has_spot(kind: _Type) -> bool:
    return "spot" in kind.supported_usage_classes
