"""The comparison as a table and as one page: advice, stopping, what was rejected."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Final

from torpor.control.compare.choices import Choice, Compared
from torpor.control.compare.uses import notice
from torpor.control.measure.advice import Advice
from torpor.control.measure.page import dated, section
from torpor.control.rental.prospects import WEIGHED
from torpor.control.rental.search import UNSTATED
from torpor.control.reports import MOST_ROWS, Row
from torpor.shared.values import ObjectKey

MOST_REASONS: Final = 40

_NOTES: Final = (
    "* A session is the hours that the machine is rented, with the most that the market bills "
    "after its end, rounded up as the market bills them, and the traffic of one restore. The "
    "expected cost is higher where a market states that a host may fail: of hosts of many owners "
    f"that state nothing, {UNSTATED:g} is assumed. Taxes are not counted.",
    "* Start times are the time from our request until SSH answered, of the rentals of this store "
    "in the last 90 days, without time in a provider's queue. Where there are none, the time is "
    "assumed: the most that an attempt is given, with the queue.",
    "* A restore is the stored bytes over the link: measured by wakes there, else as the market "
    "states it. The check of the files afterwards is not counted.",
    "* Checkpoint says whether processes can be frozen there and go on: a market that gives root "
    "which may do so claims it; proven is the day on which a process tree of torpor's own last "
    "went on there, with this GPU in this region of your account. Where the snapshot holds frozen "
    f"programs, or `process` requires that they are frozen, offers are ranked by {WEIGHED}.",
    "* Stopping keeps the market's own disk, mostly tied to one host or zone. torpor never stops "
    "a machine instead of hibernating it.",
    "* Prices come from the markets' live APIs, at the age that the table shows. None is from a "
    "catalog.",
)


def rows(found: Compared) -> list[Row]:
    """The UI's table; its last row says how much is left out."""
    shown = [_row(choice, found.terms.hours) for choice in found.fitting[:MOST_ROWS]]
    more = len(found.fitting) - MOST_ROWS
    if more > 0:
        words = f"and {more:,} more: in Python, compare returns them all"
        shown.append({**dict.fromkeys(shown[0], ""), "market": words})
    return shown or [{"result": "no offer fits"}]


def page(
    found: Compared,
    said: Sequence[Advice],
    unread: Mapping[ObjectKey, object] = {},
) -> str:
    """Markdown for Prefect's UI. ``unread``: the records that the figures lack, and why."""
    terms = found.terms
    restored = f"snapshot {terms.snapshot}, {terms.stored_bytes:,} stored bytes"
    return "\n".join(
        [
            f"{len(found.fitting):,} offers fit, {len(found.rejected):,} do not. A session of "
            f"{terms.hours:g} h with {restored if terms.snapshot else 'no snapshot to restore'}.",
            "",
            "## Which one for which use",
            "",
            *(
                f"* **{advice.about}: {_plain(advice.choice)}.** "
                f"{_plain(advice.because[:1].upper() + advice.because[1:])}."
                for advice in said
            ),
            "",
            *section("Hibernate or stop", _stopping(found)),
            *section("Rejected offers", _reasons(found.rejected)),
            *section(
                "Markets without an answer",
                [
                    {"market": _plain(tried.provider), "reason": _plain(tried.outcome)}
                    for tried in found.silent
                ],
            ),
            *section(
                "Rentals that cannot be believed, and are left out",
                [{"record": key, "why": _plain(str(why))} for key, why in unread.items()],
            ),
            "## What the figures are",
            "",
            *_NOTES,
        ]
    )


def _row(choice: Choice, hours: float) -> Row:
    offer, vram = choice.offer, choice.vram_gib
    start = f"{choice.start_p50_s:.0f} / {choice.start_p90_s:.0f} s, "
    start += f"n = {choice.starts}" if choice.starts else "assumed"
    restore = (
        "not known" if choice.restore_s is None else f"{choice.restore_s:.0f} s, {choice.link_from}"
    )
    return {
        "market": choice.market,
        "GPU": choice.gpu,
        "$/h": _usd_h(choice),
        f"$ for {hours:g} h": _usd(choice.session_usd),
        "expected $": _usd(choice.expected_usd),
        "work after": "not known" if choice.work_s is None else f"{choice.work_s:.0f} s",
        "region": offer.region,
        "GiB each": "" if vram is None else f"{vram:g}",
        "spot": notice(choice),
        "$ a month hibernated": _usd(choice.hibernated_usd_month),
        "stop keeps": stop_words(choice),
        "billed by": f"{choice.able.billing_s:g} s"
        + (f", {choice.able.ending_s:g} s after its end" if choice.able.ending_s else ""),
        "start p50 / p90": start,
        "restore": restore,
        "our failures": f"{choice.failed} of {choice.attempts}"
        + (f", {choice.past_of}" * bool(choice.past_of)),
        "checkpoint": choice.checkpoint,
        "host key": choice.able.host_key,
        "price": f"live API, {choice.price_age_s:.0f} s ago",
        "offer": offer.id,
    }


def stop_words(choice: Choice) -> str:
    """What a stopped machine keeps, and what that costs."""
    if choice.able.stop_keeps == "nothing":
        return "nothing"
    usd = choice.stopped_usd_month
    price = "price not stated" if usd is None else f"{usd:,.2f} $ a month"
    return f"{choice.able.stop_keeps}, {price}"


def _stopping(found: Compared) -> list[Row]:
    """One row for each market."""
    markets = {choice.market: choice for choice in (*found.rejected, *found.fitting)}
    return [
        {
            "market": market,
            "a stop keeps": stop_words(choice),
            "hibernated, a month": _usd(choice.hibernated_usd_month, " $"),
            "the store's price of": dated(found.terms.store_price),
        }
        for market, choice in sorted(markets.items())
    ]


def _reasons(rejected: Sequence[Choice]) -> list[Row]:
    """The reasons, most frequent first."""
    counted = Counter((choice.market, choice.rejected) for choice in rejected)
    cheapest: dict[tuple[str, str], Choice] = {}
    for choice in rejected:  # in the order of their cost
        cheapest.setdefault((choice.market, choice.rejected), choice)
    lines = [
        {
            "market": market,
            "offers": f"{count:,}",
            "reason": _plain(reason),
            "the cheapest, $/h": _usd_h(cheapest[market, reason]),
        }
        for (market, reason), count in counted.most_common(MOST_REASONS)
    ]
    if len(counted) > MOST_REASONS:
        more = f"and {len(counted) - MOST_REASONS:,} reasons more, in the table that Python gets"
        lines.append({"market": more})
    return lines


def _usd_h(choice: Choice) -> str:
    return "not known" if choice.session_usd is None else f"{choice.offer.price_usd_h:.3f}"


def _usd(usd: float | None, unit: str = "") -> str:
    return "not known" if usd is None else f"{usd:,.2f}{unit}"


def _plain(text: str) -> str:
    """What a market wrote, as text: no Markdown, no line breaks."""
    return re.sub(r"([\\`*_\[\]<>|!#])", r"\\\1", " ".join(text.split()))
