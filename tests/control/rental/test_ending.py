"""Ends that no provider proves at once, and orders that a payment turns into machines."""

from __future__ import annotations

import asyncssh
import msgspec
import pytest

from tests.fixtures.market import Hears, Market
from tests.fixtures.memory_store import MemoryStore
from torpor.control.rental import ending, renting
from torpor.control.rental.markets import Markets
from torpor.control.rental.records import Rentals
from torpor.control.rental.renting import Renter, Renting
from torpor.control.safety import never_handed_over
from torpor.shared.errors import CreateFailed, EndUnproven, OrderUnpaid
from torpor.shared.values import SnapshotId, Want, WorkspaceName


@pytest.fixture
def rentals(memory_store: MemoryStore) -> Rentals:
    return Rentals(memory_store, WorkspaceName("demo"))


@pytest.fixture(scope="module")
def identity() -> asyncssh.SSHKey:
    return asyncssh.generate_private_key("ssh-ed25519")


def test_an_unpaid_order_stays_abandoned_and_no_other_offer_is_tried(
    rentals: Rentals, identity: asyncssh.SSHKey
) -> None:
    """A payment would start its server, and each further order would leave one more invoice."""
    market = Market(settling_s=600.0)
    held = Renting(Renter(rentals, Markets([market]), "me", Want(), identity, Hears()))
    market.faults = [OrderUnpaid("invoice 7")] * 12
    market.on_sale *= 12
    with pytest.raises(CreateFailed, match="1 were tried"):
        held.rent(market.on_sale)
    assert len(market.orders) == 1
    assert [rental.state for rental in rentals.open()] == ["abandoned"]


def test_an_end_that_takes_hours_keeps_the_rental_open_and_names_the_snapshot(
    rentals: Rentals, identity: asyncssh.SSHKey, monkeypatch: pytest.MonkeyPatch
) -> None:
    market = Market()
    market.slow = True
    held = Renting(Renter(rentals, Markets([market]), "me", Want(), identity, Hears()))
    monkeypatch.setattr(ending, "SLOW_S", 0.0)
    monkeypatch.setattr(renting, "greeting_fault", lambda endpoint, host_key: None)
    market.abilities = msgspec.structs.replace(market.abilities, ending_s=12 * 3600.0)
    tenancy = held.rent(market.on_sale)
    tenancy.hand_over()
    assert tenancy.rental is not None
    warrant = never_handed_over(tenancy.machine, tenancy.rental.label)
    object.__setattr__(warrant, "snapshot", SnapshotId("s-1"))
    with pytest.raises(EndUnproven, match=r"accepted and may take up to 12 h .* do not work on it"):
        held.end(tenancy.rental, warrant)
    (rental,) = rentals.open()
    assert (rental.state, rental.snapshot) == ("handed over", "s-1")
    market.alive.clear()
    assert [one.label for one in held.end_abandoned()] == [rental.label]
    (ended,) = rentals.history()
    assert (ended.state, ended.snapshot) == ("ended", "s-1")
