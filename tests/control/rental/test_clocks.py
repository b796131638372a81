"""Renting on hosts whose clocks differ by an hour."""

from __future__ import annotations

import pytest

from tests.fixtures.contested_store import HOUR_S, ContestedStore
from tests.fixtures.market import H100
from tests.fixtures.rents import Rents
from torpor.control.rental import sweep
from torpor.shared.errors import HandedOver

pytestmark = pytest.mark.parametrize("ahead_s", [HOUR_S, -HOUR_S])


@pytest.fixture
def contested() -> ContestedStore:
    return ContestedStore()


@pytest.fixture
def rents(contested: ContestedStore, monkeypatch: pytest.MonkeyPatch) -> Rents:
    return Rents(contested, monkeypatch)


@pytest.mark.rule(18)
def test_a_machine_that_another_run_hands_over_meanwhile_is_seen_whatever_its_clock_says(
    ahead_s: float, rents: Rents, contested: ContestedStore
) -> None:
    on_sale = rents.market.on_sale
    with contested.host(ahead_s):  # it has gone, and nobody has proven that
        rents.handed_over()
    mine, theirs = rents.run(), rents.run()
    with contested.host():
        assert len(mine.machines()) == 1
        tenancy = mine.rent(on_sale)
    with contested.host(ahead_s):
        theirs.machines()
        other = theirs.rent(on_sale)
        other.hand_over(alone=True)
    with contested.host(), pytest.raises(HandedOver, match=f"machine {other.machine.id}.*use that"):
        tenancy.hand_over(alone=True)


@pytest.mark.rule(18)
def test_a_request_is_given_up_by_its_age_whatever_clocks_say(
    ahead_s: float, rents: Rents, contested: ContestedStore
) -> None:
    """One of another run that goes on now, by a host with another clock, is not ended."""
    with contested.host(ahead_s):
        rents.rentals.begin(rents.rentals.new_label("me"), H100, None)
    for passed_s, goes_on in ((0.0, True), (sweep.ASKED_S + 10, False)):
        contested.pass_time(passed_s)
        with contested.host():
            rents.run().end_abandoned()
            assert (rents.states() == ["asked"]) is goes_on


@pytest.mark.rule(18)
def test_absences_are_counted_whatever_the_clocks_of_the_looking_hosts_say(
    ahead_s: float, rents: Rents, contested: ContestedStore
) -> None:
    rents.change_market(settling_s=600.0, forgets_s=3600.0)
    with contested.host(ahead_s):
        rents.handed_over()
    rents.market.alive.clear()
    rents.market.proofs = False
    for passed_s, host_s, looks in ((3700, ahead_s, 1), (300, 0.0, 1), (400, 0.0, 2)):
        contested.pass_time(passed_s)
        with contested.host(host_s):
            rents.run().end_abandoned()
            assert len(rents.open().absent_unix) == looks
    contested.pass_time(700)
    with contested.host(ahead_s):
        rents.run().end_abandoned()
        assert rents.states() == ["ended"]
