"""Markets that forget machines which ended long ago: repeated absences close the rental."""

from __future__ import annotations

import pytest

from tests.fixtures.rents import Rents
from torpor.control.providers.provider import Residue
from torpor.control.rental import ending
from torpor.control.rental.sweep import close_if_gone
from torpor.shared.errors import ProviderUnavailable

DAY_S = 86_400


def _never(seconds: float) -> None:
    raise AssertionError("nothing is to be waited for")


@pytest.fixture
def forgetful(rents: Rents) -> Rents:
    """Its market knew of the end of the one machine that was handed over, and does not any more."""
    rents.change_market(settling_s=600.0, forgets_s=3600.0)
    rents.handed_over()
    rents.market.proofs = False
    return rents


@pytest.mark.rule(5)
def test_a_machine_that_its_market_has_forgotten_closes_its_rental_after_repeated_absences(
    forgetful: Rents,
) -> None:
    alive = forgetful.market.alive
    gone = dict(alive)
    alive.clear()

    def look(later_s: float) -> int:
        forgetful.later(later_s)
        forgetful.run().end_abandoned()
        return len(forgetful.open().absent_unix)

    assert look(1000) == 0  # its market would still say that it has ended
    assert look(4000) == 1
    assert look(4100) == 1  # too soon after the one before
    forgetful.market.away = ProviderUnavailable("down")
    with pytest.raises(ProviderUnavailable):
        look(5000)
    forgetful.market.away = None
    assert look(5100) == 2
    alive.update(gone)
    assert look(5800) == 0  # it was there all the time
    alive.clear()
    assert [look(later_s) for later_s in (7000, 7700, 8400)] == [0, 0, 0]
    assert [look(later_s) for later_s in (9500, 10200)] == [1, 2]
    forgetful.later(10900)
    forgetful.run().end_abandoned()
    assert "without a proof" in forgetful.ended().why
    assert "3 looks" in forgetful.ended().why


@pytest.mark.rule(5)
def test_a_machine_in_use_that_answers_miss_for_a_while_is_not_closed(forgetful: Rents) -> None:
    """Absences count from when it was last shown, not from when it was handed over."""
    alive, writes = dict(forgetful.market.alive), set()
    (machine,) = alive.values()
    for later_s in range(600, 3 * DAY_S, 600):  # as `watch` looks
        forgetful.later(later_s)
        rental = forgetful.open()
        assert not close_if_gone(forgetful.renter(), rental, shown=machine)
        writes.add(rental.version)
    assert len(writes) < 3 * 24 * 5  # few of the looks are a write
    forgetful.market.alive.clear()
    for later_s in (600, 1200, 1800):
        forgetful.later(3 * DAY_S + later_s)
        forgetful.run().end_abandoned()
    assert forgetful.states() == ["handed over"]
    forgetful.market.alive.update(alive)
    forgetful.run().end_abandoned()
    assert forgetful.open().absent_unix == ()


@pytest.mark.rule(5)
def test_a_market_that_keeps_its_proofs_is_believed_by_these_alone(forgetful: Rents) -> None:
    forgetful.change_market(forgets_s=None)
    forgetful.market.alive.clear()
    for days in range(1, 9):
        forgetful.later(days * DAY_S)
        forgetful.run().end_abandoned()
    assert forgetful.states() == ["handed over"]


@pytest.mark.rule(5)
def test_an_abandoned_machine_that_its_market_has_forgotten_is_closed_without_a_wait_for_a_proof(
    rents: Rents, monkeypatch: pytest.MonkeyPatch
) -> None:
    market = rents.market
    rents.change_market(settling_s=600.0, forgets_s=3600.0)
    rents.run().rent(market.on_sale)
    rental = rents.rentals.change(rents.open(), state="abandoned", why="its run failed")
    market.alive.clear()
    market.proofs = False
    market.left_over = [Residue(id="d", provider=market.identity, kind="disk", label=rental.label)]
    for later_s in (4000, 4700, 5400):
        rents.later(later_s)
        assert rents.states() == ["abandoned"]
        monkeypatch.setattr(ending.time, "sleep", _never if later_s < 5400 else lambda s: None)
        rents.run().end_abandoned()
    assert rents.states() == ["ended"]
    assert market.left_over == []
