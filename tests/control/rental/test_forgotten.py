"""Markets that forget machines which ended long ago: repeated absences close the rental."""

from __future__ import annotations

import time

import asyncssh
import msgspec
import pytest

from tests.fixtures.market import Hears, Market
from tests.fixtures.memory_store import MemoryStore
from torpor.control.providers.seam import Residue
from torpor.control.rental import ending, renting
from torpor.control.rental.markets import Markets
from torpor.control.rental.records import Rentals
from torpor.control.rental.renting import Renter, Renting
from torpor.shared.errors import ProviderUnavailable
from torpor.shared.values import Want, WorkspaceName

replace = msgspec.structs.replace


@pytest.fixture(autouse=True)
def answers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every machine answers SSH at once; nothing is slept through."""
    monkeypatch.setattr(renting, "greeting_fault", lambda endpoint, host_key: None)
    monkeypatch.setattr(ending.time, "sleep", lambda seconds: None)


@pytest.fixture(scope="module")
def identity() -> asyncssh.SSHKey:
    return asyncssh.generate_private_key("ssh-ed25519")


@pytest.fixture
def rentals(memory_store: MemoryStore) -> Rentals:
    return Rentals(memory_store, WorkspaceName("demo"))


def _states(rentals: Rentals) -> list[str]:
    return [rental.state for rental in (*rentals.history(), *rentals.open())]


def _never(seconds: float) -> None:
    raise AssertionError("nothing is to be waited for")


@pytest.fixture
def forgetful(rentals: Rentals, identity: asyncssh.SSHKey) -> Market:
    """It knew of the end of the one machine that was handed over, and does not any more."""
    market = Market(settling_s=600.0)
    market.abilities = replace(market.abilities, forgets_s=3600.0)
    with Renting(Renter(rentals, Markets([market]), "me", Want(), identity, Hears())) as held:
        held.rent(market.on_sale).hand_over()
    market.proofs = False
    return market


def test_a_machine_that_its_market_has_forgotten_closes_its_rental_after_repeated_absences(
    forgetful: Market,
    rentals: Rentals,
    identity: asyncssh.SSHKey,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gone, now = dict(forgetful.alive), time.time()
    forgetful.alive.clear()

    def look(later_s: float) -> tuple[list[str], int]:
        monkeypatch.setattr(time, "time", lambda: now + later_s)
        by = Renter(rentals, Markets([forgetful]), "me", Want(), identity, Hears())
        Renting(by).end_abandoned()
        return _states(rentals), sum(len(one.absent_unix) for one in rentals.open())

    assert look(1000) == (["handed over"], 0)  # its market would still say that it has ended
    assert look(4000) == (["handed over"], 1)
    assert look(4100) == (["handed over"], 1)  # too soon after the one before
    forgetful.away = ProviderUnavailable("down")
    with pytest.raises(ProviderUnavailable):
        look(5000)
    forgetful.away = None
    assert look(5100) == (["handed over"], 2)
    forgetful.alive.update(gone)
    assert look(5800) == (["handed over"], 0)  # it was there all the time
    forgetful.alive.clear()
    assert [look(later_s)[1] for later_s in (7000, 7700, 8400)] == [0, 0, 0]
    assert [look(later_s)[1] for later_s in (9500, 10200)] == [1, 2]
    assert look(10900) == (["ended"], 0)
    (ended,) = rentals.history()
    assert "without a proof" in ended.why
    assert "3 looks" in ended.why


def test_a_machine_in_use_that_answers_miss_for_a_while_is_not_closed(
    forgetful: Market,
    rentals: Rentals,
    identity: asyncssh.SSHKey,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Absences count from when it was last shown, not from when it was handed over."""
    alive, now = dict(forgetful.alive), time.time()
    renter = Renter(rentals, Markets([forgetful]), "me", Want(), identity, Hears())
    writes = set()
    for later_s in range(600, 3 * 86400, 600):  # as `watch` looks
        monkeypatch.setattr(time, "time", lambda later_s=later_s: now + later_s)
        (rental,) = rentals.open()
        assert not Renting(renter).close_if_gone(rental, shown=True)
        writes.add(rental.version)
    assert len(writes) < 3 * 24 * 5  # few of the looks are a write
    forgetful.alive.clear()
    for later_s in (600, 1200, 1800):
        monkeypatch.setattr(time, "time", lambda s=later_s: now + 3 * 86400 + s)
        Renting(renter).end_abandoned()
    assert _states(rentals) == ["handed over"]
    forgetful.alive.update(alive)
    Renting(renter).end_abandoned()
    assert rentals.open()[0].absent_unix == ()


def test_a_market_that_keeps_its_proofs_is_believed_by_these_alone(
    forgetful: Market,
    rentals: Rentals,
    identity: asyncssh.SSHKey,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    forgetful.abilities = replace(forgetful.abilities, forgets_s=None)
    forgetful.alive.clear()
    now = time.time()
    for days in range(1, 9):
        monkeypatch.setattr(time, "time", lambda days=days: now + days * 86400)
        by = Renter(rentals, Markets([forgetful]), "me", Want(), identity, Hears())
        Renting(by).end_abandoned()
    assert _states(rentals) == ["handed over"]


def test_an_abandoned_machine_that_its_market_has_forgotten_is_closed_without_a_wait_for_a_proof(
    rentals: Rentals, identity: asyncssh.SSHKey, monkeypatch: pytest.MonkeyPatch
) -> None:
    market, now = Market(settling_s=600.0), time.time()
    market.abilities = replace(market.abilities, forgets_s=3600.0)
    held = Renting(Renter(rentals, Markets([market]), "me", Want(), identity, Hears()))
    rental = held.rent(market.on_sale).rental
    assert rental is not None
    rentals.change(rental, state="abandoned", why="its run failed")
    market.alive.clear()
    market.proofs = False
    market.left_over = [Residue(id="d", provider=market.identity, kind="disk", label=rental.label)]
    monkeypatch.setattr(ending.time, "sleep", _never)
    for later_s in (4000, 4700, 5400):
        monkeypatch.setattr(time, "time", lambda later_s=later_s: now + later_s)
        assert _states(rentals) == ["abandoned"]
        later = Renting(Renter(rentals, Markets([market]), "me", Want(), identity, Hears()))
        monkeypatch.setattr(ending.time, "sleep", _never if later_s < 5400 else lambda s: None)
        later.end_abandoned()
    assert _states(rentals) == ["ended"]
    assert market.left_over == []
