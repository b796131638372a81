"""What the record of a rental keeps of an attempt that failed at its market."""

from __future__ import annotations

import asyncssh
import msgspec
import pytest

from tests.fixtures.market import Hears, Market
from tests.fixtures.memory_store import MemoryStore
from torpor.control.providers.seam import Order
from torpor.control.rental import renting
from torpor.control.rental.markets import Markets
from torpor.control.rental.records import Rentals
from torpor.control.rental.renting import Renter, Renting
from torpor.shared.errors import (
    CreateFailed,
    CreateUncertain,
    MachineUnreachable,
    NoCapacity,
    ProviderDenied,
    ProviderUnavailable,
    QuotaReached,
    TorporError,
)
from torpor.shared.values import Machine, Want, WorkspaceName


@pytest.mark.parametrize(
    ("error", "counts"),
    [
        (CreateFailed("no"), True),
        (NoCapacity("no"), True),
        (MachineUnreachable("no"), True),
        (QuotaReached("no"), False),
        (ProviderDenied("no"), False),
        (ProviderUnavailable("no"), False),
        (CreateUncertain("no"), False),
    ],
)
def test_only_what_the_market_failed_at_counts_as_its_failure(
    error: TorporError, counts: bool, memory_store: MemoryStore
) -> None:
    market, rentals = Market(), Rentals(memory_store, WorkspaceName("demo"))
    identity = asyncssh.generate_private_key("ssh-ed25519")
    market.faults, market.after = [error], isinstance(error, MachineUnreachable | CreateUncertain)
    held = Renting(Renter(rentals, Markets([market]), "me", Want(), identity, Hears()))
    with pytest.raises(CreateFailed), held:
        held.rent(market.on_sale)
    (ended,) = rentals.history()
    assert ended.failed is counts


def test_a_machine_whose_market_lost_our_label_is_not_used_and_stays_on_record(
    memory_store: MemoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torpor may not end it, so the user must hear of it until it is gone."""
    market, rentals = Market(), Rentals(memory_store, WorkspaceName("demo"))
    identity = asyncssh.generate_private_key("ssh-ed25519")
    held = Renting(Renter(rentals, Markets([market]), "me", Want(), identity, Hears()))
    monkeypatch.setattr(renting, "greeting_fault", lambda endpoint, host_key: None)
    made = market.create

    def create(order: Order) -> Machine:
        machine = made(order)
        market.alive[machine.id] = msgspec.structs.replace(machine, label=None)
        return machine

    monkeypatch.setattr(market, "create", create)
    market.abilities = msgspec.structs.replace(market.abilities, ready_s=0.0)
    with pytest.raises(CreateFailed, match="does not show the label"):
        held.rent(market.on_sale, nap=lambda _: None)
    (rental,) = rentals.open()
    assert (rental.state, rental.machine) == ("abandoned", "m1")
    assert list(market.alive) == ["m1"]
    market.alive.clear()
    held.end(rental)
    assert rentals.open() == []
