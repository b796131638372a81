"""What a budget allows, how it stands, and when it will be spent."""

from __future__ import annotations

from datetime import datetime
from decimal import Decimal
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as some

from tests.control.money.test_costs import BEGIN, BERLIN, DEMO, OTHER, rental
from tests.fixtures.market import H100
from tests.fixtures.memory_store import MemoryStore
from torpor.control.money.budgets import (
    RESERVE_S,
    Budget,
    OpenBudget,
    budget_status,
    exhausted_unix,
)
from torpor.control.rental.records import Rental, Rentals
from torpor.shared.errors import InvalidInput, StoreUnavailable
from torpor.shared.values import DRILL, WorkspaceName, reserved_name

replace = msgspec.structs.replace
HOUR = 3600


def budget(usd: float, **changes: Any) -> Budget:
    of = {} if "project" in changes else {"workspaces": (DEMO,)}
    return Budget(name="lab", usd_month=Decimal(str(usd)), **{**of, **changes})


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"usd_month": Decimal(0)}, "is no budget"),
        ({"workspaces": ()}, "name one of the two"),
        ({"project": "p", "workspaces": (DEMO,)}, "name one of the two"),
        ({"timezone": "Mars/Base"}, "not a time zone"),
    ],
)
def test_a_budget_that_cannot_be_is_refused(changes: dict[str, Any], words: str) -> None:
    fields: dict[str, Any] = {"usd_month": Decimal(5), "workspaces": (DEMO,), **changes}
    with pytest.raises(InvalidInput, match=words):
        Budget(name="lab", **fields)


def test_a_budget_is_for_its_workspaces_with_their_drills_or_for_a_project() -> None:
    mine = budget(5)
    assert mine.covers(DEMO, "")
    assert mine.covers(reserved_name(DRILL, DEMO), "p")
    assert not mine.covers(OTHER, "p")
    project = budget(5, project="p")
    assert project.covers(OTHER, "p")
    assert not project.covers(OTHER, "")


def test_it_counts_what_may_have_been_spent_since_its_month_began() -> None:
    """Months begin by the budget's time zone; what was certainly spent is said too."""
    begin = datetime(2026, 11, 1, tzinfo=BERLIN).timestamp()
    ran = rental(created_unix=begin - HOUR, seen_unix=begin + HOUR)
    now = budget_status(budget(10, timezone="Europe/Berlin"), [ran], begin + 2 * HOUR)
    assert (now.low, now.high, now.left) == (2_000_000, 4_000_000, 6_000_000)
    assert (now.running, now.usd_h, now.share) == (1, 2, 0.4)
    assert now.message() == (
        "budget lab: 2.00 to 4.00 $ of 10.00 $ spent in 2026-11 (Europe/Berlin), 6.00 $ left; "
        "1 open rental at 2 $/h"
    )
    in_utc = budget_status(budget(10), [ran], begin + 2 * HOUR)
    assert (in_utc.high, str(in_utc.month)) == (2_000_000, "2026-11")


def test_it_allows_what_it_can_pay_for_an_hour_beside_all_that_runs() -> None:
    now = budget_status(budget(10), [rental()], BEGIN + HOUR)  # 2 $ spent, 2 $ in the next hour
    assert now.refusal(6.0, 1) == now.refusal(3.0, 2) == ""
    assert "with 1 more at 6.001 $/h an hour would exceed" in now.refusal(6.001, 1)
    assert "with 2 more at 3.1 $/h" in now.refusal(3.1, 2)
    assert "or wait for 2026-12" in now.refusal(9.0, 1)
    assert RESERVE_S == HOUR
    assert budget_status(budget(4), [rental()], BEGIN + HOUR).refusal() == ""
    assert "another one" in budget_status(budget(3.99), [rental()], BEGIN + HOUR).refusal()


