"""The table of offers. Its short view has what a wake would try, its long one what all markets
sell."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from torpor.control.compare.choices import OfferChoice, Terms, choice_of
from torpor.control.compare.experience import RentalHistory
from torpor.control.providers.provider import Provider
from torpor.control.rental.search import OfferOutcome, Offers
from torpor.control.reports import Row, WorkspaceReport, without
from torpor.shared.values import MachineId

MOST_SHOWN: Final = 50
"""Offers in the table that fit, and as many that do not."""


class OffersReport(WorkspaceReport, frozen=True):
    """``fitting``: best first. ``refused``: the other offers, and providers that sold nothing.
    ``snapshot``: empty if the workspace has none. ``awake``: machines on which it is already.
    ``hours``: of a session, in the long view; 0 in the short one. ``unread``: why each record that
    is left out cannot be trusted. ``max_price_usd_h``: the workspace's limit."""

    snapshot: str
    fitting: list[OfferChoice]
    refused: list[OfferOutcome]
    awake: list[MachineId]
    ranked: bool = False  # whether sorted by whether frozen programs can go on
    hours: float = 0.0
    unread: tuple[str, ...] = ()
    max_price_usd_h: float | None = None

    def title(self) -> str:
        of = f"snapshot {self.snapshot} of " if self.snapshot else ""
        awake = f"; it is awake on {', '.join(self.awake)}" if self.awake else ""
        fit = "1 offer fits" if len(self.fitting) == 1 else f"{len(self.fitting)} offers fit"
        return (
            f"{fit} {of}workspace {self.workspace}, "
            f"{len(self.refused)} do not{awake}. Nothing was rented{without(self.unread)}"
        )

    def rows(self) -> list[Row]:
        fitting = [self._row(choice) for choice in self.fitting[:MOST_SHOWN]]
        columns = fitting[0] if fitting else {}
        empty = dict.fromkeys(columns, "")
        lacks = [{"market": "not counted", "outcome": why} for why in self.unread]
        others = [*lacks[:MOST_SHOWN], *(tried.row() for tried in self.refused[:MOST_SHOWN])]
        return [*fitting, *({**empty, **row} for row in others)]

    def _row(self, choice: OfferChoice) -> Row:
        offer = choice.offer
        fits = "fits, spot" if offer.spot else "fits"
        row = {
            "market": choice.market,
            "GPU": choice.gpu,
            "$/h": f"{offer.bound_usd_h:.3f}",
            "ready after": _begins(choice),
            "outcome": "; ".join([fits, *([choice.prospect.words] if self.ranked else [])]),
            "$ a day": f"{offer.bound_usd_h * 24:.2f}",
            "region": offer.region,
            "reliability": "" if offer.reliability is None else f"{offer.reliability:.3f}",
            "offer": offer.id,
            "provider": offer.provider,
        }
        return row | self._long(choice) if self.hours else row

    def _long(self, choice: OfferChoice) -> Row:
        return {
            f"$ for {self.hours:g} h": _usd(choice.session_usd),
            "our failures": f"{choice.failed} of {choice.attempts}",
            "checkpoint": choice.checkpoint,
            "$ a month hibernated": _usd(choice.hibernated_usd_month),
            "a stop keeps": _stop_keeps(choice),
            "host key": choice.able.host_key,
        }


def offered(
    offers: Offers, providers: Sequence[Provider], past: RentalHistory, terms: Terms
) -> list[OfferChoice]:
    """The fitting offers in their order, with what ``past`` rentals say of each one's start."""
    able = {provider.identity: provider.abilities for provider in providers}
    return [
        choice_of(offer, able[offer.provider], past.of(offer), terms, past.canaries.of(offer))
        for offer in offers.fitting
    ]


def _begins(choice: OfferChoice) -> str:
    """Seconds until SSH answers and the snapshot is restored. Without an earlier rental there, the
    start counts with the most time that an attempt may take."""
    most = "" if choice.starts else "at most "
    if choice.work_s is not None:
        return f"{most}{choice.work_s:.0f} s"
    return f"{most}{choice.start_p50_s:.0f} s and the restore"


def _usd(usd: float | None) -> str:
    return "not known" if usd is None else f"{usd:,.2f}"


def _stop_keeps(choice: OfferChoice) -> str:
    """What a machine keeps when its market stops it, and what that costs."""
    if choice.able.stop_keeps == "nothing":
        return "nothing"
    usd = choice.stopped_usd_month
    price = "price not stated" if usd is None else f"{usd:,.2f} $ a month"
    return f"{choice.able.stop_keeps}, {price}"
