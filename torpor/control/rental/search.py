"""Offers of all of a workspace's providers: asked for at once, filtered and ranked, each refusal
with its reason."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Final

import msgspec

from torpor.control.providers.offers import Offer, misfit
from torpor.control.providers.seam import Abilities, Provider
from torpor.control.rental.markets import ANSWER_S, ask_all
from torpor.control.reports import Row
from torpor.shared.errors import NoOffer, TorporError
from torpor.shared.values import GIB, Want, cuda_version

DISK_MARGIN: Final = 1.1
"""A snapshot takes this much of a disk: its files, what the agent keeps meanwhile."""
_HOURS: Final = 8.0
"""What an offer costs is compared over so many hours, with the traffic of the restore."""
UNSTATED: Final = 0.9
"""Assumed for the ranking of a host of one of many owners that states no reliability."""


class Tried(msgspec.Struct, frozen=True):
    """An offer, or a provider as a whole, and what came of it."""

    provider: str
    offer: str
    outcome: str
    gpu: str = ""
    region: str = ""
    price_usd_h: float | None = None

    @classmethod
    def of(cls, offer: Offer, outcome: str) -> Tried:
        gpu = f"{offer.gpu_count} x {offer.gpu}" if offer.gpu else ""
        return cls(offer.provider, offer.id, outcome, gpu, offer.region, offer.price_usd_h)

    def row(self) -> Row:
        """As a line of a table, whose first columns are what a narrow page shows."""
        price = "" if self.price_usd_h is None else f"{self.price_usd_h:.3f}"
        return {
            "market": self.provider.partition("://")[0], "GPU": self.gpu, "$/h": price,
            "outcome": self.outcome, "region": self.region, "offer": self.offer,
            "provider": self.provider,
        }  # fmt: skip


class Offers(msgspec.Struct, frozen=True):
    """``fitting``: best first. ``refused``: the others, and providers that sold nothing."""

    fitting: list[Offer]
    refused: list[Tried]


def find_offers(providers: Sequence[Provider], want: Want, restored_bytes: int = 0) -> Offers:
    """What all providers sell that fits; NoOffer, with the reasons, if nothing does."""
    fitting: list[tuple[int, Offer]] = []
    refused: list[Tried] = []
    answers = ask_for_offers(providers, want)
    for place, (provider, answer) in enumerate(zip(providers, answers, strict=True)):
        if isinstance(answer, TorporError):
            refused.append(Tried(provider.identity, "", str(answer)))
            continue
        for offer in answer:
            reason = misfit(offer, want)
            if want.freezes and provider.abilities.checkpoint == "no":
                reason = "no processes can be frozen in its containers, and `process` requires it"
            if reason:
                refused.append(Tried.of(offer, reason))
            else:
                fitting.append((place, offer))
        if not answer:
            refused.append(Tried(provider.identity, "", "nothing on sale is like that"))
    if not fitting:
        raise _no_offer(providers, want, refused, answers)
    in_order = want.rank == "order"
    able = [provider.abilities for provider in providers]

    def rank(ranked: tuple[int, Offer]) -> tuple[int, float]:
        place, offer = ranked
        return (place if in_order else 0, _cost(offer, able[place], restored_bytes))

    fitting.sort(key=rank)
    return Offers([offer for _, offer in fitting], refused)


def ask_for_offers(providers: Sequence[Provider], want: Want) -> list[list[Offer] | TorporError]:
    """What each provider sells, or why it has not said so.

    Each account is checked before: login, balance, and whether the image will do.
    """

    def ask(provider: Provider) -> list[Offer]:
        provider.check(want.image)
        return provider.offers(want)

    return ask_all(providers, ask, timeout_s=ANSWER_S)


def expected(usd: float, offer: Offer) -> float:
    """More than ``usd`` where a machine may fail and be rented again."""
    reliability = offer.reliability
    if reliability is None:
        reliability = UNSTATED if offer.many_owners else 1.0
    return usd / max(reliability, 0.01)


def billed_s(hours: float, able: Abilities) -> float:
    """What the market bills for them: rounded up, with the time that it takes to end a machine."""
    return math.ceil((hours * 3600 + able.ending_s) / able.billing_s) * able.billing_s


def fit(want: Want, environment: Mapping[str, Any], workspace_bytes: int) -> Want:
    """``want`` for a machine that a snapshot of this environment record can be woken on."""
    return msgspec.structs.replace(
        want,
        disk_gib=max(want.disk_gib, workspace_bytes * DISK_MARGIN / GIB),
        architecture=want.architecture or str(environment.get("architecture") or ""),
        cuda=want.cuda or cuda_version(str(environment.get("cuda") or "")),
    )


def _cost(offer: Offer, able: Abilities, restored_bytes: int) -> float:
    """Dollars for the first hours."""
    hours = offer.price_usd_h * billed_s(_HOURS, able) / 3600
    traffic = offer.traffic_usd_gib * restored_bytes / GIB
    return expected(hours + traffic, offer)


def _no_offer(
    providers: Sequence[Provider],
    want: Want,
    refused: Sequence[Tried],
    answers: Sequence[object],
) -> TorporError:
    if len(providers) == 1 and isinstance(answers[0], TorporError):
        return answers[0]
    wishes = msgspec.to_builtins(want)
    for name in ("cuda", "driver"):
        wishes[name] = ".".join(map(str, wishes[name] or ()))
    wish = ", ".join(f"{name} {value}" for name, value in wishes.items() if value) or "anything"
    reasons = dict.fromkeys(
        f"{refusal.provider} {refusal.offer}: {refusal.outcome}" for refusal in refused
    )
    return NoOffer(
        f"{', '.join(provider.identity for provider in providers)} has no offer for {wish} "
        f"({'; '.join([*reasons][:5])}): ask for less in the workspace block, raise its price "
        "limit, or add a provider"
    )