def test_an_unknown_price_is_refused_and_what_runs_at_one_is_named() -> None:
    now = budget_status(budget(10), [rental(price_usd_h=0.0)], BEGIN + 90 * 60)
    assert "1.5 hours at unknown prices not counted" in now.message()
    assert "its price is unknown" in now.refusal(0.0, 1)
    assert now.refusal(1.0, 1) == ""


def test_when_it_is_spent() -> None:
    two = [rental(), replace(rental(), price_usd_h=3.0)]
    assert exhausted_unix(budget(10), two, BEGIN + HOUR) == BEGIN + 2 * HOUR
    assert exhausted_unix(budget(5), two, BEGIN + HOUR) == BEGIN + HOUR
    assert exhausted_unix(budget(4), two, BEGIN + HOUR) == BEGIN + HOUR
    ended = [replace(ran, state="ended", ended_unix=BEGIN + HOUR) for ran in two]
    assert exhausted_unix(budget(10), ended, BEGIN + HOUR) is None
    assert exhausted_unix(budget(10), [rental(price_usd_h=0.0)], BEGIN + HOUR) is None


def test_a_month_that_begins_meanwhile_begins_with_nothing_spent() -> None:
    end = datetime(2026, 12, 1, tzinfo=BERLIN).timestamp()
    of = budget(10, timezone="Europe/Berlin")
    late = rental(created_unix=end - 4 * HOUR)
    assert exhausted_unix(of, [late], end - HOUR) == end + 5 * HOUR
    assert exhausted_unix(budget(2 * 24 * 31), [late], end - HOUR) == pytest.approx(
        datetime(2027, 1, 1, tzinfo=BERLIN).timestamp(), abs=HOUR
    )
    assert exhausted_unix(budget(2 * 24 * 31 + 3), [late], end - HOUR) is None


@given(
    usd=some.integers(1, 3000),
    spans=some.lists(
        some.tuples(some.integers(0, 60 * 24), some.integers(1, 900), some.booleans()),
        min_size=1,
        max_size=5,
    ),
)
def test_the_moment_when_it_is_spent_is_when_its_cost_reaches_it(
    usd: int, spans: list[tuple[int, int, bool]]
) -> None:
    """By the same count that decides what may be rented."""
    of, now = budget(usd, timezone="Europe/Berlin"), BEGIN + 60 * 24 * HOUR
    found: list[Rental] = []
    for began_h, cents, is_open in spans:
        begin = BEGIN + began_h * HOUR
        end = {} if is_open else {"state": "ended", "ended_unix": begin + 5 * HOUR}
        found.append(rental(created_unix=begin, price_usd_h=cents / 100, **end))
    at = exhausted_unix(of, found, now)
    if at is None:
        longest_h = 31 * 24 + 1  # October: the clocks are set back
        usd_h = sum(ran.price_usd_h for ran in found if ran.state != "ended")
        assert usd_h * longest_h <= usd + 1e-6
    elif at > now:
        assert budget_status(of, found, at - 1).high < 1_000_000 * usd
        assert budget_status(of, found, at + 1).high >= 1_000_000 * usd - len(found)
    else:
        assert budget_status(of, found, now).high >= 1_000_000 * usd


def test_its_records_are_those_of_its_workspaces_or_project(memory_store: MemoryStore) -> None:
    books = [Rentals(memory_store, name) for name in (DEMO, OTHER)]
    made = [book.begin(book.new_label("me"), H100, None, "p") for book in books]
    other = books[1].begin(books[1].new_label("me"), H100, None)
    now = made[0].created_unix
    of_project = OpenBudget(budget(5, project="p"), lambda: books)
    assert {ran.label for ran in of_project.rentals(now)} == {ran.label for ran in made}
    of_other = OpenBudget(budget(5, workspaces=(WorkspaceName("other"),)), lambda: books)
    assert {ran.label for ran in of_other.rentals(now)} == {made[1].label, other.label}
    memory_store.fails = StoreUnavailable("503")
    with pytest.raises(StoreUnavailable):
        of_other.status(now)
