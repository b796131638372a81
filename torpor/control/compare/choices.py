"""One row for each offer: what it costs, when work can begin there, and what the market can do."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, Final

import msgspec

from torpor.control.compare.experience import Experience, RentalHistory
from torpor.control.providers.offers import Offer, misfit
from torpor.control.providers.provider import Abilities, Provider
from torpor.control.rental.canaries import Canary
from torpor.control.rental.prospects import COUNTS, Prospect, checkpoint, matters, prospect
from torpor.control.rental.search import OfferOutcome, billed_s, expected, refusal
from torpor.control.store_prices import StorePrice
from torpor.shared.values import GIB, Want

if TYPE_CHECKING:
    import pandas


LIVE: Final = "live API"
_GB: Final = 1e9


class Terms(msgspec.Struct, frozen=True, kw_only=True):
    """What is to be rented, for how long, and what is restored there."""

    want: Want
    hours: float
    now_unix: float
    snapshot: str = ""  # empty: the workspace has no snapshot
    stored_bytes: int = 0  # of the snapshot
    store_price: StorePrice | None = None
    sealed: bool = False

    @property
    def hibernated_usd_month(self) -> float | None:
        """What the store costs for the snapshot each month, in USD; None if its price is
        unknown."""
        if self.store_price is None:
            return None
        return self.stored_bytes / _GB * self.store_price.gb_month_usd


class OfferChoice(msgspec.Struct, frozen=True, kw_only=True):
    """One offer under the terms. None: not known."""

    offer: Offer
    able: Abilities
    session_usd: float | None  # None: the offer has no price
    expected_usd: float | None
    hibernated_usd_month: float | None
    stopped_usd_month: float | None
    start_p50_s: float
    start_p90_s: float
    starts: int  # how many rentals the start times come from; 0: assumed
    link_mb_s: float | None
    link_from: str
    restore_s: float | None
    failed: int
    attempts: int
    past_of: str
    price_age_s: float
    checkpoint: str  # "no", "claimed", "unknown", or "proven" with the day of the test
    prospect: Prospect  # whether frozen programs can go on there
    rejected: str = ""  # the reason; empty: it fits

    @property
    def market(self) -> str:
        return market_of(self.offer.provider)

    @property
    def gpu(self) -> str:
        return f"{self.offer.gpu_count} x {self.offer.gpu}" if self.offer.gpu else "no GPU"

    @property
    def vram_gib(self) -> float | None:
        """The memory of each GPU."""
        return (self.offer.gpu.vram_gib or None) if self.offer.gpu else None

    @property
    def work_s(self) -> float | None:
        """Seconds from the request until work can begin."""
        return None if self.restore_s is None else self.start_p50_s + self.restore_s

    @property
    def weighed_usd(self) -> float | None:
        """The expected cost, with an addition where processes may not go on; None if unknown."""
        return (
            None if self.expected_usd is None else self.expected_usd * COUNTS[self.prospect.level]
        )


COLUMNS: Final[dict[str, Callable[[OfferChoice], Any]]] = {
    "market": lambda choice: choice.market,
    "provider": lambda choice: choice.offer.provider,
    "offer": lambda choice: choice.offer.id,
    "region": lambda choice: choice.offer.region,
    "gpu": lambda choice: str(choice.offer.gpu or ""),
    "gpu_count": lambda choice: choice.offer.gpu_count,
    "vram_gib": lambda choice: choice.vram_gib,
    "cores": lambda choice: choice.offer.cores,
    "ram_gib": lambda choice: choice.offer.ram_gib,
    "spot": lambda choice: choice.offer.spot,
    "price_usd_h": lambda choice: choice.offer.price_usd_h or None,
    "session_usd": lambda choice: choice.session_usd,
    "expected_usd": lambda choice: choice.expected_usd,
    "hibernated_usd_month": lambda choice: choice.hibernated_usd_month,
    "stopped_usd_month": lambda choice: choice.stopped_usd_month,
    "stop_keeps": lambda choice: choice.able.stop_keeps,
    "billing_s": lambda choice: choice.able.billing_s,
    "ending_s": lambda choice: choice.able.ending_s,
    "start_p50_s": lambda choice: choice.start_p50_s,
    "start_p90_s": lambda choice: choice.start_p90_s,
    "starts": lambda choice: choice.starts,
    "start_from": lambda choice: "our rentals" if choice.starts else "assumed",
    "link_mb_s": lambda choice: choice.link_mb_s,
    "link_from": lambda choice: choice.link_from,
    "restore_s": lambda choice: choice.restore_s,
    "work_s": lambda choice: choice.work_s,
    "failures": lambda choice: choice.failed,
    "attempts": lambda choice: choice.attempts,
    "attempts_at": lambda choice: choice.past_of,
    "reliability": lambda choice: choice.offer.reliability,
    "many_owners": lambda choice: choice.offer.many_owners,
    "checkpoint": lambda choice: choice.checkpoint,
    "checkpoint_why": lambda choice: choice.prospect.words,
    "host_key": lambda choice: choice.able.host_key,
    "notice_s": lambda choice: choice.able.notice_s if choice.offer.spot else None,
    "price_age_s": lambda choice: choice.price_age_s,
    "price_source": lambda choice: LIVE,
    "rejected": lambda choice: choice.rejected,
}
"""The columns of the DataFrame, in dollars, seconds, GiB and MB/s; None where a value is not
known."""


class OfferComparison(msgspec.Struct, frozen=True):
    """``fitting``: the lowest expected cost first, or the lowest ``weighed_usd`` where the snapshot
    holds frozen programs or they must be frozen. ``silent``: providers without an answer."""

    terms: Terms
    fitting: list[OfferChoice]
    rejected: list[OfferChoice]
    silent: list[OfferOutcome]


def compared(
    sold: Iterable[tuple[Provider, Sequence[Offer]]],
    silent: Sequence[OfferOutcome],
    past: RentalHistory,
    terms: Terms,
) -> OfferComparison:
    """All offers under the terms."""
    found = [
        choice_of(offer, provider.abilities, past.of(offer), terms, past.canaries.of(offer))
        for provider, offers in sold
        for offer in offers
    ]
    found.sort(key=_rank)
    if matters(terms.want):
        found.sort(key=lambda choice: known(choice.weighed_usd))
    fitting = [choice for choice in found if not choice.rejected]
    return OfferComparison(
        terms, fitting, [choice for choice in found if choice.rejected], [*silent]
    )


def choice_of(
    offer: Offer,
    able: Abilities,
    past: Sequence[Experience],
    terms: Terms,
    canary: Canary | None = None,
) -> OfferChoice:
    """One offer under the terms; ``past``: our rentals' experience, the closest first."""
    seen = prospect(offer, able, canary, terms.want)
    session = _session_usd(offer, able, terms)
    started = next((experience for experience in past if experience.starts_s), None)
    fetched = next((experience for experience in past if experience.links_mb_s), None)
    tried = next((experience for experience in past if experience.attempts), Experience(of=""))
    link = _stated_mb_s(offer) if fetched is None else fetched.link_mb_s
    disk_gib = max(terms.want.disk_gib, able.min_disk_gib) + offer.image_gib
    stopped = able.stopped_usd_gib_month if able.stop_keeps != "nothing" else None
    restore_s = terms.stored_bytes / 1e6 / link if link else None
    return OfferChoice(
        offer=offer,
        able=able,
        session_usd=session,
        expected_usd=None if session is None else expected(session, offer),
        hibernated_usd_month=terms.hibernated_usd_month,
        stopped_usd_month=None if stopped is None else stopped * disk_gib,
        start_p50_s=_start_s(started, 0.5, able),
        start_p90_s=_start_s(started, 0.9, able),
        starts=0 if started is None else len(started.starts_s),
        link_mb_s=link,
        link_from=_link_from(fetched, link),
        restore_s=restore_s if terms.stored_bytes else 0.0,
        failed=tried.failed,
        attempts=tried.attempts,
        past_of=tried.of,
        price_age_s=max(0.0, terms.now_unix - offer.priced_unix),
        checkpoint=checkpoint(offer, able, canary),
        prospect=seen,
        rejected=misfit(offer, terms.want) or refusal(seen, terms.want),
    )


