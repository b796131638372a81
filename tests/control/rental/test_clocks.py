"""Renting on hosts whose clocks differ by an hour."""

from __future__ import annotations

import asyncssh
import msgspec
import pytest

from tests.fixtures.contest import HOUR_S, ContestedStore
from tests.fixtures.market import H100, Hears, Market
from torpor.control.rental import renting
from torpor.control.rental.markets import Markets
from torpor.control.rental.records import Rentals
from torpor.control.rental.renting import Renter, Renting
from torpor.shared.errors import HandedOver
from torpor.shared.values import Want, WorkspaceName

DEMO = WorkspaceName("demo")


@pytest.fixture(autouse=True)
def answers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every machine answers SSH at once."""
    monkeypatch.setattr(renting, "greeting_fault", lambda endpoint, host_key: None)


@pytest.fixture(scope="module")
def identity() -> asyncssh.SSHKey:
    return asyncssh.generate_private_key("ssh-ed25519")


@pytest.fixture
def market() -> Market:
    return Market()


def _states(rentals: Rentals) -> list[str]:
    return [rental.state for rental in (*rentals.history(), *rentals.open())]


@pytest.mark.parametrize("ahead_s", [HOUR_S, -HOUR_S])
def test_a_machine_that_another_run_hands_over_meanwhile_is_seen_whatever_its_clock_says(
    ahead_s: float, market: Market, identity: asyncssh.SSHKey
) -> None:
    contested = ContestedStore()
    rentals = Rentals(contested, DEMO)
    renter = Renter(rentals, Markets([market]), "me", Want(), identity, Hears())
    with contested.host(ahead_s):  # it has gone, and nobody has proven that
        Renting(renter).rent(market.on_sale).hand_over()
    mine, theirs = Renting(renter), Renting(renter)
    with contested.host():
        assert len(mine.machines()) == 1
        tenancy = mine.rent(market.on_sale)
    with contested.host(ahead_s):
        theirs.machines()
        other = theirs.rent(market.on_sale)
        other.hand_over(alone=True)
    with contested.host(), pytest.raises(HandedOver, match=f"machine {other.machine.id}.*use that"):
        tenancy.hand_over(alone=True)


@pytest.mark.parametrize("ahead_s", [HOUR_S, -HOUR_S])
def test_a_request_is_given_up_by_its_age_whatever_clocks_say(
    ahead_s: float, market: Market, identity: asyncssh.SSHKey
) -> None:
    """One of another run that goes on now, by a host with another clock, is not ended."""
    contested = ContestedStore()
    rentals = Rentals(contested, DEMO)
    held = Renting(Renter(rentals, Markets([market]), "me", Want(), identity, Hears()))
    with contested.host(ahead_s):
        rentals.begin(rentals.new_label("me"), H100, None)
    with contested.host():
        held.end_abandoned()
        assert _states(rentals) == ["asked"]
    contested.pass_time(renting.ASKED_S + 10)
    with contested.host():
        held.end_abandoned()
        assert _states(rentals) != ["asked"]


@pytest.mark.parametrize("ahead_s", [HOUR_S, -HOUR_S])
def test_absences_are_counted_whatever_the_clocks_of_the_looking_hosts_say(
    ahead_s: float, market: Market, identity: asyncssh.SSHKey
) -> None:
    market.abilities = msgspec.structs.replace(market.abilities, settling_s=600.0, forgets_s=3600.0)
    contested = ContestedStore()
    rentals = Rentals(contested, DEMO)
    renter = Renter(rentals, Markets([market]), "me", Want(), identity, Hears())
    with contested.host(ahead_s):
        Renting(renter).rent(market.on_sale).hand_over()
    market.alive.clear()
    market.proofs = False
    for passed_s, host_s, looks in ((3700, ahead_s, 1), (300, 0.0, 1), (400, 0.0, 2)):
        contested.pass_time(passed_s)
        with contested.host(host_s):
            Renting(renter).end_abandoned()
            assert [len(one.absent_unix) for one in rentals.open()] == [looks]
    contested.pass_time(700)
    with contested.host(ahead_s):
        Renting(renter).end_abandoned()
        assert rentals.open() == []
