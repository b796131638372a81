"""What GCP sells in the zones of a provider block: machine types with a price, and their GPUs.

Google's list of prices does not say which price is whose. So a machine type is on sale when the
provider block states its price, and no price is guessed.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple, TypeVar

import msgspec

from torpor.control.providers.gcp.client import GcpClient
from torpor.control.providers.gcp.image import DEFAULT_CUDA, GcpImages, Image
from torpor.control.providers.gpus import GpuModel, parse_gpu
from torpor.control.providers.offers import Offer
from torpor.control.providers.rows import offer_rows
from torpor.shared.errors import CreateFailed, InvalidInput
from torpor.shared.values import Want

ADDRESS_USD_H: Final = 0.005
"""USD an hour of a public IPv4 address in use, the same in every region. A spot machine's address
costs half of it."""
_HOURS_A_MONTH: Final = 730
_MOST_DISK_GIB: Final = 65536.0
_ARCHITECTURES: Final = {"X86_64": "x86_64", "ARM64": "aarch64"}
_VRAM_GIB: Final = {"T4": 16, "L4": 24, "P4": 8, "P100": 16, "V100": 16, "A100": 40, "B200": 180,
                    "RTX PRO 6000": 96}  # fmt: skip
"""The memory of GPUs whose names do not state it."""
_FORMS: Final = {"RTX PRO 6000": "Server", "V100": "SXM", "A100": "SXM", "H100": "SXM",
                 "H200": "SXM", "B200": "SXM"}  # fmt: skip
"""The only forms of these GPUs at GCP, which does not state them."""
_TOO_OLD: Final = frozenset({"P4", "P100", "V100"})
"""GPUs that CUDA 13, which the default image's driver brings, does not support."""
_WARE: Final = re.compile(
    r"(?P<type>[a-z][a-z0-9-]{1,62})(?:\+(?P<gpu>[a-z][a-z0-9-]{1,62})x(?P<count>[1-9]\d?))?"
    r"(?:/(?P<where>[a-z][a-z0-9]*-[a-z0-9-]{1,60}))?(?P<spot>/spot)?"
)

_Shape = TypeVar("_Shape", bound=msgspec.Struct)


class Ware(NamedTuple):
    """A machine type, and the GPUs that are attached to it where it has none of its own."""

    type: str
    accelerator: str = ""
    cards: int = 0

    def __str__(self) -> str:
        return f"{self.type}+{self.accelerator}x{self.cards}" if self.cards else self.type


class Priced(NamedTuple):
    """What a price is for. ``where`` is a zone, a region, or empty for all zones."""

    ware: Ware
    where: str
    spot: bool


def priced(text: str) -> Priced:
    """Read the name of a price: ``TYPE`` or ``TYPE+ACCELERATORxCOUNT``, then ``/ZONE`` or
    ``/REGION``, then ``/spot``."""
    found = _WARE.fullmatch(text.strip())
    if found is None:
        raise InvalidInput(
            f"{text!r} is not what a price is for: write a machine type like g2-standard-4 or "
            "n1-standard-8+nvidia-tesla-t4x1, then /us-central1 for one region, then /spot"
        )
    ware = Ware(found["type"], found["gpu"] or "", int(found["count"] or 0))
    return Priced(ware, found["where"] or "", found["spot"] is not None)


class _Accelerator(msgspec.Struct, rename="camel"):
    guest_accelerator_type: str
    guest_accelerator_count: int


class _Type(msgspec.Struct, rename="camel"):
    name: str
    zone: str
    guest_cpus: int
    memory_mb: int
    architecture: str = "X86_64"
    accelerators: list[_Accelerator] = []


class _GpuType(msgspec.Struct, rename="camel"):
    name: str
    zone: str
    maximum_cards_per_instance: int = 0


