"""What a wake would rent, without renting it."""

from __future__ import annotations

from tasks.canaries import read_canaries
from tasks.comparison import choose_terms
from tasks.machines import look_for_offers, renting
from tasks.restore import NEWEST, pick_snapshot_to_wake
from tasks.spending import warn_of
from tasks.workspace import OpenWorkspace
from torpor.control.compare.experience import Past
from torpor.control.compare.offers import OffersReport, offered
from torpor.control.money.costs import read
from torpor.control.store.records import Unread
from torpor.control.store.snapshots import newest_snapshot

_HOURS = 24.0


def offers_for(opened: OpenWorkspace, snapshot: str = NEWEST, count: int = 1) -> OffersReport:
    """The offers that a wake of that snapshot would try, after the checks of a wake; NoOffer or
    BudgetExceeded if there is none. Where the workspace has no snapshot, what `create` would try.
    ``count``: how many machines are rented at once.
    """
    name = opened.spec.name
    wanted = snapshot
    if snapshot not in ("", NEWEST) or newest_snapshot(opened.store, name):
        found, opened = pick_snapshot_to_wake.function(opened, snapshot)
        wanted = found.snapshot
    terms = choose_terms.function(opened, wanted, _HOURS, opened.spec.want.spot)
    offers = look_for_offers.function(opened, count)
    unread: Unread = {}
    past = Past(read([opened.rentals], unread=unread), flown=read_canaries(opened))
    warn_of(unread)
    return OffersReport(
        name,
        terms.snapshot,
        offered(offers, opened.providers, past, terms),
        offers.refused,
        [machine.id for machine, _ in renting(opened).machines()],
        bool(offers.because),
    )
