"""When machines are hibernated for their budget, and how far it can be exceeded."""

from __future__ import annotations

from typing import NamedTuple

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as some

from tests.control.money.test_budgets import budget
from tests.control.money.test_costs import BEGIN, OTHER, rental
from torpor.control.money.budgets import RESERVE_S, budget_status, exhausted_unix
from torpor.control.money.exhaustion import (
    LEAST_S,
    MOST_S,
    START_S,
    STORED_BYTES_S,
    RunningOut,
    lead_s,
    reserve_s,
)
from torpor.control.rental.records import Rental
from torpor.shared.values import GIB, Label

replace = msgspec.structs.replace
LOOK_S = 120.0


def test_the_lead_time_is_what_is_stated() -> None:
    assert lead_s(0) == START_S + LEAST_S == 900
    assert lead_s(25 * GIB) == 900 + 1024
    assert lead_s(10**15) == MOST_S


def test_what_is_rented_can_work_before_it_is_hibernated() -> None:
    assert reserve_s(0) == reserve_s(20 * GIB) == RESERVE_S
    assert reserve_s(100 * GIB) == lead_s(100 * GIB) + 1800
    now = budget_status(budget(9), [], BEGIN)
    assert now.refusal(4.0, 1, 2.25 * 3600) == ""
    assert "1 more at 4 $/h 2.5 hours would exceed" in now.refusal(4.0, 1, 2.5 * 3600)


def test_a_machine_ends_when_its_budget_is_spent_within_its_lead_time() -> None:
    now = budget_status(budget(10), [rental()], BEGIN)
    out = RunningOut(now, BEGIN + 900)
    assert out.why_end(rental(), 0, BEGIN) == "budget lab is spent in 15 min"
    assert out.why_end(rental(), 0, BEGIN - 1) == ""
    assert out.why_end(rental(), GIB, BEGIN - 1) == "budget lab is spent in 15 min"
    assert out.why_end(rental(), 0, BEGIN + 900) == "budget lab is spent"
    other = rental(label=Label("me", OTHER, "0" * 16))
    assert out.why_end(other, 0, BEGIN + 900) == ""


class Running(NamedTuple):
    cents_h: int
    stored_gib: int
    starts_after_s: float
    """From the look that asks for its hibernation, which is at most what START_S allows."""
    takes_s: float

    @property
    def stored_bytes(self) -> int:
        return self.stored_gib * GIB


machines = some.lists(
    some.builds(
        Running,
        some.integers(1, 3000),
        some.integers(0, 100),
        some.floats(0, START_S - LOOK_S),
        some.floats(1, 8 * 3600),
    ),
    min_size=1,
    max_size=4,
)


@pytest.mark.rule(15)
@settings(max_examples=10)  # 0.3 s each
@given(running=machines, hours=some.floats(20, 60))
def test_the_overshoot_is_within_the_stated_bound(running: list[Running], hours: float) -> None:
    """On a simulated clock: `watch` looks every two minutes, until every machine has ended."""
    limit = budget(round(sum(machine.cents_h for machine in running) / 100 * hours, 6))
    records = [rental(price_usd_h=machine.cents_h / 100) for machine in running]
    end_unix: dict[int, float] = {}
    now_unix = BEGIN
    while len(end_unix) < len(running):
        seen = [_at(record, end_unix.get(n), now_unix) for n, record in enumerate(records)]
        at_unix = exhausted_unix(limit, seen, now_unix)
        if at_unix is None or at_unix - BEGIN > 20 * 24 * 3600:
            break  # what is left is enough for the others until the month ends
        if at_unix - now_unix > MOST_S:
            now_unix += LOOK_S * ((at_unix - now_unix - MOST_S) // LOOK_S)  # nothing happens
        else:
            out = RunningOut(budget_status(limit, seen, now_unix), at_unix)
            for n, machine in enumerate(running):
                if n not in end_unix and out.why_end(seen[n], machine.stored_bytes, now_unix):
                    end_unix[n] = now_unix + machine.starts_after_s + machine.takes_s
        now_unix += LOOK_S
    assert end_unix
    after_unix = max(end_unix.values())
    ended = [_at(record, end_unix.get(n), after_unix) for n, record in enumerate(records)]
    over_usd = -budget_status(limit, ended, after_unix).left / 1e6
    bound_usd = 0.0
    for machine in running:
        late_s = machine.takes_s - LEAST_S - machine.stored_bytes / STORED_BYTES_S
        bound_usd += machine.cents_h / 360_000 * max(0.0, late_s)
    assert over_usd <= bound_usd + 1e-5


def _at(record: Rental, end_unix: float | None, now_unix: float) -> Rental:
    """As it is read at that moment."""
    if end_unix is None or end_unix > now_unix:
        return record
    return replace(record, state="ended", seen_unix=end_unix, ended_unix=end_unix)
