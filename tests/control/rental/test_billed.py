"""What the record of a rental says that it costs."""

from __future__ import annotations

from collections.abc import Iterator

import asyncssh
import msgspec
import pytest

from tests.fixtures.market import Hears, Market
from tests.fixtures.memory_store import MemoryStore
from torpor.control.providers.seam import Absent
from torpor.control.rental import ending, renting
from torpor.control.rental.markets import Markets
from torpor.control.rental.records import Rentals
from torpor.control.rental.renting import Renter, Renting
from torpor.shared.values import Machine, MachineId, Want, WorkspaceName

replace = msgspec.structs.replace


@pytest.fixture(autouse=True)
def answers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every machine answers SSH at once; nothing is slept through."""
    monkeypatch.setattr(renting, "greeting_fault", lambda endpoint, host_key: None)
    monkeypatch.setattr(ending.time, "sleep", lambda seconds: None)


@pytest.fixture
def market() -> Market:
    return Market()


@pytest.fixture
def rentals(memory_store: MemoryStore) -> Rentals:
    return Rentals(memory_store, WorkspaceName("demo"))


@pytest.fixture
def held(market: Market, rentals: Rentals) -> Iterator[Renting]:
    identity = asyncssh.generate_private_key("ssh-ed25519")
    yield Renting(Renter(rentals, Markets([market]), "me", Want(), identity, Hears()))


def test_the_record_has_the_price_that_the_market_states_of_the_machine(
    held: Renting, market: Market, rentals: Rentals, monkeypatch: pytest.MonkeyPatch
) -> None:
    find = market.find

    def priced(machine: MachineId) -> Machine | Absent:
        live = find(machine)
        return replace(live, price_usd_h=4.4) if isinstance(live, Machine) else live

    monkeypatch.setattr(market, "find", priced)
    with held:
        held.rent(market.on_sale).hand_over()
    assert [rental.price_usd_h for rental in rentals.open()] == [4.4]