class GcpOffers:
    """``prices``: dollars an hour by what ``priced`` reads, without the disk."""

    def __init__(
        self,
        client: GcpClient,
        images: GcpImages,
        zones: Sequence[str],
        prices: Mapping[str, float],
        disk_usd_gib_month: float,
    ) -> None:
        self._client, self._images, self._zones = client, images, list(zones)
        self._prices = {priced(name): usd for name, usd in prices.items()}
        self._disk_usd = disk_usd_gib_month

    @property
    def wares(self) -> list[Ware]:
        return list(dict.fromkeys(price.ware for price in self._prices))

    def disk_usd_h(self, gib: float) -> float:
        return gib * self._disk_usd / _HOURS_A_MONTH

    def found(self, want: Want) -> list[Offer]:
        image = self._images.image(want.image)
        markets = {"never": [False], "only": [True]}.get(want.spot, [False, True])
        types, odd_types = self._rows(_Type, "machineTypes", {ware.type for ware in self.wares})
        attached = {ware.accelerator for ware in self.wares if ware.cards}
        gpus, odd_gpus = self._rows(_GpuType, "acceleratorTypes", attached)
        cards = {(row.name, zone_of(row.zone)): row.maximum_cards_per_instance for row in gpus}
        offers = [
            self._offer(want, image, ware, kind, gpu, usd_h, spot=spot)
            for ware, kind, gpu in self._sold(want, image, types, cards)
            for spot in markets
            if (usd_h := self._price(ware, region_of(kind.zone), zone_of(kind.zone), spot))
            is not None
        ]
        return offers + odd_types + odd_gpus

    def _sold(
        self,
        want: Want,
        image: Image,
        types: Sequence[_Type],
        cards: Mapping[tuple[str, str], int],
    ) -> Iterator[tuple[Ware, _Type, GpuModel | None]]:
        """The wares in each zone, as far as the image runs on them. ``cards``: how many of an
        accelerator a machine in a zone may have."""
        default = self._images.is_default(want.image)
        for ware in self.wares:
            for kind in types:
                if kind.name != ware.type or zone_of(kind.zone) not in self._zones:
                    continue
                if _ARCHITECTURES.get(kind.architecture) != image.architecture:
                    continue
                if ware.cards > cards.get((ware.accelerator, zone_of(kind.zone)), 0):
                    continue
                name, _ = _accelerator(ware, kind)
                gpu = _gpu(name)
                if not (default and gpu is not None and gpu.model in _TOO_OLD):
                    yield ware, kind, gpu

    def _rows(
        self, shape: type[_Shape], word: str, names: Iterable[str]
    ) -> tuple[list[_Shape], list[Offer]]:
        """The rows of these names in all zones, and an offer for each that cannot be read."""
        asked = " OR ".join(f'(name = "{name}")' for name in sorted(names))
        rows: list[tuple[str, Any]] = self._client.everywhere(Any, word, asked) if asked else []
        return offer_rows(self._client.identity, shape, (row for _, row in rows))

    def _price(self, ware: Ware, region: str, zone: str, spot: bool) -> float | None:
        """The price of the narrowest place that the block states."""
        for where in (zone, region, ""):
            if (usd_h := self._prices.get(Priced(ware, where, spot))) is not None:
                return usd_h
        return None

    def _offer(
        self,
        want: Want,
        image: Image,
        ware: Ware,
        kind: _Type,
        gpu: GpuModel | None,
        usd_h: float,
        *,
        spot: bool,
    ) -> Offer:
        zone, region = zone_of(kind.zone), region_of(kind.zone)
        name = f"{ware}/{zone}" + ("/spot" if spot else "")
        default = self._images.is_default(want.image)
        beside_usd_h = self.disk_usd_h(image.gib + want.disk_gib) + ADDRESS_USD_H
        on_demand = self._price(ware, region, zone, spot=False) if spot else None
        return Offer(
            id=name,
            provider=self._client.identity,
            gpu=gpu,
            gpu_count=_accelerator(ware, kind)[1] if gpu is not None else 0,
            price_usd_h=usd_h + beside_usd_h,
            on_demand_usd_h=None if on_demand is None else on_demand + beside_usd_h,
            region=region,
            disk_gib=_MOST_DISK_GIB - image.gib,
            image_gib=image.gib,
            domain=name,
            priced_unix=time.time(),
            spot=spot,
            architecture=image.architecture,
            cuda=DEFAULT_CUDA if default and gpu is not None else None,
            ram_gib=kind.memory_mb / 1024,
            cores=kind.guest_cpus,
        )


def offer_parts(offer: str) -> tuple[Ware, str, bool]:
    """The ware, the zone, and whether the offer is spot."""
    try:
        found = priced(offer)
    except InvalidInput:
        found = Priced(Ware(""), "", False)
    if not found.where:
        raise CreateFailed(f"{offer!r} is no offer of GCP")
    return found.ware, found.where, found.spot


def zone_of(link: str) -> str:
    """The last word of a link, such as that of a zone."""
    return link.rsplit("/", 1)[-1]


def region_of(zone: str) -> str:
    return zone_of(zone).rsplit("-", 1)[0]


def _accelerator(ware: Ware, kind: _Type) -> tuple[str, int]:
    """The accelerator and its count. A machine type that has GPUs has one kind of them."""
    if ware.cards:
        return ware.accelerator, ware.cards
    own = kind.accelerators[:1]
    return (own[0].guest_accelerator_type, own[0].guest_accelerator_count) if own else ("", 0)


def _gpu(name: str) -> GpuModel | None:
    gpu = parse_gpu(name)
    if gpu is None:
        return None
    return msgspec.structs.replace(
        gpu,
        form=_FORMS.get(gpu.model, gpu.form),
        vram_gib=gpu.vram_gib or float(_VRAM_GIB.get(gpu.model, 0)),
    )
