"""Offers of all of a workspace's providers: asked for at once, filtered and ranked, each refusal
with its reason."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Final

import msgspec

from torpor.control.providers.gpu_wishes import is_known, nearest, wishes_of
from torpor.control.providers.offers import Offer, asked, misfit, preference
from torpor.control.providers.provider import Abilities, Provider
from torpor.control.rental.canaries import CanaryResults
from torpor.control.rental.markets import ANSWER_S, ask_all
from torpor.control.rental.prospects import COUNTS, Prospect, matters, prospect
from torpor.control.reports import Row
from torpor.shared.errors import NoOffer, TorporError
from torpor.shared.format.frozen import frozen_in
from torpor.shared.values import GIB, Want, cuda_version

DISK_MARGIN: Final = 1.1
"""A snapshot needs this many times its bytes of disk: for its files, and for what the agent keeps
meanwhile."""
_HOURS: Final = 8.0
"""Hours over which offers' costs are compared, with the traffic of the restore."""
UNSTATED: Final = 0.9
"""The reliability assumed in the ranking for a host of one of many owners that states none."""


class OfferOutcome(msgspec.Struct, frozen=True):
    """An offer, or a whole provider, and what came of asking it."""

    provider: str
    offer: str
    outcome: str
    gpu: str = ""
    region: str = ""
    price_usd_h: float | None = None

    @classmethod
    def of(cls, offer: Offer, outcome: str) -> OfferOutcome:
        gpu = f"{offer.gpu_count} x {offer.gpu}" if offer.gpu else ""
        price = None if offer.unread else offer.price_usd_h
        return cls(offer.provider, offer.id, outcome, gpu, offer.region, price)

    def row(self) -> Row:
        """The offer as a row of a table, whose first columns are what a narrow page shows."""
        price = "" if self.price_usd_h is None else f"{self.price_usd_h:.3f}"
        return {
            "market": self.provider.partition("://")[0], "GPU": self.gpu, "$/h": price,
            "outcome": self.outcome, "region": self.region, "offer": self.offer,
            "provider": self.provider,
        }  # fmt: skip


class Offers(msgspec.Struct, frozen=True):
    """``fitting``: best first. ``refused``: the others, and providers that sold nothing.
    ``because``: where programs are to go on, whether they can, by provider and offer."""

    fitting: list[Offer]
    refused: list[OfferOutcome]
    because: dict[tuple[str, str], str] = {}

    def chosen(self, provider: str, offer: str) -> str:
        """Why that offer was rented before a cheaper one, for people; empty where only its cost
        counts."""
        words = self.because.get((provider, offer), "")
        cheapest = min(self.fitting, key=lambda sold: sold.price_usd_h, default=None)
        if not words or cheapest is None or (cheapest.provider, cheapest.id) == (provider, offer):
            return words
        other = self.because[cheapest.provider, cheapest.id]
        price = f"{cheapest.price_usd_h:.3f} $/h"
        return f"{words}; the cheapest is {cheapest.id} at {cheapest.provider}, {price}: {other}"


def find_offers(
    providers: Sequence[Provider],
    want: Want,
    restored_bytes: int = 0,
    canaries: CanaryResults = CanaryResults(),  # noqa: B008 - it is never changed
) -> Offers:
    """What all providers sell that fits, the GPUs that are preferred first; NoOffer, with the
    reasons, if nothing does. InvalidInput where the wanted GPU is not understood. ``canaries``:
    where processes were frozen and went on, for the ranking of a wake that lets some go on."""
    fitting: list[tuple[int, Offer, Prospect]] = []
    refused: list[OfferOutcome] = []
    answers = ask_for_offers(providers, want)
    for place, (provider, answer) in enumerate(zip(providers, answers, strict=True)):
        if isinstance(answer, TorporError):
            refused.append(OfferOutcome(provider.identity, "", str(answer)))
            continue
        for offer in answer:
            seen = prospect(offer, provider.abilities, canaries.of(offer), want)
            if reason := misfit(offer, want) or refusal(seen, want):
                refused.append(OfferOutcome.of(offer, reason))
            else:
                fitting.append((place, offer, seen))
        if not answer:
            refused.append(OfferOutcome(provider.identity, "", "nothing on sale is like that"))
    if not fitting:
        raise _no_offer(providers, want, refused, answers)
    in_order = want.rank == "order"
    able = [provider.abilities for provider in providers]

    def rank(ranked: tuple[int, Offer, Prospect]) -> tuple[int, int, float]:
        place, offer, seen = ranked
        counts = COUNTS[seen.level] if matters(want) else 1.0
        cost = counts * _cost(offer, able[place], restored_bytes)
        return (preference(offer, want), place if in_order else 0, cost)

    fitting.sort(key=rank)
    said = {(offer.provider, offer.id): seen.words for _, offer, seen in fitting}
    offers = [offer for _, offer, _ in fitting]
    return Offers(offers, refused, said if matters(want) else {})


