"""compare over the fakes of all markets, with the offers of a day."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from flows import compare
from tests.fixtures.lab import DEMO, Lab
from tests.fixtures.plain_flows import Shows
from tests.markets.boot import Machines
from tests.markets.catalog import catalog_wares
from tests.markets.every import NAMES, Markets, new_fakes


@pytest.fixture
def stocked(tmp_path: Path) -> Iterator[Markets]:
    """The markets with a day's offers; nobody rents."""
    markets = Markets(new_fakes(), Machines(tmp_path))
    for name, wares in catalog_wares().items():
        markets.fakes[name].market.wares = wares
    yield markets
    for fake in markets.fakes.values():
        fake.close()


def test_hundreds_of_offers_are_compared(stocked: Markets, lab: Lab) -> None:
    providers = tuple(stocked.provider(name) for name in NAMES)
    with Shows(replace(lab.opened, providers=providers)) as shows:
        table = compare.fn(DEMO)
    sold = Counter(table.market)
    assert len(table) >= 300
    assert set(sold) == set(NAMES)
    assert not table.duplicated(["provider", "offer"]).any()
    assert table[table.rejected == ""].expected_usd.is_monotonic_increasing
    assert table.price_usd_h.min() > 0
    assert set(table[table.market == "lambda"].checkpoint) == {"claimed"}
    assert "Markets without an answer" not in shows.markdown
    assert all(fake.market.rented == [] for fake in stocked.fakes.values())


def test_generated_offers_have_the_shape_of_the_data(tmp_path: Path) -> None:
    """They stand in where the markets' data is not there."""
    generated = catalog_wares(tmp_path / "none.csv")
    assert sum(map(len, generated.values())) >= 400
    assert set(generated) == set(catalog_wares())
    assert all(ware.usd_h > 0 and ware.region for wares in generated.values() for ware in wares)
