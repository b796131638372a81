"""What could be rented, without renting it: the offers that a wake would try, or those of all
markets."""

from __future__ import annotations

from typing import Literal

from tasks.canaries import read_canaries
from tasks.comparison import ask_markets, choose_terms, read_past, terms_of
from tasks.machines import fitting_offers, machines_of
from tasks.restore import NEWEST, snapshot_to_wake
from tasks.spending import warn_of
from tasks.workspace import OpenWorkspace
from torpor.control.compare.choices import OfferComparison
from torpor.control.compare.experience import RentalHistory
from torpor.control.compare.offers import OffersReport, offered
from torpor.control.money.costs import read
from torpor.control.rental.prospects import matters
from torpor.control.rental.search import OfferOutcome
from torpor.control.store.manifests import newest_snapshot
from torpor.control.store.records import Unread

_HOURS = 24.0


def offers_for(opened: OpenWorkspace, snapshot: str = NEWEST, count: int = 1) -> OffersReport:
    """The offers that a wake of that snapshot would try, after the checks of a wake; NoOffer or
    BudgetExceeded if there is none. Where the workspace has no snapshot, what `create` would try.
    ``count``: how many machines are rented at once.
    """
    name = opened.spec.name
    wanted = snapshot
    if snapshot not in ("", NEWEST) or newest_snapshot(opened.store, name):
        found, opened = snapshot_to_wake(opened, snapshot)
        wanted = found.snapshot
    terms = terms_of(opened, wanted, _HOURS, opened.spec.want.spot)
    offers = fitting_offers(opened, count)
    unread: Unread = {}
    past = RentalHistory(read([opened.rentals], unread=unread), canaries=read_canaries(opened))
    warn_of(unread)
    return OffersReport(
        name,
        terms.snapshot,
        offered(offers, opened.providers, past, terms),
        offers.refused,
        [machine.id for machine, _ in machines_of(opened).machines],
        bool(offers.because),
        max_price_usd_h=opened.spec.want.max_price_usd_h,
    )


def offers_everywhere(
    opened: OpenWorkspace,
    snapshot: str,
    hours: float,
    spot: Literal["never", "allowed", "only"],
    everywhere: bool,
) -> tuple[OffersReport, OfferComparison]:
    """What the markets sell that a wake of that snapshot could use, by the expected cost of so many
    ``hours``, and the same as a table in the long view. ``everywhere``: not only at the providers
    of the workspace. The rentals of the whole store count."""
    terms = choose_terms(opened, snapshot, hours, spot)
    past, unread = read_past(opened, terms)
    found = ask_markets(opened, terms, past, everywhere)
    rejected = [OfferOutcome.of(choice.offer, choice.rejected) for choice in found.rejected]
    report = OffersReport(
        opened.spec.name,
        terms.snapshot,
        found.fitting,
        [*found.silent, *rejected],
        [],
        matters(terms.want),
        hours,
        tuple(str(why) for why in unread.values()),
    )
    return report, found
