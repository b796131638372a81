"""An account whose API key was changed has another name, and its rentals go over to it."""

from __future__ import annotations

import msgspec
import pytest

from tests.fixtures.market import Market
from tests.fixtures.rents import Rents
from torpor.control.rental.sweep import close_if_gone
from torpor.control.safety import never_handed_over

replace = msgspec.structs.replace


def _rename(rents: Rents, name: str) -> None:
    """Rent a machine, and change the key of its account."""
    before, rents.market = Market("vast://before"), Market(name)
    with rents.run(before) as run:
        run.rent(before.on_sale).hand_over()
    for machine in before.alive.values():
        rents.market.alive[machine.id] = replace(machine, provider=name)


@pytest.mark.rule(5)
def test_a_rental_goes_over_to_the_account_that_shows_its_machine(rents: Rents) -> None:
    _rename(rents, "vast://after")
    rents.run().end_abandoned()
    rental = rents.open()
    assert (rental.provider, rental.state) == ("vast://after", "handed over")
    (machine,) = rents.market.list_own()
    rents.run().end(rental, never_handed_over(machine, rental.label))
    assert rents.states() == ["ended"]
    assert rents.market.alive == {}


def test_the_account_is_on_record_from_the_first_watch_on(rents: Rents) -> None:
    """The machine may be taken back before anybody else looks."""
    _rename(rents, "vast://after")
    (machine,) = rents.market.list_own()
    assert not close_if_gone(rents.renter(), rents.open(), shown=machine)
    assert (rents.open().provider, rents.open().state) == ("vast://after", "handed over")
    rents.market.alive.clear()
    assert close_if_gone(rents.renter(), rents.open(), shown=None)
    assert rents.states() == ["ended"]


def test_a_look_shows_the_account_and_a_hibernation_ends_the_machine_there(rents: Rents) -> None:
    _rename(rents, "vast://after")
    ((machine, rental),) = rents.run().machines()
    assert rental is not None and rental.provider == "vast://after"
    recorded = rents.open()
    assert recorded.provider == "vast://before", "a look changes nothing"
    rents.run().end(recorded, never_handed_over(machine, rental.label), machine)
    assert (rents.market.alive, rents.ended().provider) == ({}, "vast://after")


@pytest.mark.rule(5)
def test_an_abandoned_machine_of_a_changed_key_is_ended(rents: Rents) -> None:
    _rename(rents, "vast://after")
    kept, (machine,) = rents.open().label, rents.market.list_own()
    label = rents.rentals.new_label("me")
    lost = rents.rentals.begin(label, rents.market.on_sale[0], None)
    rents.rentals.change(lost, state="abandoned", provider="vast://before")
    rents.market.alive["m9"] = replace(machine, label=label, id="m9")
    rents.run().end_abandoned()
    assert [live.label for live in rents.market.alive.values()] == [kept]


@pytest.mark.rule(5)
def test_what_is_gone_since_is_closed_once_a_block_names_the_account_from_before(
    rents: Rents,
) -> None:
    """Another account, which never had the machine, proves nothing, also under that name: its
    answers are absences."""
    _rename(rents, "vast://after")
    rents.market.alive.clear()
    rents.run().end_abandoned()
    assert rents.open().provider == "vast://before"
    rents.market.identity, rents.market.claimed = "vast://before", True  # by the block's `account`
    rents.change_market(settling_s=300.0)
    for later_s in (100, 400, 500, 800):
        rents.later(later_s)
        rents.run().end_abandoned()
        assert rents.states() == ["handed over"], later_s
    rents.later(1200)
    rents.run().end_abandoned()
    assert "without a proof" in rents.ended().why


def test_an_account_that_shows_a_machine_proves_its_end_under_any_name(rents: Rents) -> None:
    _rename(rents, "vast://before")
    rents.market.claimed = True
    ((machine, rental),) = rents.run().machines()
    rents.run().end(rental, never_handed_over(machine, rental.label))
    assert rents.ended().why == "404, and not in the list"
