"""Which offer for which use, and the figure that decides."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

import msgspec

from torpor.control.compare.choices import Choice, Compared, known
from torpor.control.measure.advice import Advice

NOTICE_S: Final = 30.0
"""A warning that is shorter saves nothing."""
RELIABLE: Final = 0.98
"""The least reliability of a host for production, where the market states it."""
FEW_FAILURES: Final = 0.1
"""The largest share of our own attempts that may have failed, for production."""
NEARLY: Final = 1.05
"""Offers within 5 % of the lowest cost are equal; the faster start decides."""


class Use(msgspec.Struct, frozen=True, kw_only=True):
    """What somebody rents for. ``fits``: whether an offer will do; ``missing``: what is said where
    none does; ``because``: the words after the figure that decides."""

    name: str
    fits: Callable[[Choice], bool]
    missing: str
    because: Callable[[Choice], str]
    fast: bool = False  # of nearly equal costs the one where work begins first
    proven: bool = False  # whether a proof that processes go on there is worth more


USES: Final = (
    Use(
        name="development",
        fits=lambda choice: not choice.offer.spot,
        missing="no offer is on demand and has a price",
        because=lambda choice: f"the lowest cost on demand within 5 %, {started(choice)}",
        fast=True,
    ),
    Use(
        name="production without checkpoint",
        fits=lambda choice: not choice.offer.spot and _is_reliable(choice),
        missing=f"no offer on demand is reliable: a stated reliability of {RELIABLE:g} or a data "
        f"centre, and at most {100 * FEW_FAILURES:g} % of our attempts failed",
        because=lambda choice: (
            f"the lowest cost on demand of the reliable ones, {_reliability(choice)}"
        ),
    ),
    Use(
        name="production with checkpoint",
        fits=lambda choice: (
            choice.checkpoint.startswith(("claimed", "proven"))
            and (not choice.offer.spot or _has_notice(choice))
        ),
        missing="no offer claims that processes can be frozen there and, on spot, gives a warning "
        f"of {NOTICE_S:g} s",
        because=lambda choice: f"{_proof(choice)}; {notice(choice)}",
        proven=True,
    ),
    Use(
        name="compliance",
        fits=lambda choice: (
            not choice.offer.spot
            and choice.able.kind == "vm"
            and choice.able.host_key != "first use"
            and choice.offer.region not in ("", "any", "unknown")
        ),
        missing="no offer on demand is a virtual machine with a known host key in a stated region",
        because=lambda choice: (
            "the lowest cost of a virtual machine of your own on demand, in "
            f"{choice.offer.region}, whose host key is {choice.able.host_key}"
        ),
    ),
    Use(
        name="smallest budget",
        fits=lambda choice: True,
        missing="no offer has a price",
        because=lambda choice: f"the lowest cost of all; {notice(choice)}",
    ),
)


def _proof(choice: Choice) -> str:
    if choice.checkpoint == "claimed":
        words = "the lowest cost where processes can be frozen"
        return f"{words}, which the market claims and nobody has proved"
    return f"processes can be frozen there, {choice.checkpoint} by a canary of yours"


def advise(found: Compared) -> list[Advice]:
    """One recommendation for each use, of the offers that fit. This host is not recommended: it
    is there to try torpor out."""
    priced = [
        choice
        for choice in found.fitting
        if choice.expected_usd is not None and choice.able.kind != "folder"
    ]
    priced.sort(key=lambda choice: known(choice.expected_usd))
    return [_advice(use, [choice for choice in priced if use.fits(choice)], found) for use in USES]


def named(choice: Choice) -> str:
    """An offer in words."""
    spot = ", spot" if choice.offer.spot else ""
    return (
        f"{choice.gpu} at {choice.market} in {choice.offer.region}{spot} (offer {choice.offer.id})"
    )


def started(choice: Choice) -> str:
    """When work can begin there."""
    start = f"SSH answers within {choice.start_p50_s:.0f} s"
    start += (
        f" (median of {choice.starts})" if choice.starts else " (assumed, the most it may take)"
    )
    if choice.restore_s is None:
        return f"{start}, and nobody knows how long the restore takes"
    if not choice.restore_s:
        return f"{start}, and there is nothing to restore"
    return f"{start}, and the restore takes {choice.restore_s:.0f} s ({choice.link_from})"


def notice(choice: Choice) -> str:
    """What happens before the machine is taken back."""
    if not choice.offer.spot:
        return "on demand, it is not taken back"
    if choice.able.notice_s is None:
        return "spot, taken back without a warning"
    return f"spot, taken back after a warning of {choice.able.notice_s:.0f} s"


def _advice(use: Use, fitting: Sequence[Choice], found: Compared) -> Advice:
    if not fitting:
        only = "only machines of this host fit, which are there to try torpor out"
        here = any(choice.able.kind == "folder" for choice in found.fitting)
        others = any(choice.able.kind != "folder" for choice in found.fitting)
        return Advice(use.name, "none", only if here and not others else use.missing)
    best = fitting[0]  # they are in the order of their expected cost
    if use.proven:
        best = min(fitting, key=lambda choice: known(choice.weighed_usd))
    if use.fast:
        most = known(best.expected_usd) * NEARLY
        best = min(
            (choice for choice in fitting if known(choice.expected_usd) <= most),
            key=lambda choice: known(choice.work_s),
        )
    because = (
        f"{best.expected_usd:.2f} $ for {found.terms.hours:g} h at {best.offer.price_usd_h:.3f} "
        f"$/h: {use.because(best)}"
    )
    if use.name == "compliance" and not found.terms.sealed:
        because += "; the store block has no encryption key, so what is stored is not sealed"
    return Advice(use.name, named(best), because)


def _is_reliable(choice: Choice) -> bool:
    stated = choice.offer.reliability
    enough = not choice.offer.many_owners if stated is None else stated >= RELIABLE
    return enough and choice.failed <= FEW_FAILURES * choice.attempts


def _reliability(choice: Choice) -> str:
    stated = choice.offer.reliability
    words = "a data centre" if stated is None else f"reliability {stated:.3f}"
    return f"{words}, {choice.failed} of our {choice.attempts} attempts failed"


def _has_notice(choice: Choice) -> bool:
    return choice.able.notice_s is not None and choice.able.notice_s >= NOTICE_S
