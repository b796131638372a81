"""Which failed attempts the record of a rental blames on the market."""

from __future__ import annotations

import asyncssh
import pytest

from tests.fixtures.market import Hears, Market
from tests.fixtures.memory_store import MemoryStore
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
from torpor.shared.values import Want, WorkspaceName


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
