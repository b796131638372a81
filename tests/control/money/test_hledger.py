"""What rentals cost, next to what hledger makes of the same rentals as timeclock entries.

hledger knows the calendar and adds up hours and prices. It knows no time zones: an entry is in
local time, and ends where the clocks are changed.
"""

from __future__ import annotations

import csv
import io
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from datetime import datetime, timedelta, timezone
from decimal import Decimal
from pathlib import Path
from zoneinfo import ZoneInfo

import pytest
from hypothesis import given, settings
from hypothesis import strategies as some

from torpor.control.money.costs import costs, dollars
from torpor.control.money.spending import frame, lines
from torpor.control.rental.records import Rental
from torpor.shared.values import Label, MachineId, WorkspaceName

STEP_S = 36  # hledger counts hundredths of an hour
DAY_S = 24 * 3600
ZONES = [
    "UTC", "Europe/Berlin", "America/New_York", "Asia/Kathmandu",
    "Australia/Lord_Howe",  # half an hour
    "America/Havana",  # 2026-11-01 begins twice
    "America/Asuncion",  # 2017-10-01 begins at one
    "Africa/Cairo",  # 2024-10-31 ends twice
]  # fmt: skip
AROUND = [
    "2017-10-01", "2024-02-29", "2024-10-31", "2026-01-01",
    "2026-03-29", "2026-04-05", "2026-10-25", "2026-11-01",
]  # fmt: skip


@some.composite
def _spans(draw: some.DrawFn, begin: int) -> tuple[int, int, int]:
    """When a rental began, was last seen, and ended or was found gone."""
    begin += STEP_S * draw(some.integers(-3 * DAY_S // STEP_S, 3 * DAY_S // STEP_S))
    seen = begin + STEP_S * draw(some.integers(0, 40 * DAY_S // STEP_S))
    crashed = draw(some.booleans())
    gone = seen + STEP_S * (draw(some.integers(0, 35 * DAY_S // STEP_S)) if crashed else 0)
    return begin, seen, gone


@some.composite
def _rentals(draw: some.DrawFn) -> tuple[list[Rental], int]:
    around = int(datetime.fromisoformat(f"{draw(some.sampled_from(AROUND))}T00:00Z").timestamp())
    spans = draw(some.lists(_spans(around), min_size=1, max_size=6))
    now = max(gone for _, _, gone in spans) + STEP_S * draw(some.integers(0, 3000))
    rentals = []
    for number, (begin, seen, gone) in enumerate(spans):
        is_open = draw(some.booleans())
        running = draw(some.booleans())
        rentals.append(
            Rental(
                label=Label("me", WorkspaceName(draw(some.sampled_from("vw"))), f"r{number}"),
                project=draw(some.sampled_from(["p", "q"])),
                provider="vast:1",
                state="handed over" if is_open else "ended",
                machine=MachineId("m"),
                created_unix=float(begin),
                seen_unix=float(now if is_open and running else seen),
                ended_unix=None if is_open else float(gone),
                price_usd_h=draw(some.integers(0, 400_000)) / 10_000,
            )
        )
    return rentals, now


@pytest.mark.rule(15)
@settings(max_examples=40)
@given(found=_rentals(), zone=some.sampled_from(ZONES).map(ZoneInfo))
def test_the_cost_of_rentals_is_what_hledger_says(
    found: tuple[list[Rental], int], zone: ZoneInfo
) -> None:
    rentals, now = found
    said = _hledger(rentals, now, zone)
    ours: dict[tuple[str, str], Decimal] = {}
    counted = costs(rentals, now, zone)
    for cost in counted:
        of, month = cost.rental, str(cost.month)
        account = f"{of.project}:{of.label.workspace}:{of.label.rental}"
        for bound, micro_usd, us in (
            ("low", cost.low, cost.low_us),
            ("high", cost.high, cost.high_us),
        ):
            ours[f"{bound}:{account}", month] = Decimal(us) / 3_600_000_000
            ours[f"cost:{bound}:{account}", month] = dollars(micro_usd)
    assert {key: value for key, value in ours.items() if value} == said

    table = frame(lines(counted, {}))
    for bound in ("low", "high"):
        sums = table.groupby(["month", "project"])[f"{bound}_usd"].sum()
        expected: dict[tuple[str, str], Decimal] = {}
        for (account, month), value in said.items():
            kind, _, rest = account.partition(":")
            if kind == "cost" and rest.startswith(f"{bound}:"):
                key = (month, rest.split(":")[1])
                expected[key] = expected.get(key, Decimal(0)) + value
        assert {key: value for key, value in sums.items() if value} == expected


def _hledger(rentals: Sequence[Rental], now: int, zone: ZoneInfo) -> dict[tuple[str, str], Decimal]:
    """Hours by account and month, and dollars by the same account under ``cost:``."""
    clock, journal = [], ["commodity $1.000000", "include clock.timeclock"]
    for rental in rentals:
        end = now if rental.state != "ended" else int(rental.ended_unix or 0)
        spans = {"low": int(rental.seen_unix or 0), "high": end}
        for bound, until in spans.items():
            account = f"{bound}:{rental.project}:{rental.label.workspace}:{rental.label.rental}"
            for came, left in _sessions(int(rental.created_unix), until, zone):
                clock += [f"i {came:%Y-%m-%d %H:%M:%S} {account}", f"o {left:%Y-%m-%d %H:%M:%S}"]
            if rental.price_usd_h:
                price = f"*${rental.price_usd_h:.4f}"
                journal += ["", f"= ^{account}$", f"    (cost:{account})  {price}"]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "clock.timeclock").write_text("\n".join(clock) + "\n")
        (folder / "all.journal").write_text("\n".join(journal) + "\n")
        argv = ["hledger", "-f", str(folder / "all.journal"), "--auto", "balance", "--monthly"]
        printed = subprocess.run(
            [*argv, "--flat", "--no-total", "--output-format=csv"],
            capture_output=True, text=True, check=True,
        ).stdout  # fmt: skip
    if not clock:
        return {}
    head, *table = csv.reader(io.StringIO(printed))
    found = {
        (account, month): Decimal(cell.strip("$h").replace(",", ""))
        for account, *cells in table
        for month, cell in zip(head[1:], cells, strict=True)
    }
    return {key: value for key, value in found.items() if value}


def _sessions(begin: int, end: int, zone: ZoneInfo) -> Iterator[tuple[datetime, datetime]]:
    """The span in local times, cut where the clocks are changed."""

    def offset(at: int) -> timedelta:
        return datetime.fromtimestamp(at, zone).utcoffset() or timedelta()

    while begin < end:
        until = begin
        while until < end and offset(until) == offset(begin):
            until += DAY_S  # no zone changes its clocks twice a day
        until = min(until, end)
        if offset(until) != offset(begin):
            before = max(begin, until - DAY_S)
            while until - before > 1:
                middle = (before + until) // 2
                before, until = (
                    (middle, until) if offset(middle) == offset(begin) else (before, middle)
                )
        came, left = (datetime.fromtimestamp(at, timezone.utc) for at in (begin, until))
        yield came + offset(begin), left + offset(begin)
        begin = until
