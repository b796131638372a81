"""What AWS asks for an hour: of its price list, and of the history of spot prices."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import datetime, timezone
from typing import Annotated, Any, Final, TypeAlias

import msgspec

from torpor.control.providers.ec2.client import Ec2Client
from torpor.control.providers.offers import Offer
from torpor.control.providers.rows import offer_rows, unread_offer
from torpor.shared.values import learned

ADDRESS_USD_H: Final = 0.005
"""USD an hour of a public IPv4 address, the same in every region."""
_HOURS_A_MONTH: Final = 730
_FRESH_S: Final = 6 * 3600.0  # AWS changes its price list some times a week
_TYPES_AT_ONCE: Final = 100
_LINUX: Final = {
    "operatingSystem": "Linux", "tenancy": "Shared", "preInstalledSw": "NA",
    "capacitystatus": "Used", "locationType": "AWS Region",
}  # fmt: skip


class _Dimension(msgspec.Struct, rename="camel"):
    price_per_unit: dict[str, str]


class _Term(msgspec.Struct, rename="camel"):
    price_dimensions: dict[str, _Dimension]


class _Terms(msgspec.Struct, rename={"on_demand": "OnDemand"}):
    on_demand: dict[str, _Term] = {}


class _Product(msgspec.Struct):
    attributes: dict[str, str]


class _Listed(msgspec.Struct):
    product: _Product
    terms: _Terms


class _Products(msgspec.Struct, rename="pascal"):
    price_list: list[Any]
    next_token: str = ""


class _Spot(msgspec.Struct, rename="pascal"):
    instance_type: str
    availability_zone: str
    spot_price: Annotated[str, msgspec.Meta(pattern=r"^\d+(\.\d+)?$")]
    timestamp: datetime


class _SpotPage(msgspec.Struct, rename="pascal"):
    spot_price_history: list[Any]
    next_token: str = ""


_Prices: TypeAlias = tuple[dict[str, float], list[Offer]]


class Ec2Prices:
    """Prices in dollars an hour, of one region. Thread-safe."""

    def __init__(self, client: Ec2Client, clock: Callable[[], float] = time.time) -> None:
        self._client, self._clock = client, clock
        self._lock = threading.Lock()
        self._known: dict[str, tuple[float, _Prices]] = {}

    def on_demand(self, types: Sequence[str]) -> _Prices:
        """The price on demand of each instance type: of ``types``, or, if that is empty, of all
        that have a GPU. Also an offer for each price that cannot be read."""
        if not types:
            return self._listed("instanceFamily", "GPU instance", **_LINUX)
        found = [self._listed("instanceType", name, **_LINUX) for name in types]
        prices = {name: price for listed, _ in found for name, price in listed.items()}
        return prices, [offer for _, unread in found for offer in unread]

    def spot(self, types: Iterable[str]) -> tuple[dict[tuple[str, str], float], list[Offer]]:
        """The spot price of each instance type and zone, and an offer for each that cannot be
        read."""
        newest: dict[tuple[str, str], _Spot] = {}
        rows, unread = self._history(sorted(types), self._clock())
        for row in rows:
            key = (row.instance_type, row.availability_zone)
            if key not in newest or newest[key].timestamp < row.timestamp:
                newest[key] = row
        return {key: float(row.spot_price) for key, row in newest.items()}, unread

    def rise(self, kind: str, zone: str, begin_unix: float, end_unix: float) -> float:
        """How much higher the mean spot price of that time was than the one at its begin."""
        held: dict[float, float] = {}  # each price by the time from which it holds
        found, unread = self._history([kind], begin_unix)
        if unread:  # the unread price may be of this zone and time
            raise self._client.unexpected(unread[0].unread, "price history")
        rows = [row for row in found if row.availability_zone == zone]
        for row in sorted(rows, key=lambda row: row.timestamp):
            held[max(begin_unix, row.timestamp.timestamp())] = float(row.spot_price)
        if not held:
            raise self._client.unexpected(f"no spot price of {kind} in {zone}", "price history")
        changes = [(since, usd_h) for since, usd_h in held.items() if since < end_unix]
        first = changes[0][1] if changes else 0.0
        ends = [*(since for since, _ in changes[1:]), end_unix]
        rises = (
            (usd_h - first) * (end - since)
            for (since, usd_h), end in zip(changes, ends, strict=False)
        )
        return sum(rises) / max(end_unix - begin_unix, 1.0)

    def _history(self, types: Sequence[str], since_unix: float) -> tuple[list[_Spot], list[Offer]]:
        """The spot prices since then, and those that held at that time, which AWS shows, too."""
        return offer_rows(self._client.identity, _Spot, self._spot_rows(types, since_unix))

    def _spot_rows(self, types: Sequence[str], since_unix: float) -> Iterator[object]:
        for first in range(0, len(types), _TYPES_AT_ONCE):
            pages = self._client.pages(
                _SpotPage,
                "describe_spot_price_history",
                InstanceTypes=types[first : first + _TYPES_AT_ONCE],
                ProductDescriptions=["Linux/UNIX"],
                StartTime=datetime.fromtimestamp(since_unix, timezone.utc),
            )
            yield from (row for page in pages for row in page.spot_price_history)

    def disk_usd_h(self, gib: float) -> float:
        """The price of a gp3 volume, with the throughput that comes with it."""
        months, _ = self._listed("volumeApiName", "gp3", productFamily="Storage")
        if not months:
            raise self._client.unexpected("no price of a gp3 volume", "the price list")
        return gib * max(months.values()) / _HOURS_A_MONTH

    def _listed(self, field: str, value: str, **more: str) -> _Prices:
        """The price of each instance type or volume type; the higher one where two are listed."""
        with self._lock:
            if value in self._known and self._clock() - self._known[value][0] < _FRESH_S:
                return self._known[value][1]
            fields = {field: value, **more, "regionCode": self._client.region}
            filters: list[dict[str, Any]] = [
                {"Type": "TERM_MATCH", "Field": name, "Value": text}
                for name, text in fields.items()
            ]
            pages = self._client.pages(
                _Products, "get_products", service="pricing",
                ServiceCode="AmazonEC2", Filters=filters,
            )  # fmt: skip
            found: dict[str, float] = {}
            unread: list[Offer] = []
            for text in (text for page in pages for text in page.price_list):
                try:
                    name, usd = _price(str(text))
                except (msgspec.DecodeError, ValueError) as cause:
                    unread.append(unread_offer(self._client.identity, value, str(cause)))
                    continue
                if name and usd > 0:
                    found[name] = max(usd, found.get(name, 0.0))
            self._known[value] = (self._clock(), (found, unread))
            return found, unread


def _price(text: str) -> tuple[str, float]:
    """The name of a product, and its price; DecodeError or ValueError where either is malformed."""
    listed = msgspec.json.decode(text, type=learned(_Listed))
    terms = listed.terms.on_demand.values()
    dimensions = [d for term in terms for d in term.price_dimensions.values()]
    prices = [float(d.price_per_unit.get("USD", 0)) for d in dimensions]
    attributes = listed.product.attributes
    name = attributes.get("instanceType") or attributes.get("volumeApiName") or ""
    return name, max(prices, default=0.0)
