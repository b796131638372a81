"""Whether frozen programs can go on on an offer's machine, and how that counts in a ranking."""

from __future__ import annotations

import re
from typing import Final, Literal, NamedTuple

from torpor.control.providers.gpus import parse_gpu
from torpor.control.providers.offers import Offer, dotted
from torpor.control.providers.provider import Abilities
from torpor.control.rental.canaries import Canary
from torpor.shared.values import FrozenPrograms, Host, Want, driver_version

COUNTS: Final = {"proven": 1.0, "claimed": 1.25, "no": 2.0}
"""Factors of the cost in a ranking: how much more is paid for a better prospect."""
_MOST_CHARS: Final = 40
_USED: Final = re.compile(
    r"(?:s?sse|avx|amx|bmi|xsave)\w{0,20}|aes|vaes|v?pclmulqdq|gfni|sha_ni|fma|f16c|abm|popcnt|movbe|adx"
    r"|erms|fsrm|rdrand|rdseed|rtm|pku|clwb|clflushopt"
)
"""Features of processors by which programs choose their code; other features only concern the
kernel."""


class Prospect(NamedTuple):
    """``words``: the reason. ``barred``: why no processes at all can be frozen there; empty where
    they can, or nobody knows."""

    level: Literal["proven", "claimed", "no"] = "claimed"
    words: str = ""
    barred: str = ""


def matters(want: Want) -> bool:
    """Whether offers are ranked by their prospects."""
    return want.process == "require" or want.frozen is not None


def prospect(offer: Offer, able: Abilities, canary: Canary | None, want: Want) -> Prospect:
    """Whether the programs of a snapshot can go on there; without frozen programs, whether any
    could."""
    frozen = want.frozen or FrozenPrograms()
    barred = _barred(offer, able, canary)
    if words := barred or _unlike(offer, canary.host if canary else Host(), frozen):
        return Prospect("no", f"processes cannot go on there: {words}", barred)
    if canary is None:
        return Prospect("claimed", "processes may go on there: none was tried")
    return Prospect("proven", f"processes went on there on {canary.day}")


def checkpoint(offer: Offer, able: Abilities, canary: Canary | None) -> str:
    """``no``, ``claimed``, ``unknown``, or ``proven`` with the day of a canary there."""
    if _barred(offer, able, canary):
        return "no"
    return able.checkpoint if canary is None else f"proven {canary.day}"


def _barred(offer: Offer, able: Abilities, canary: Canary | None) -> str:
    if able.checkpoint == "no":
        return "no processes can be frozen in its containers"
    if offer.architecture != "x86_64":
        return f"its processor is {offer.architecture}"
    if canary is not None and canary.why_not:
        return f"a canary failed there on {canary.day}: {canary.why_not}"
    return ""


def _unlike(offer: Offer, last: Host, frozen: FrozenPrograms) -> str:
    """What the frozen programs need and this kind of machine lacks. ``last``: the last machine of
    that kind. No text of a machine is passed on, because it is not trusted."""
    was = frozen.host
    if frozen.gpu_count and offer.gpu_count < frozen.gpu_count:
        return f"they used {frozen.gpu_count} GPUs, it has {offer.gpu_count}"
    used = parse_gpu(frozen.gpu)
    if used is not None and (offer.gpu is None or offer.gpu.model != used.model):
        return f"they used {used.model[:_MOST_CHARS]}, its GPU is {offer.gpu or 'none'}"
    driver = driver_version(was.driver)
    there = offer.driver or driver_version(last.driver)
    if driver and there and driver[: len(there)] != there[: len(driver)]:
        return f"they used driver {dotted(driver, 2)}, its driver is {dotted(there, 2)}"
    kernel, here = _release(was.kernel), _release(last.kernel)
    if here and here < kernel:
        return f"they ran on Linux {dotted(kernel)}, the last machine there had {dotted(here)}"
    lacks = {word for word in was.features.split() if _USED.fullmatch(word)}
    lacks -= set(last.features.split())
    if last.features and lacks:
        return f"the processor of the last machine there had no {', '.join(sorted(lacks)[:5])}"
    return ""


def _release(kernel: str) -> tuple[int, ...]:
    found = re.match(r"(\d{1,3})\.(\d{1,3})", kernel)
    return tuple(map(int, found.groups())) if found else ()
