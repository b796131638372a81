"""What a budget cannot pay for is not rented, whichever flow asks."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from decimal import Decimal
from typing import Any

import msgspec
import pytest

from flows import create, replicate, wake
from flows.procedures.drill_machine import drill_machine
from flows.procedures.scratch_machine import scratch_machine
from tasks.budgets import what_is_left
from tasks.machines import create_machine, look_for_offers, renting
from tasks.workspace import OpenWorkspace
from tests.fixtures.lab import DEMO, Lab
from tests.fixtures.manifests import PLAIN, SNAPSHOT, entry, honest
from tests.fixtures.market import H100
from tests.fixtures.plain_flows import plain, run_plainly
from tests.fixtures.waiting import PATIENCE_S
from torpor.control.money.budgets import Budget, OpenBudget
from torpor.control.rental.records import Rentals
from torpor.shared.errors import BudgetExceeded, InvalidInput, StoreUnavailable
from torpor.shared.format.manifest import DIRECTORY, encode_manifest
from torpor.shared.format.names import manifest_key
from torpor.shared.values import DRILL, GIB, WorkspaceName, reserved_name

Flow = Callable[[OpenWorkspace], Any]


def _drill(opened: OpenWorkspace) -> None:
    with plain(opened), drill_machine(opened):
        raise AssertionError("it was rented")


def _benchmark(opened: OpenWorkspace) -> None:
    with plain(opened), scratch_machine(opened, DEMO, ""):
        raise AssertionError("it was rented")


RENT: dict[str, Flow] = {
    "create": lambda opened: run_plainly(opened, create),
    "wake": lambda opened: run_plainly(opened, wake),
    "replicate": lambda opened: run_plainly(opened, replicate, count=1),
    "drill": _drill,
    "benchmark": _benchmark,
}


@pytest.fixture
def snapshot(lab: Lab) -> None:
    lab.store.put(
        manifest_key(DEMO, SNAPSHOT),
        encode_manifest(honest(entries=[entry(DIRECTORY, b"")], chunks=[], packs=[]), PLAIN)[0],
    )


@pytest.mark.rule(15)
@pytest.mark.usefixtures("snapshot")
@pytest.mark.parametrize("name", RENT)
def test_what_a_budget_cannot_pay_for_an_hour_is_not_rented(lab: Lab, name: str) -> None:
    with pytest.raises(BudgetExceeded, match=r"1 more at 4 \$/h.*would exceed.*raise the budget"):
        RENT[name](lab.limited(3.9))
    assert lab.market.orders == []
    assert lab.states() == []  # and nothing is recorded as rented


def test_what_it_can_pay_for_is_rented_and_counts_from_then_on(lab: Lab) -> None:
    opened = lab.limited(8.1)
    machine = run_plainly(opened, create)
    assert [machine.id] == [*lab.market.alive]
    (rental,) = opened.rentals.open()
    assert (rental.project, rental.price_usd_h) == ("research", 4.0)
    with pytest.raises(BudgetExceeded, match="1 open rental at 4 "), plain(opened):
        look_for_offers(opened, 2)
    with plain(opened):
        assert look_for_offers(opened, 1).fitting == lab.market.on_sale
    (words,) = what_is_left(opened)
    assert "0.00 $ of 8.10 $ spent" in words
    assert "8.10 $ left" in words


@pytest.mark.rule(15)
def test_as_many_machines_as_are_asked_for_must_be_paid_for(lab: Lab) -> None:
    with plain(lab.limited(31)) as _, pytest.raises(BudgetExceeded, match=r"8 more at 4 \$/h"):
        look_for_offers(lab.limited(31), 8)
    with plain(lab.limited(32)):
        look_for_offers(lab.limited(32), 8)


def test_a_workspace_that_takes_long_to_hibernate_needs_more(
    lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    """100 GiB take 1.4 hours: watch would hibernate its machine at once."""
    monkeypatch.setattr("tasks.budgets.newest_stored_bytes", lambda opened: 100 * GIB)
    with pytest.raises(BudgetExceeded, match=r"1 more at 4 \$/h 1\.9 hours would exceed"):
        run_plainly(lab.limited(7.5), create)
    with plain(lab.limited(7.6)):
        assert look_for_offers(lab.limited(7.6)).fitting


def test_other_workspaces_of_the_budget_count_and_no_others(lab: Lab) -> None:
    lab.record("other")
    run = lab.limited(7.9, "demo", "other")
    with pytest.raises(BudgetExceeded):
        run_plainly(run, create)
    with pytest.raises(BudgetExceeded):
        run_plainly(lab.limited(7.9, "demo", "other", workspaces=(), project="research"), create)
    for other in (
        lab.limited(3, "other"),
        lab.limited(3, "other", workspaces=(), project="sales"),
    ):
        with plain(other):
            assert look_for_offers(other).fitting == lab.market.on_sale


def test_a_drill_counts_for_its_workspace(lab: Lab) -> None:
    lab.record(reserved_name(DRILL, DEMO))
    with pytest.raises(BudgetExceeded, match="1 open rental"):
        run_plainly(lab.limited(7.9), create)


@pytest.mark.rule(15)
def test_an_offer_without_a_price_is_refused_and_one_that_fits_is_taken(lab: Lab) -> None:
    unknown = msgspec.structs.replace(H100, id="0", price_usd_h=0.0)
    dear = msgspec.structs.replace(H100, id="2", price_usd_h=9.0)
    lab.market.on_sale = [dear, unknown, *lab.market.on_sale]
    opened = lab.limited(5)
    with plain(opened):
        offers = look_for_offers(opened)
    assert [one.id for one in offers.fitting] == ["1"]
    assert {one.offer: "price is unknown" in one.outcome for one in offers.refused} == {
        "0": True,
        "2": False,
    }
    lab.market.on_sale = [unknown]
    with pytest.raises(BudgetExceeded, match="its price is unknown"):
        run_plainly(opened, create)


def test_an_offer_that_no_budget_was_asked_about_is_refused_for_its_price(lab: Lab) -> None:
    """A replicate that finds enough machines left by an earlier one asks about none, and may still
    have to replace one."""
    unknown = msgspec.structs.replace(H100, price_usd_h=0.0)
    opened = lab.limited(500)
    with plain(opened), pytest.raises(BudgetExceeded, match="its price is unknown"):
        renting(opened).rent([unknown])
    assert lab.market.orders == []
    assert lab.states() == ["ended"]


@pytest.mark.rule(15)
def test_a_run_that_recorded_its_rental_meanwhile_is_seen(
    lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both runs have looked before either has recorded anything: at most one rents."""
    opened, both = lab.limited(7.9), threading.Barrier(2)
    with plain(opened):
        offers = look_for_offers(opened)
    begin = Rentals.begin

    def together(self: Rentals, *args: Any) -> Any:
        rental = begin(self, *args)
        both.wait(PATIENCE_S)
        return rental

    monkeypatch.setattr(Rentals, "begin", together)
    faults: list[BaseException] = []

    def run() -> None:
        try:
            with plain(opened), renting(opened) as held:
                create_machine(held, offers).hand_over()
        except BudgetExceeded as error:
            faults.append(error)

    runs = [threading.Thread(target=run) for _ in range(2)]
    for one in runs:
        one.start()
    for one in runs:
        one.join()
    assert faults
    assert len(lab.market.alive) + len(faults) == 2
    assert lab.states().count("ended") == len(faults)
    assert all("nothing was rented" in one.why for one in opened.rentals.history())


