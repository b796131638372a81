"""What the record of a rental says that it costs."""

from __future__ import annotations

import msgspec
import pytest

from tests.fixtures.market import Market
from tests.fixtures.rents import Rents
from torpor.control.safety import never_handed_over
from torpor.shared.errors import ProviderUnavailable

replace = msgspec.structs.replace


def test_the_record_has_the_price_that_the_market_states_of_the_machine(
    rents: Rents, monkeypatch: pytest.MonkeyPatch
) -> None:
    find = rents.market.find
    monkeypatch.setattr(rents.market, "find", lambda id: replace(find(id), price_usd_h=4.4))
    assert rents.handed_over().price_usd_h == 4.4


class Moving(Market):
    """Its spot price rises by 1 $ an hour on average while a machine runs."""

    silent = False

    def rise_usd_h(self, offer: str, begin_unix: float, end_unix: float) -> float:
        if self.silent:
            raise ProviderUnavailable("down")
        return 1.0


@pytest.mark.rule(15)
@pytest.mark.parametrize("way", ["hibernated", "taken back", "taken back, and no history"])
def test_a_price_that_changes_is_bounded_while_the_machine_runs_and_known_at_its_end(
    way: str, rents: Rents
) -> None:
    market = Moving()
    market.silent = "no history" in way
    asked: list[float] = []
    with rents.run(market, afford=asked.append) as run:
        run.rent([replace(market.on_sale[0], spot=True, most_usd_h=9.0)]).hand_over()
    assert asked == [9.0]
    rental = rents.open()
    assert (rental.price_usd_h, rental.most_usd_h, rental.bound_usd_h) == (4.0, 9.0, 9.0)
    if way == "hibernated":
        (machine,) = market.list_own()
        rents.run(market).end(rental, never_handed_over(machine, rental.label))
    else:
        market.alive.clear()
        rents.run(market).end_abandoned()
    known = (4.0, 9.0) if market.silent else (5.0, 0.0)
    assert (rents.ended().price_usd_h, rents.ended().most_usd_h) == known
