"""Months, intervals and exact sums."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime
from decimal import Decimal
from typing import Any
from zoneinfo import ZoneInfo

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as some

from tests.fixtures.market import H100
from tests.fixtures.memory_store import MemoryStore
from torpor.control.money.costs import HOUR_US, charge, costs, dollars, read, shown_now
from torpor.control.money.fleet import workspace_costs
from torpor.control.money.months import Month, microseconds, split
from torpor.control.money.spending import frame, lines, rows
from torpor.control.money.storage import look, stored, workspaces
from torpor.control.rental.records import Rental, Rentals
from torpor.control.store_prices import StorePrice
from torpor.shared.values import (
    BENCHMARK_MACHINES,
    DRILL,
    Label,
    MachineId,
    ObjectKey,
    StoredObject,
    WorkspaceName,
    reserved_name,
)

BERLIN, UTC = ZoneInfo("Europe/Berlin"), ZoneInfo("UTC")
DEMO, OTHER = WorkspaceName("demo"), WorkspaceName("other")
BEGIN = datetime(2026, 11, 1, 12, tzinfo=UTC).timestamp()
replace = msgspec.structs.replace


def rental(**changes: Any) -> Rental:
    """Handed over at BEGIN, and last seen an hour later; 2 $ an hour."""
    given: dict[str, Any] = {
        "label": Label("me", DEMO, "r1"),
        "provider": "vast:1",
        "state": "handed over",
        "created_unix": BEGIN,
        "machine": MachineId("m1"),
        "seen_unix": BEGIN + 3600,
        "price_usd_h": 2.0,
        "gpu": "H100 SXM",
        "gpu_count": 2,
    }
    return Rental(**{**given, **changes})


def hours(rented: Rental, now_h: float = 10) -> tuple[float, float]:
    """At least and at most, ``now_h`` hours after BEGIN."""
    found = costs([rented], BEGIN + 3600 * now_h, UTC)
    return sum(c.low_us for c in found) / HOUR_US, sum(c.high_us for c in found) / HOUR_US


def test_months_begin_when_the_zone_s_clocks_say_so() -> None:
    march = Month(2026, 3)
    assert [str(march.plus(n)) for n in (-3, 0, 9, 10)] == [
        "2025-12", "2026-03", "2026-12", "2027-01",
    ]  # fmt: skip
    span = march.begin_us(BERLIN), march.plus(1).begin_us(BERLIN)
    assert (span[1] - span[0]) / HOUR_US == 31 * 24 - 1
    assert march.begin_us(BERLIN) == march.begin_us(UTC) - HOUR_US


@given(
    begin=some.integers(1_400_000_000, 2_000_000_000),
    length_s=some.integers(0, 10**8),
    zone=some.sampled_from(["UTC", "Europe/Berlin", "America/Havana", "Pacific/Auckland"]),
)
def test_no_microsecond_of_a_span_is_lost_or_counted_twice(
    begin: int, length_s: int, zone: str
) -> None:
    end = begin + length_s
    found = list(split(microseconds(begin), microseconds(end), ZoneInfo(zone)))
    assert sum(us for _, us in found) == 10**6 * length_s
    months = [month for month, _ in found]
    assert months == sorted(set(months))


FIVE = BEGIN + 5 * 3600
UNSEEN = {"machine": None, "seen_unix": None}


@pytest.mark.parametrize(
    ("changes", "now_h", "low", "high"),
    [
        ({}, 10, 1, 10),  # until it was last seen at least, and until now at most
        ({"state": "ended", "ended_unix": FIVE}, 10, 1, 5),  # between its last sight and the proof
        ({"state": "ended", "ended_unix": FIVE, "seen_unix": FIVE}, 10, 5, 5),
        ({"state": "ended", "ended_unix": FIVE, **UNSEEN}, 10, 0, 0),
        ({"state": "asked", **UNSEEN}, 10, 0, 10),
        ({"state": "abandoned", **UNSEEN}, 10, 0, 10),
        ({"state": "standing", "queued_unix": BEGIN + 4 * 3600}, 10, 0, 6),  # a queue costs nothing
        ({"state": "standing", "queued_unix": BEGIN - 60}, 10, 1, 10),
        ({}, -1, 0, 0),  # clocks that differ make no negative cost
        ({"seen_unix": BEGIN + 11 * 3600}, 10, 10, 10),
        ({"seen_unix": BEGIN - 1}, 10, 0, 10),
    ],
)
def test_a_rental_costs_at_least_and_at_most(
    changes: dict[str, Any], now_h: float, low: float, high: float
) -> None:
    assert hours(rental(**changes), now_h) == (low, high)


def test_what_is_shown_now_is_seen_now_unless_it_has_ended() -> None:
    now, ended = BEGIN + 36_000, rental(state="ended", ended_unix=FIVE)
    (seen,) = shown_now([rental()], {rental().label: None}, now)
    assert hours(seen) == (10, 10)
    assert shown_now([rental()], {}, now) == [rental()]
    assert shown_now([ended], {ended.label: None}, now) == [ended]


def test_a_price_that_changes_counts_with_its_bound_and_an_unknown_one_is_hours() -> None:
    bound = rental(price_usd_h=0.0, most_usd_h=6.0)
    found = [rental(), rental(most_usd_h=6.0), rental(price_usd_h=0.0), bound]
    counted = costs(found, BEGIN + 3600, UTC)
    assert [(cost.low, cost.high, cost.unpriced_us) for cost in counted] == [
        (2_000_000, 2_000_000, 0),
        (2_000_000, 6_000_000, 0),
        (0, 0, HOUR_US),
        (0, 6_000_000, 0),
    ]


def test_money_is_exact_to_the_micro_dollar() -> None:
    assert charge(0.1, 3 * HOUR_US) == 300_000  # 0.30000000000000004 in floats
    assert charge(1.0, HOUR_US // 3) == 333_333
    assert dollars(123_456_789_012) == Decimal("123456.789012")


def test_a_rental_that_ends_while_records_are_read_is_counted_once(
    memory_store: MemoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    rentals = Rentals(memory_store, DEMO)
    first = rentals.begin(rentals.new_label("me"), H100, None, "p")
    listed, was = memory_store.list, [first]

    def ends(prefix: str) -> Iterator[StoredObject]:
        found = [*listed(prefix)]
        while was:
            rentals.change(was.pop(), state="ended")
        return iter(found)

    monkeypatch.setattr(memory_store, "list", ends)
    (only,) = read([rentals])
    assert (only.label, only.state, only.project) == (first.label, "ended", "p")


def test_history_reads_only_what_ended_since(memory_store: MemoryStore) -> None:
    """By the store's clock, and a day more."""
    rentals = Rentals(memory_store, DEMO)
    ended = rentals.change(rentals.begin(rentals.new_label("me"), H100, None), state="ended")
    at = ended.ended_unix or 0
    assert read([rentals], at) == [ended]
    assert read([rentals], at + 23 * 3600) == [ended]
    assert read([rentals], at + 25 * 3600) == []
    assert read([], at) == []