@pytest.mark.rule(15)
def test_a_budget_whose_workspaces_are_not_known_stops_only_what_it_may_cover(lab: Lab) -> None:
    def bad(*names: str) -> OpenBudget:
        covered = tuple(WorkspaceName(name) for name in names)
        value = Budget(name="bad", usd_month=Decimal(5), workspaces=covered)
        return OpenBudget(value, tuple, "budget bad: there is no block workspace/gone")

    covered = replace(lab.opened, budgets=lambda: [bad("gone", "demo")])
    words = "budget bad: there is no block workspace/gone"
    with plain(covered), pytest.raises(InvalidInput, match=words):
        look_for_offers(covered)
    other = replace(lab.opened, budgets=lambda: [bad("gone")])
    with plain(other):
        assert look_for_offers(other).fitting


@pytest.mark.rule(15)
def test_records_that_cannot_be_read_rent_nothing(lab: Lab) -> None:
    opened = lab.limited(100)
    with plain(opened):
        offers = look_for_offers(opened)
        real, fails = Rentals.open, StoreUnavailable("503")

        def away(self: Rentals, *_: Any) -> Any:
            raise fails

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Rentals, "open", away)
            patch.setattr(Rentals, "since", away)
            with pytest.raises(StoreUnavailable), renting(opened) as held:
                create_machine(held, offers)
            (words,) = what_is_left(opened)
            assert "is not known: 503" in words
        assert Rentals.open is real
    assert lab.market.orders == []
    assert lab.states() == []