def refusal(seen: Prospect, want: Want) -> str:
    """Why a machine on which no processes can be frozen is not rented; empty where it may be."""
    if want.process != "require" or not seen.barred:
        return ""
    return f"{seen.barred}, and `process` requires it: with `try` it is rented all the same"


def ask_for_offers(providers: Sequence[Provider], want: Want) -> list[list[Offer] | TorporError]:
    """What each provider sells, or why it has not answered.

    Each account is checked before: login, balance, and whether the image will do. InvalidInput
    where the wanted GPU is not understood.
    """
    wants = asked(want)

    def ask(provider: Provider) -> list[Offer]:
        provider.check(want.image)
        return sold(provider, wants)

    return ask_all(providers, ask, timeout_s=ANSWER_S)


def sold(provider: Provider, wants: Sequence[Want]) -> list[Offer]:
    """What a provider sells for any of these wishes, each offer once."""
    found = {(offer.id, offer.unread): offer for one in wants for offer in provider.offers(one)}
    return [*found.values()]


def expected(usd: float, offer: Offer) -> float:
    """The expected cost: more than ``usd`` where a machine may fail and be rented again."""
    reliability = offer.reliability
    if reliability is None:
        reliability = UNSTATED if offer.many_owners else 1.0
    return usd / max(reliability, 0.01)


def billed_s(hours: float, able: Abilities) -> float:
    """The seconds that the market bills for these hours: rounded up, with the time that ending a
    machine takes."""
    return math.ceil((hours * 3600 + able.ending_s) / able.billing_s) * able.billing_s


def fit(want: Want, environment: Mapping[str, Any], workspace_bytes: int) -> Want:
    """``want``, changed so that it describes a machine on which a snapshot with this environment
    record can be woken."""
    return msgspec.structs.replace(
        want,
        disk_gib=max(want.disk_gib, workspace_bytes * DISK_MARGIN / GIB),
        architecture=want.architecture or str(environment.get("architecture") or ""),
        cuda=want.cuda or cuda_version(str(environment.get("cuda") or "")),
        frozen=frozen_in(environment) if want.process != "never" else None,
    )


def _cost(offer: Offer, able: Abilities, restored_bytes: int) -> float:
    """Dollars for the first hours."""
    hours = offer.price_usd_h * billed_s(_HOURS, able) / 3600
    traffic = offer.traffic_usd_gib * restored_bytes / GIB
    return expected(hours + traffic, offer)


def _no_offer(
    providers: Sequence[Provider],
    want: Want,
    refused: Sequence[OfferOutcome],
    answers: Sequence[object],
) -> TorporError:
    if len(providers) == 1 and isinstance(answers[0], TorporError):
        return answers[0]
    wishes = msgspec.to_builtins(msgspec.structs.replace(want, frozen=None))
    if want.process != "require":
        del wishes["process"]  # this wish refuses no offer
    for name in ("cuda", "driver"):
        wishes[name] = ".".join(map(str, wishes[name] or ()))
    wish = ", ".join(f"{name} {value}" for name, value in wishes.items() if value) or "anything"
    reasons = dict.fromkeys(
        f"{refusal.provider} {refusal.offer}: {refusal.outcome}" for refusal in refused
    )
    return NoOffer(
        f"{', '.join(provider.identity for provider in providers)} has no offer for {wish} "
        f"({'; '.join([*reasons][:5])}): ask for less in the workspace block, raise its price "
        f"limit, or add a provider{_unknown(want)}"
    )


def _unknown(want: Want) -> str:
    """The wanted GPU models that may be mistyped."""
    odd = [wish for wish in wishes_of(want) if not is_known(wish)]
    meant = [f"{wish.text} (did you mean {nearest(wish) or 'another one'}?)" for wish in odd]
    return f". torpor does not know the GPU {', '.join(meant)}" if meant else ""
