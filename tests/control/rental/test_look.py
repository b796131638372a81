"""A look at a workspace's machines."""

from __future__ import annotations

import pytest

from tests.fixtures.market import Market
from tests.fixtures.memory_store import MemoryStore
from tests.fixtures.rents import Rents
from torpor.control.rental.look import Shown, look
from torpor.control.rental.markets import Markets


def _look(rents: Rents, *markets: Market) -> Shown:
    return look(rents.rentals, Markets(markets or [rents.market]), rents.heard.warn)


@pytest.mark.rule(5)
@pytest.mark.parametrize("state", ["handed over", "abandoned", "gone"])
def test_a_look_ends_no_machine_and_changes_no_rental(
    state: str, rents: Rents, memory_store: MemoryStore
) -> None:
    """Whatever it finds: the sweep ends machines, and closes rentals whose machine has gone."""
    if state == "abandoned":
        rents.run().rent(rents.market.on_sale)
        rents.rentals.change(rents.open(), state="abandoned")
    else:
        rents.handed_over()
    if state == "gone":
        rents.market.alive.clear()
    before, alive, written = rents.open(), [*rents.market.alive], [*memory_store.list("")]
    shown = _look(rents)
    assert ([*rents.market.alive], [*memory_store.list("")]) == (alive, written)
    assert shown.rentals == [before]
    assert shown.unsettled is (state != "handed over")
    rents.run().end_abandoned()
    assert not _look(rents).unsettled


def test_there_is_nothing_to_sweep_where_no_rental_is_open(rents: Rents) -> None:
    assert not _look(rents).unsettled
