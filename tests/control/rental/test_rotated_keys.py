"""An account whose API key was changed has another name, and its rentals go over to it."""

from __future__ import annotations

import time

import asyncssh
import pytest

from tests.fixtures.market import Hears, Market
from tests.fixtures.memory_store import MemoryStore
from torpor.control.rental import renting
from torpor.control.rental.markets import Markets
from torpor.control.rental.records import Rentals
from torpor.control.rental.renting import Renter, Renting
from torpor.control.safety import never_handed_over
from torpor.shared.values import Want, WorkspaceName


@pytest.fixture
def rentals(memory_store: MemoryStore) -> Rentals:
    return Rentals(memory_store, WorkspaceName("demo"))


def _rented(rentals: Rentals, monkeypatch: pytest.MonkeyPatch, name: str) -> tuple[Market, Renter]:
    """A machine of the account before its key was changed, and who rents there now."""
    monkeypatch.setattr(renting, "greeting_fault", lambda endpoint, host_key: None)
    identity = asyncssh.generate_private_key("ssh-ed25519")
    before, now = Market("vast://before"), Market(name)
    with Renting(Renter(rentals, Markets([before]), "me", Want(), identity, Hears())) as held:
        held.rent(before.on_sale).hand_over()
    for machine in before.alive.values():
        now.alive[machine.id] = renting.msgspec.structs.replace(machine, provider=name)
    return now, Renter(rentals, Markets([now]), "me", Want(), identity, Hears())


def test_a_rental_goes_over_to_the_account_that_shows_its_machine(
    rentals: Rentals, monkeypatch: pytest.MonkeyPatch
) -> None:
    market, renter = _rented(rentals, monkeypatch, "vast://after")
    ((machine, _),) = Renting(renter).machines()
    (rental,) = rentals.open()
    assert (rental.provider, rental.state) == ("vast://after", "handed over")
    Renting(renter).end(rental, never_handed_over(machine, rental.label))
    assert rentals.open() == []
    assert market.alive == {}


def test_an_abandoned_machine_of_a_changed_key_is_ended(
    rentals: Rentals, monkeypatch: pytest.MonkeyPatch
) -> None:
    market, renter = _rented(rentals, monkeypatch, "vast://after")
    (rental,) = rentals.open()
    label = rentals.new_label("me")
    lost = rentals.begin(label, market.on_sale[0], None)
    rentals.change(lost, state="abandoned", provider="vast://before")
    machine = renting.msgspec.structs.replace(
        next(iter(market.alive.values())), label=label, id="m9"
    )
    market.alive[machine.id] = machine
    Renting(renter).end_abandoned()
    assert [one.label for one in market.alive.values()] == [rental.label]


def test_what_is_gone_since_is_closed_once_a_block_names_the_account_from_before(
    rentals: Rentals, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another account, which never had the machine, proves nothing, also under that name: its
    answers are absences."""
    market, renter = _rented(rentals, monkeypatch, "vast://after")
    market.alive.clear()
    Renting(renter).end_abandoned()
    assert [one.provider for one in rentals.open()] == ["vast://before"]
    market.identity, market.claimed = "vast://before", True  # as the block's ``account`` says
    market.abilities = renting.msgspec.structs.replace(market.abilities, settling_s=300.0)
    now = time.time()
    for later_s in (100, 400, 500, 800):
        monkeypatch.setattr(time, "time", lambda later_s=later_s: now + later_s)
        Renting(renter).end_abandoned()
        assert len(rentals.open()) == 1, later_s
    monkeypatch.setattr(time, "time", lambda: now + 1200)
    Renting(renter).end_abandoned()
    assert rentals.open() == []
    assert "without a proof" in rentals.history()[0].why


def test_an_account_that_shows_a_machine_proves_its_end_under_any_name(
    rentals: Rentals, monkeypatch: pytest.MonkeyPatch
) -> None:
    market, renter = _rented(rentals, monkeypatch, "vast://before")
    market.claimed = True
    ((machine, rental),) = Renting(renter).machines()
    assert rental is not None
    Renting(renter).end(rental, never_handed_over(machine, rental.label))
    assert [one.why for one in rentals.history()] == ["404, and not in the list"]
