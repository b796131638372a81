"""A machine of a killed run that its market does not show yet."""

from __future__ import annotations

import time
from collections.abc import Callable

import asyncssh
import pytest

from tests.fixtures.market import Hears, Market
from tests.fixtures.memory_store import MemoryStore
from torpor.control.providers.seam import Absent
from torpor.control.rental import renting
from torpor.control.rental.markets import Markets
from torpor.control.rental.records import Rentals
from torpor.control.rental.renting import Renter, Renting
from torpor.shared.errors import ProviderDenied, ProviderUnavailable, TorporError
from torpor.shared.values import Machine, MachineId, Want, WorkspaceName


@pytest.fixture
def market(monkeypatch: pytest.MonkeyPatch) -> Market:
    monkeypatch.setattr(renting, "greeting_fault", lambda endpoint, host_key: None)
    return Market(settling_s=300.0)


@pytest.fixture
def left(market: Market, memory_store: MemoryStore) -> Renting:
    """A run after one that was killed with a machine, which is not shown now."""
    rentals = Rentals(memory_store, WorkspaceName("demo"))
    identity = asyncssh.generate_private_key("ssh-ed25519")
    renter = Renter(rentals, Markets([market]), "me", Want(), identity, Hears())
    Renting(renter).rent(market.on_sale)
    market.hidden = 10**6
    return Renting(renter)


def _passing(
    monkeypatch: pytest.MonkeyPatch, market: Market, shown_after_s: float
) -> tuple[list[float], Callable[[float], None]]:
    """Time that passes in naps alone."""
    began, naps = time.time(), list[float]()
    monkeypatch.setattr(time, "time", lambda: began + sum(naps))

    def nap(seconds: float) -> None:
        naps.append(seconds)
        if sum(naps) >= shown_after_s:
            market.hidden = 0

    return naps, nap


def test_it_is_waited_for_and_not_rented_again(
    market: Market, left: Renting, monkeypatch: pytest.MonkeyPatch
) -> None:
    naps, nap = _passing(monkeypatch, market, 200.0)
    left.wait_for_late(nap)
    assert 200 <= sum(naps) < 250
    assert [machine.id for machine, _ in left.machines()] == ["m1"]


def test_the_wait_is_over_once_the_market_has_settled(
    market: Market, left: Renting, monkeypatch: pytest.MonkeyPatch
) -> None:
    naps, nap = _passing(monkeypatch, market, 10**6)
    left.wait_for_late(nap)
    assert 280 <= sum(naps) <= 310
    left.wait_for_late(nap)
    assert sum(naps) <= 310


def test_a_killed_run_at_an_account_without_a_block_fails_no_wake(
    left: Renting, memory_store: MemoryStore
) -> None:
    heard, other = Hears(), Market("lambda:2", settling_s=300.0)
    rentals = Rentals(memory_store, WorkspaceName("demo"))
    identity = asyncssh.generate_private_key("ssh-ed25519")
    Renting(Renter(rentals, Markets([other]), "me", Want(), identity, heard)).wait_for_late(_never)
    assert "not waited for: no provider block is for vast:1" in heard.warnings[-1]


@pytest.mark.parametrize("error", [ProviderUnavailable("503"), ProviderDenied("403")])
def test_a_market_that_fails_once_fails_no_wake(
    error: TorporError, market: Market, left: Renting, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that is only away is asked again; a refusal stays one."""
    naps, nap = _passing(monkeypatch, market, 200.0)
    faults = [error]

    def find(machine: MachineId) -> Machine | Absent:
        if faults:
            raise faults.pop()
        return Market.find(market, machine)

    monkeypatch.setattr(market, "find", find)
    left.wait_for_late(nap)
    assert (sum(naps) >= 200) is error.retryable


def test_all_late_machines_are_waited_for_at_the_same_time(
    market: Market, left: Renting, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also those whose hosts were ahead when they were made."""
    naps, nap = _passing(monkeypatch, market, 10**6)
    ahead, market.hidden = time.time() + 7200, 0
    with monkeypatch.context() as other:
        other.setattr(time, "time", lambda: ahead)
        left.rent(market.on_sale)
        left.rent(market.on_sale)
    market.hidden = 10**6
    left.wait_for_late(nap)
    assert 280 <= sum(naps) <= 310


def _never(seconds: float) -> None:
    raise AssertionError("nothing is to be waited for")
