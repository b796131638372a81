"""What providers sell, and why an offer does not fit a workspace."""

from __future__ import annotations

import msgspec

from torpor.control.providers.gpu_wishes import wishes_of
from torpor.control.providers.gpus import GpuModel
from torpor.shared.errors import (
    MachineUnread,
    NoCapacity,
    OrderUnpaid,
    ProviderDenied,
    QuotaReached,
    TorporError,
)
from torpor.shared.values import Want


class Offer(msgspec.Struct, frozen=True, kw_only=True):
    """One thing on sale at a provider. Fields that the provider does not state are None."""

    id: str
    provider: str
    gpu: GpuModel | None  # None: no GPU
    gpu_count: int
    price_usd_h: float  # for everything: machine, the wanted disk, address; for spot, with the bid
    region: str
    disk_gib: float  # the most that it can have
    image_gib: float = 0.0  # what the image takes of the disk besides
    domain: str  # the failure domain: where this one is sold out, all of the same domain are
    priced_unix: float  # when the price was read
    spot: bool = False
    bid_usd_h: float | None = None  # for spot where the market bills the bid: the part to bid
    most_usd_h: float | None = None  # for spot whose price changes while it runs: the most it costs
    on_demand_usd_h: float | None = None  # for spot: what the same machine costs on demand
    available: bool | None = None
    reliability: float | None = None  # 0 to 1
    many_owners: bool = False
    """Whether the host belongs to one of many owners. Without a stated reliability nothing is known
    of such a host; a data centre that states none counts as reliable."""
    architecture: str = "x86_64"
    cuda: tuple[int, int] | None = None  # the newest CUDA version that its driver supports
    driver: tuple[int, ...] | None = None  # NVIDIA's
    ram_gib: float | None = None
    cores: float | None = None
    link_mbit_s: float | None = None  # downwards
    traffic_usd_gib: float = 0.0
    unread: str = ""  # why its row in the market's answer cannot be read; such an offer fits nobody

    @property
    def bound_usd_h(self) -> float:
        """What an hour costs at most."""
        return max(self.price_usd_h, self.most_usd_h or 0.0)


def misfit(offer: Offer, want: Want) -> str:
    """Why ``offer`` does not fit, for a person; empty where it does."""
    if offer.unread:
        return offer.unread
    reasons = [wish.misfit(offer.gpu, offer.gpu_count) for wish in wishes_of(want)]
    if reasons and all(reasons):
        return "; ".join(dict.fromkeys(reasons))
    if offer.available is False:
        return "it is sold out"
    if offer.disk_gib < want.disk_gib:
        return f"its disk is {offer.disk_gib:.4g} GiB, {want.disk_gib:.4g} GiB are wanted"
    if want.max_price_usd_h is not None and offer.price_usd_h > want.max_price_usd_h:
        return f"it costs {offer.price_usd_h:.4g} $/h, the limit is {want.max_price_usd_h:.4g} $/h"
    if want.agreed_usd_h is not None and offer.bound_usd_h > want.agreed_usd_h:
        return (
            f"it may come to {offer.bound_usd_h:.4g} $/h, and {want.agreed_usd_h:.4g} $/h were "
            "agreed to: ask again"
        )
    if want.regions and offer.region not in want.regions:
        return f"it is in {offer.region}, not in {' or '.join(want.regions)}"
    if offer.spot and want.spot == "never":
        return "it is a spot machine"
    if not offer.spot and want.spot == "only":
        return "it is no spot machine"
    if offer.reliability is not None and offer.reliability < want.min_reliability:
        return f"its reliability is {offer.reliability:.3g}, {want.min_reliability:.3g} is wanted"
    if offer.reliability is None and offer.many_owners and want.min_reliability > 0:
        return f"its host states no reliability, {want.min_reliability:.3g} is wanted"
    if want.architecture and offer.architecture != want.architecture:
        return f"its processor is {offer.architecture}, {want.architecture} is wanted"
    cuda = want.least_cuda
    if cuda is not None and offer.cuda is not None and offer.cuda < cuda:
        return f"its driver supports CUDA {dotted(offer.cuda)}, {dotted(cuda)} is wanted"
    if want.unknown_driver and offer.driver is None:
        return f"it does not state its driver, {dotted(want.driver or (), 2)} is wanted"
    if want.driver is not None and offer.driver is not None and _older(offer.driver, want.driver):
        return f"its driver is {dotted(offer.driver, 2)}, {dotted(want.driver, 2)} is wanted"
    return ""


def preference(offer: Offer, want: Want) -> int:
    """The position, among the wanted GPUs, of the first one that a fitting offer has."""
    wishes = enumerate(wishes_of(want))
    return next((place for place, wish in wishes if not wish.misfit(offer.gpu, offer.gpu_count)), 0)


def wanting_only(want: Want, place: int) -> Want:
    """``want`` with only the GPU at that position of its preferences."""
    wishes = wishes_of(want)
    if not wishes:
        return want
    return msgspec.structs.replace(
        want, gpu=wishes[place].text, gpu_count=max(wishes[place].count, 1)
    )


def asked(want: Want) -> list[Want]:
    """The requests to a market: one for each number of GPUs, with the models of that number.
    InvalidInput where the GPU is not understood."""
    names: dict[int, list[str]] = {}
    for wish in wishes_of(want):
        names.setdefault(max(wish.count, 1), []).append(wish.text)
    return [
        msgspec.structs.replace(want, gpu=", ".join(texts), gpu_count=count)
        for count, texts in names.items()
    ] or [want]


def blocks(error: TorporError, failed: Offer, other: Offer) -> bool:
    """Whether ``error``, which creating ``failed`` raised, holds for ``other`` too."""
    if failed.provider != other.provider:
        return False
    if isinstance(error, (ProviderDenied, OrderUnpaid, MachineUnread)):
        return True
    if isinstance(error, QuotaReached):
        same = (failed.region, failed.spot) == (other.region, other.spot)
        return same and failed.gpu == other.gpu
    return isinstance(error, NoCapacity) and failed.domain == other.domain


def _older(version: tuple[int, ...], wanted: tuple[int, ...]) -> bool:
    """Whether a version is older than another, by the parts that both state."""
    return version[: len(wanted)] < wanted[: len(version)]


def dotted(version: tuple[int, ...], digits: int = 1) -> str:
    """A version for people, such as 12.4; each part has at least ``digits`` digits."""
    return ".".join(f"{part:0{digits}}" for part in version)
