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
from torpor.control.safety import never_handed_over
from torpor.shared.errors import ProviderUnavailable
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


class Moving(Market):
    """Its spot price rises by 1 $ an hour on average while a machine runs."""

    silent = False

    def rise_usd_h(self, offer: str, begin_unix: float, end_unix: float) -> float:
        if self.silent:
            raise ProviderUnavailable("down")
        return 1.0


@pytest.mark.parametrize("way", ["hibernated", "taken back", "taken back, and no history"])
def test_a_price_that_changes_is_bounded_while_the_machine_runs_and_known_at_its_end(
    way: str, rentals: Rentals
) -> None:
    market = Moving()
    market.silent = "no history" in way
    renter = Renter(
        rentals, Markets([market]), "me", Want(), asyncssh.generate_private_key("ssh-ed25519"),
        Hears(), afford=(asked := list[float]()).append,
    )  # fmt: skip
    with Renting(renter) as held:
        held.rent([replace(market.on_sale[0], spot=True, most_usd_h=9.0)]).hand_over()
    assert asked == [9.0]
    (rental,) = rentals.open()
    assert (rental.price_usd_h, rental.most_usd_h, rental.bound_usd_h) == (4.0, 9.0, 9.0)
    (machine,) = market.list_own()
    if way == "hibernated":
        Renting(renter).end(rental, never_handed_over(machine, rental.label))
    else:
        market.alive.clear()
        Renting(renter).end_abandoned()
    (ended,) = rentals.history()
    known = (4.0, 9.0) if market.silent else (5.0, 0.0)
    assert (ended.price_usd_h, ended.most_usd_h) == known
