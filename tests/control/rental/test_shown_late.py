"""A machine of a killed run that its market does not show yet."""

from __future__ import annotations

import pytest

from tests.fixtures.market import Market
from tests.fixtures.memory_store import MemoryStore
from tests.fixtures.rents import Rents
from torpor.control.providers.provider import Absent
from torpor.shared.errors import ProviderDenied, ProviderUnavailable, TorporError
from torpor.shared.values import Machine, MachineId


class Late(Rents):
    """After a run that was killed with a machine. Time passes in naps alone; the machine shows
    once ``shown_after_s`` have passed."""

    shown_after_s = 10.0**6
    napped_s = 0.0

    def nap(self, seconds: float) -> None:
        self.napped_s += seconds
        self.later(self.napped_s)
        if self.napped_s >= self.shown_after_s:
            self.market.hidden = 0


@pytest.fixture
def late(memory_store: MemoryStore, monkeypatch: pytest.MonkeyPatch) -> Late:
    late = Late(memory_store, monkeypatch)
    late.change_market(settling_s=300.0)
    late.run().rent(late.market.on_sale)
    late.market.hidden = 10**6
    late.later(0)
    return late


@pytest.mark.rule(5)
def test_it_is_waited_for_and_not_rented_again(late: Late) -> None:
    late.shown_after_s = 200.0
    late.run().look_with_late(late.nap)
    assert 200 <= late.napped_s < 250
    assert [machine.id for machine, _ in late.run().machines()] == ["m1"]


@pytest.mark.rule(5)
def test_the_wait_is_over_once_the_market_has_settled(late: Late) -> None:
    for _ in range(2):
        late.run().look_with_late(late.nap)
        assert 280 <= late.napped_s <= 310


@pytest.mark.rule(5)
def test_a_killed_run_at_an_account_without_a_block_fails_no_wake(late: Late) -> None:
    late.run(Market("lambda:2", settling_s=300.0)).look_with_late(late.nap)
    assert late.napped_s == 0
    assert "not waited for: no provider block is for vast:1" in late.heard.warnings[-1]


@pytest.mark.rule(5)
@pytest.mark.parametrize("error", [ProviderUnavailable("503"), ProviderDenied("403")])
def test_a_market_that_fails_once_fails_no_wake(
    error: TorporError, late: Late, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that is only away is asked again; a refusal stays one."""
    late.shown_after_s, faults = 200.0, [error]

    def find(machine: MachineId) -> Machine | Absent:
        if faults:
            raise faults.pop()
        return Market.find(late.market, machine)

    monkeypatch.setattr(late.market, "find", find)
    late.run().look_with_late(late.nap)
    assert (late.napped_s >= 200) is error.retryable


def test_all_late_machines_are_waited_for_at_the_same_time(late: Late) -> None:
    """Also those whose hosts were ahead when they were made."""
    late.market.hidden = 0
    late.later(7200)
    for _ in range(2):
        late.run().rent(late.market.on_sale)
    late.market.hidden = 10**6
    late.later(0)
    late.run().look_with_late(late.nap)
    assert 280 <= late.napped_s <= 310