def test_lines_are_by_month_project_workspace_provider_and_gpu() -> None:
    end = datetime(2026, 12, 1, 6, tzinfo=UTC).timestamp()
    ended = {"state": "ended", "seen_unix": end, "ended_unix": end}
    found = [
        rental(project="p", **ended),
        rental(project="p", spot=True, created_unix=end - 3600, **ended),
        rental(
            label=Label("me", reserved_name(DRILL, DEMO), "r2"), gpu="", created_unix=end - 36,
            price_usd_h=0.0, **ended,
        ),
    ]  # fmt: skip
    of = workspaces({DEMO: 1, reserved_name(DRILL, DEMO): 1})
    counted = costs(found, end + 5, UTC)
    month = Month(2026, 12)
    kept = stored({DEMO: 2 * 10**9}, StorePrice(0.015, 0, "", ""))
    made = lines(counted, of, kept, "s3://b", month)
    table = frame(made)
    assert list(zip(table.month, table.kind, table.project, table.gpu, strict=True)) == [
        ("2026-12", "machines", "p", "2 x H100 SXM"),
        ("2026-12", "machines", "", ""),
        ("2026-12", "storage", "", ""),
        ("2026-11", "machines", "p", "2 x H100 SXM"),
    ]
    assert set(table.workspace) == {DEMO}
    assert list(table.low_usd) == [Decimal(14), Decimal(0), Decimal(0), Decimal(1416)]
    assert list(table.unpriced_hours) == [0, 0.01, 0, 0]
    assert table.spot_share.tolist()[::3] == [pytest.approx(1 / 7), 0]
    assert list(table.rentals) == [2, 1, 0, 1]
    assert table.stored_usd_month[2] == Decimal("0.03")
    shown = rows(made)
    assert shown[1]["of unknown price"] == "0.01"
    assert shown[2]["cost"] == "0.03 $ a month, as it is now"
    assert (shown[0]["cost"], shown[0]["hours"], shown[0]["spot"]) == ("14.00 $", "7.00", "14 %")
    assert rows([]) == [{"result": "nothing was rented or stored"}]
    assert list(frame([]).columns) == list(table.columns)
    many = rows(made * 100)
    assert len(many) == 201
    assert many[-1]["month"] == "and 200 more: in Python, spend returns them all"
    (line,) = lines(costs([rental()], BEGIN + 36_000, UTC), {})
    assert (line.row()["cost"], line.row()["hours"]) == ("2.00 to 20.00 $", "1.00 to 10.00")


