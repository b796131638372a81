"""No wake asks a market more often than the market allows."""

from __future__ import annotations

import pytest

from tests.benchmarks.market_requests import measure
from tests.markets.every import NAMES


@pytest.mark.parametrize("name", NAMES)
def test_a_wake_keeps_to_the_limit_of_its_market(name: str) -> None:
    counted = measure(name)
    assert 5 <= counted["minute"] <= (counted["limit"] or counted["wake"])
