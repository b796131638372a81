"""A machine that waits in its provider's queue before it starts."""

from __future__ import annotations

import itertools

import asyncssh
import msgspec
import pytest

from tests.fixtures.market import Hears, Market
from tests.fixtures.memory_store import MemoryStore
from torpor.control.rental import renting
from torpor.control.rental.markets import Markets
from torpor.control.rental.records import Rentals
from torpor.control.rental.renting import Renter, Renting
from torpor.shared.values import Want, WorkspaceName

replace = msgspec.structs.replace


def test_the_record_says_when_a_machine_was_last_in_the_queue(
    memory_store: MemoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    market, rentals = Market(), Rentals(memory_store, WorkspaceName("demo"))
    market.abilities = replace(market.abilities, queue_s=3600.0)
    find, shown = market.find, itertools.chain(["queued"] * 3, itertools.repeat("running"))
    monkeypatch.setattr(market, "find", lambda id: replace(find(id), state=next(shown)))
    monkeypatch.setattr(renting, "greeting_fault", lambda endpoint, host_key: None)
    identity = asyncssh.generate_private_key("ssh-ed25519")
    with Renting(Renter(rentals, Markets([market]), "me", Want(), identity, Hears())) as held:
        tenancy = held.rent(market.on_sale, nap=lambda _: None)
        (rental,) = rentals.open()
        assert rental.state == "standing" and rental.queued_unix is not None
        with tenancy:
            tenancy.hand_over()
    (handed,) = rentals.open()
    assert (handed.state, handed.queued_unix) == ("handed over", rental.queued_unix)