def frame(found: OfferComparison) -> pandas.DataFrame:
    """Every offer, those that fit first; ``rejected`` is the reason of the others."""
    import pandas  # importing it takes a second, which other flows need not spend

    every = (*found.fitting, *found.rejected)
    return pandas.DataFrame(
        {name: [of(choice) for choice in every] for name, of in COLUMNS.items()}
    )


def market_of(provider: str) -> str:
    """The market of an account."""
    return provider.partition("://")[0]


def _session_usd(offer: Offer, able: Abilities, terms: Terms) -> float | None:
    """The cost of the session in USD: the hours as the market bills them, and the traffic of one
    restore. A price of 0 counts as unknown, because no market gives machines away."""
    if offer.price_usd_h <= 0:
        return None
    usd = offer.price_usd_h * billed_s(terms.hours, able) / 3600
    usd += offer.traffic_usd_gib * terms.stored_bytes / GIB
    if terms.store_price is not None:
        usd += terms.store_price.egress_gb_usd * terms.stored_bytes / _GB
    return usd


def _start_s(started: Experience | None, share: float, able: Abilities) -> float:
    """Seconds until SSH answers: by our own rentals, or else the most that an attempt may take."""
    measured = None if started is None else started.start_s(share)
    return able.queue_s + able.ready_s if measured is None else measured


def _stated_mb_s(offer: Offer) -> float | None:
    return None if offer.link_mbit_s is None else offer.link_mbit_s / 8


def _link_from(fetched: Experience | None, link_mb_s: float | None) -> str:
    if fetched is not None:
        return f"measured, n = {len(fetched.links_mb_s)}, {fetched.of}"
    return "stated by the market" if link_mb_s else "not known"


def _rank(choice: OfferChoice) -> tuple[float, float, str, str]:
    return (
        known(choice.expected_usd),
        known(choice.work_s),
        choice.offer.provider,
        choice.offer.id,
    )


def known(value: float | None) -> float:
    """The key that sorts unknown values last."""
    return math.inf if value is None else value
