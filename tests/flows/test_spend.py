"""The flow that says what rentals and storage cost, over records in memory."""

from __future__ import annotations

import time
from dataclasses import replace
from datetime import UTC, datetime
from decimal import Decimal

import pandas
import pytest

from flows import create, spend
from tests.fixtures.lab import DEMO, Lab
from tests.fixtures.plain_flows import Shows, plain, run_plainly
from torpor.control.rental.records import Rentals
from torpor.control.store_prices import StorePrice
from torpor.shared.errors import InvalidInput, ProviderUnavailable
from torpor.shared.values import DRILL, ObjectKey, reserved_name

HOUR = 3600.0


def test_it_counts_every_workspace_of_the_store_and_shows_it(
    lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    moment, later_s = time.time, (15 - datetime.now(UTC).day) * 24 * HOUR
    monkeypatch.setattr(time, "time", lambda: moment() + later_s)  # four hours of one month
    now = time.time()
    lab.record(state="handed over", machine="gone", created_unix=now - 3 * HOUR,
               seen_unix=now - 2 * HOUR)  # fmt: skip
    lab.record("other", machine="m", price_usd_h=0.0, created_unix=now - HOUR, seen_unix=now,
               state="handed over")  # fmt: skip
    lab.record(reserved_name(DRILL, DEMO), created_unix=now - HOUR)
    lab.store.put(ObjectKey("workspaces/demo/packs/aa/x"), b"x" * 1000)
    price = StorePrice(0.02, 0, "2026-08-03", "https://x")
    opened = replace(lab.limited(50), store_price=lambda: price)
    with Shows(opened) as shows:
        table = spend.fn(DEMO, months=2)
    assert isinstance(table, pandas.DataFrame)
    machines = table[table.kind == "machines"]
    assert set(machines.workspace) == {"demo", "other"}
    of_demo = machines[machines.workspace == "demo"]
    assert of_demo.low_usd.sum() == pytest.approx(Decimal(4), abs=Decimal("0.01"))
    assert of_demo.high_usd.sum() == pytest.approx(Decimal(16), abs=Decimal("0.01"))
    assert set(of_demo.gpu) == {"2 x H100 SXM"}
    assert set(of_demo.project) == {"research"}
    assert machines.unpriced_hours.sum() == pytest.approx(1, abs=0.01)
    kept = table[table.kind == "storage"].set_index("workspace")
    assert kept.stored_bytes["demo"] > 1000
    assert kept.stored_usd_month["demo"] >= Decimal("0")
    assert any(row["cost"].startswith("4.00 to 16.0") for row in shows.rows)
    for words in ("## Machines by month (UTC)", "## Budgets of this workspace", "budget lab: ",
                  "## Storage", "[2026-08-03](https://x)", "Not counted: traffic"):  # fmt: skip
        assert words in shows.markdown


def test_a_machine_that_its_provider_shows_costs_until_now_for_certain(lab: Lab) -> None:
    """Its record says when it was seen last; where the provider is away, that is all there is."""
    run_plainly(lab.opened, create)
    (rental,) = lab.opened.rentals.open()
    early = time.time() - 5 * HOUR
    lab.opened.rentals.change(rental, created_unix=early, seen_unix=early)
    table = run_plainly(lab.opened, spend)
    assert table.low_usd.sum() == table.high_usd.sum() > 19
    lab.market.away = ProviderUnavailable("away")
    table = run_plainly(lab.opened, spend)
    assert table.low_usd.sum() == 0
    assert table.high_usd.sum() > 19


def test_the_page_names_what_was_rented_for_most_of_a_month(lab: Lab) -> None:
    now = time.time()
    lab.record(machine="m", state="ended", created_unix=now - 1500 * HOUR, seen_unix=now - HOUR,
               ended_unix=now - HOUR)  # fmt: skip
    lab.record(machine="n", state="ended", created_unix=now - 1500 * HOUR, gpu="A10",
               seen_unix=now - 1400 * HOUR, ended_unix=now - 1400 * HOUR)  # fmt: skip
    with Shows(lab.opened) as shows:
        spend.fn(DEMO, months=3)
    (line,) = [line for line in shows.markdown.splitlines() if "reservation" in line]
    assert line.startswith("A reservation may cost less: 2 x H100 SXM at vast:1 (7")
    assert "A10" not in line


def test_earlier_months_are_left_out(lab: Lab) -> None:
    lab.record(created_unix=time.time() - 100 * 24 * HOUR)
    assert run_plainly(lab.opened, spend, months=1).query("kind == 'machines'").month.nunique() == 1
    assert run_plainly(lab.opened, spend, months=3).query("kind == 'machines'").month.nunique() == 3


def test_a_machine_that_ends_was_seen_until_its_end(lab: Lab) -> None:
    """So that what a hibernate ends has one cost and no interval of days."""
    from tasks.machines import create_machine, look_for_offers, renting
    from torpor.control.safety import never_handed_over

    with plain(lab.opened), renting(lab.opened) as held:
        tenancy = create_machine(held, look_for_offers(lab.opened))
        rental = Rentals(lab.store, DEMO).of(tenancy.machine.label)  # type: ignore[arg-type]
        assert rental is not None
        begun = time.time()
        held.end(rental, never_handed_over(tenancy.machine, rental.label))
    (ended,) = lab.opened.rentals.history()
    assert (ended.seen_unix or 0) >= begun


def test_nothing_is_an_empty_table(lab: Lab) -> None:
    with Shows(lab.opened) as shows:
        table = spend.fn(DEMO)
    assert list(table.columns[:2]) == ["month", "kind"]
    assert table.empty
    assert shows.rows == [{"result": "nothing was rented or stored"}]
    with pytest.raises(InvalidInput, match="not a time zone"):
        run_plainly(lab.opened, spend, timezone="Mars/Base")


@pytest.mark.parametrize("price", [None, StorePrice(0.0, 0.0, "2026-08-03", "its owner")])
def test_a_store_without_a_known_price_is_named_with_the_setting(
    lab: Lab, price: StorePrice | None, caplog: pytest.LogCaptureFixture
) -> None:
    run_plainly(replace(lab.opened, store_price=lambda: price), spend)
    assert ("price_gb_month_usd" in caplog.text) is (price is None)
