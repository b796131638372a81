"""Reads what `compare` shows: a snapshot, the offers of all markets, and what our rentals say."""

from __future__ import annotations

import time
from typing import Final, Literal

import msgspec

from tasks.canaries import read_canaries
from tasks.restore import NEWEST, fitted, picked
from tasks.spending import warn_of
from tasks.step import step
from tasks.workspace import OpenWorkspace
from torpor.control.compare.choices import OfferComparison, Terms, compared
from torpor.control.compare.experience import DAYS, RentalHistory
from torpor.control.money.costs import read
from torpor.control.money.storage import look
from torpor.control.providers.provider import Provider
from torpor.control.rental.records import Rentals
from torpor.control.rental.search import OfferOutcome, ask_for_offers
from torpor.control.store.manifests import newest_snapshot, read_manifest
from torpor.control.store.records import Unread
from torpor.shared.errors import TorporError

_DAY_S: Final = 24 * 3600.0


def terms_of(
    opened: OpenWorkspace, wanted: str, hours: float, spot: Literal["never", "allowed", "only"]
) -> Terms:
    """What machine to rent: as a wake of that snapshot wants it. A workspace without any snapshot
    is compared too."""
    want = msgspec.structs.replace(opened.spec.want, spot=spot)
    terms = Terms(
        want=want,
        hours=hours,
        now_unix=time.time(),
        store_price=opened.store_price(),
        sealed=opened.key is not None,
    )
    if wanted in ("", NEWEST) and newest_snapshot(opened.store, opened.spec.name) is None:
        return terms
    found, manifest, *_ = picked(opened, wanted)
    manifest = manifest or read_manifest(opened.store, found, opened.seal)
    return msgspec.structs.replace(
        terms,
        want=fitted(want, manifest),
        snapshot=found.snapshot,
        stored_bytes=manifest.statistics.get("stored_bytes", 0),
    )


choose_terms = step("pick snapshot")(terms_of)


@step("read rentals")
def read_past(opened: OpenWorkspace, terms: Terms) -> tuple[RentalHistory, Unread]:
    """The rentals of all workspaces in the store, and canaries; and the records that were left out,
    because they cannot be believed. Lists the whole store; changes nothing."""
    since_unix = terms.now_unix - DAYS * _DAY_S
    ledgers = [Rentals(opened.store, name) for name in look(opened.store)]
    unread: Unread = {}
    past = RentalHistory(read(ledgers, since_unix, unread), since_unix, read_canaries(opened))
    warn_of(unread)
    return past, unread


@step("ask markets")
def ask_markets(
    opened: OpenWorkspace, terms: Terms, past: RentalHistory, everywhere: bool
) -> OfferComparison:
    """The offers of all markets now. A market that cannot be opened or asked is in the answer with
    the reason. Rents nothing."""
    providers: dict[str, Provider] = {one.identity: one for one in opened.providers}
    silent: list[OfferOutcome] = []
    for reference, one in opened.each() if everywhere else ():
        if isinstance(one, TorporError):
            silent.append(OfferOutcome(reference, "", str(one)))
        else:
            providers.setdefault(one.identity, one)
    sold = []
    answers = ask_for_offers([*providers.values()], terms.want)
    for provider, answer in zip(providers.values(), answers, strict=True):
        if isinstance(answer, TorporError):
            silent.append(OfferOutcome(provider.identity, "", str(answer)))
        elif not answer:
            silent.append(OfferOutcome(provider.identity, "", "nothing on sale is like that"))
        else:
            sold.append((provider, answer))
    return compared(sold, silent, past, terms)
