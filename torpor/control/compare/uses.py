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
"""For production, where a market states the reliability of a host."""
FEW_FAILURES: Final = 0.1
"""For production, of our own attempts."""
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


USES: Final = (
    Use(
        name="development",
        fits=lambda one: not one.offer.spot,
        missing="no offer is on demand and has a price",
        because=lambda one: f"the lowest cost on demand within 5 %, {started(one)}",
        fast=True,
    ),
    Use(
        name="production without checkpoint",
        fits=lambda one: not one.offer.spot and _is_reliable(one),
        missing=f"no offer on demand is reliable: a stated reliability of {RELIABLE:g} or a data "
        f"centre, and at most {100 * FEW_FAILURES:g} % of our attempts failed",
        because=lambda one: f"the lowest cost on demand of the reliable ones, {_reliability(one)}",
    ),
    Use(
        name="production with checkpoint",
        fits=lambda one: one.checkpoint == "claimed" and (not one.offer.spot or _has_notice(one)),
        missing="no offer claims that processes can be frozen there and, on spot, gives a warning "
        f"of {NOTICE_S:g} s",
        because=lambda one: (
            "the lowest cost where processes can be frozen, which the market "
            f"claims and nobody has proved; {notice(one)}"
        ),
    ),
    Use(
        name="compliance",
        fits=lambda one: (
            not one.offer.spot
            and one.able.kind == "vm"
            and one.able.host_key != "first use"
            and one.offer.region not in ("", "any", "unknown")
        ),
        missing="no offer on demand is a virtual machine with a known host key in a stated region",
        because=lambda one: (
            "the lowest cost of a virtual machine of your own on demand, in "
            f"{one.offer.region}, whose host key is {one.able.host_key}"
        ),
    ),
    Use(
        name="smallest budget",
        fits=lambda one: True,
        missing="no offer has a price",
        because=lambda one: f"the lowest cost of all; {notice(one)}",
    ),
)


def advise(found: Compared) -> list[Advice]:
    """One recommendation for each use, of the offers that fit. This host is not recommended: it
    is there to try torpor out."""
    priced = [
        one for one in found.fitting if one.expected_usd is not None and one.able.kind != "folder"
    ]
    return [_advice(use, [one for one in priced if use.fits(one)], found) for use in USES]


def named(one: Choice) -> str:
    """An offer in words."""
    spot = ", spot" if one.offer.spot else ""
    return f"{one.gpu} at {one.market} in {one.offer.region}{spot} (offer {one.offer.id})"


def started(one: Choice) -> str:
    """When work can begin there."""
    start = f"SSH answers within {one.start_p50_s:.0f} s"
    start += f" (median of {one.starts})" if one.starts else " (assumed, the most it may take)"
    if one.restore_s is None:
        return f"{start}, and nobody knows how long the restore takes"
    if not one.restore_s:
        return f"{start}, and there is nothing to restore"
    return f"{start}, and the restore takes {one.restore_s:.0f} s ({one.link_from})"


def notice(one: Choice) -> str:
    """What happens before the machine is taken back."""
    if not one.offer.spot:
        return "on demand, it is not taken back"
    if one.able.notice_s is None:
        return "spot, taken back without a warning"
    return f"spot, taken back after a warning of {one.able.notice_s:.0f} s"


def _advice(use: Use, fitting: Sequence[Choice], found: Compared) -> Advice:
    if not fitting:
        return Advice(use.name, "none", use.missing)
    best = fitting[0]  # they are in the order of their expected cost
    if use.fast:
        most = known(best.expected_usd) * NEARLY
        best = min(
            (one for one in fitting if known(one.expected_usd) <= most),
            key=lambda one: known(one.work_s),
        )
    because = (
        f"{best.expected_usd:.2f} $ for {found.terms.hours:g} h at {best.offer.price_usd_h:.3f} "
        f"$/h: {use.because(best)}"
    )
    if use.name == "compliance" and not found.terms.sealed:
        because += "; the store block has no encryption key, so what is stored is not sealed"
    return Advice(use.name, named(best), because)


def _is_reliable(one: Choice) -> bool:
    stated = one.offer.reliability
    enough = not one.offer.many_owners if stated is None else stated >= RELIABLE
    return enough and one.failed <= FEW_FAILURES * one.attempts


def _reliability(one: Choice) -> str:
    stated = one.offer.reliability
    words = "a data centre" if stated is None else f"reliability {stated:.3f}"
    return f"{words}, {one.failed} of our {one.attempts} attempts failed"


def _has_notice(one: Choice) -> bool:
    return one.able.notice_s is not None and one.able.notice_s >= NOTICE_S