def test_storage_is_by_workspace_with_its_benchmarks_and_drills(memory_store: MemoryStore) -> None:
    for name in (DEMO, OTHER, reserved_name(DRILL, DEMO), reserved_name(BENCHMARK_MACHINES, DEMO)):
        memory_store.put(ObjectKey(f"workspaces/{name}/x"), b"12345")
    memory_store.put(ObjectKey("elsewhere"), b"1")
    names = look(memory_store)
    found = [(kept.workspace, kept.bytes, kept.usd_month) for kept in stored(names, None)]
    assert found == [(DEMO, 15, None), (OTHER, 5, None)]
    long = WorkspaceName("a" * 63)
    assert workspaces({reserved_name(DRILL, long): 1, long: 1})[reserved_name(DRILL, long)] == long


def test_costs_of_a_workspace_now_today_and_this_month() -> None:
    """A machine on demand since the last evening, and a spot machine that ended this morning."""
    noon = datetime(2026, 11, 5, 12, tzinfo=UTC).timestamp()
    steady = rental(created_unix=noon - 18 * 3600, seen_unix=noon, project="ml")
    spot = rental(
        state="ended", spot=True, project="ml", price_usd_h=1.0, created_unix=noon - 10 * 3600,
        seen_unix=noon - 8 * 3600, ended_unix=noon - 8 * 3600,
    )  # fmt: skip
    of = {one.spot: one for one in workspace_costs(DEMO, "ml", [steady, spot], noon)}
    assert (of[False].usd_h, of[False].day_usd, of[False].month_usd) == (2.0, 24.0, 36.0)
    assert (of[True].usd_h, of[True].day_usd, of[True].month_usd) == (0.0, 2.0, 2.0)
    assert (of[False].gpus, of[True].gpus) == (2, 0)
    month = [cost.high for cost in costs([steady, spot], noon, UTC)]
    assert sum(month) == 38_000_000  # as `spend` and budgets count


@pytest.mark.rule(3)
def test_a_sum_with_an_unknown_price_is_not_known() -> None:
    unknown = rental(price_usd_h=0.0)
    ended = rental(price_usd_h=0.0, state="ended", spot=True, ended_unix=BEGIN + 3600)
    at_unix = BEGIN + 3 * 86400
    of = {one.spot: one for one in workspace_costs(DEMO, "", [unknown, ended], at_unix)}
    assert (of[False].usd_h, of[False].day_usd, of[False].month_usd) == (None, None, None)
    assert (of[True].usd_h, of[True].day_usd, of[True].month_usd) == (0.0, 0.0, None)


def test_what_has_taken_no_time_and_what_waits_at_its_provider_costs_nothing() -> None:
    never = rental(price_usd_h=0.0, machine=None, seen_unix=None, state="ended", ended_unix=FIVE)
    at_unix = BEGIN + 86400
    queued = rental(state="standing", queued_unix=at_unix)
    of = {one.spot: one for one in workspace_costs(DEMO, "", [never, queued], at_unix)}
    assert (of[False].usd_h, of[False].gpus, of[False].month_usd) == (0.0, 0, 0.0)
    begun = replace(queued, queued_unix=at_unix - 300)  # it starts, and does not answer yet
    (cost, _) = workspace_costs(DEMO, "", [begun], at_unix)
    assert (cost.usd_h, cost.gpus) == (2.0, 2)


def test_a_machine_of_this_host_without_a_price_costs_nothing_and_is_no_unknown_cost() -> None:
    local = rental(provider="local:///home/me/machines", price_usd_h=0.0)
    of = {one.spot: one for one in workspace_costs(DEMO, "", [local], BEGIN + 86400)}
    assert (of[False].usd_h, of[False].month_usd) == (0.0, 0.0)
