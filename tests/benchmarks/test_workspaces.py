"""What a look at all workspaces asks of their store, by how many there are."""

from __future__ import annotations

import pytest

from benchmarks.workspaces import measure

MOST_LISTINGS = {"status": 5, "watch": 4, "spend": 2}
"""Of each workspace that is asleep."""


@pytest.mark.usefixtures("needs_server")
def test_a_workspace_asleep_adds_few_listings_to_each_look() -> None:
    rows = measure([2, 4], rounds=1)["rows"]
    assert rows["4"].keys() == MOST_LISTINGS.keys()
    for flow, most in MOST_LISTINGS.items():
        few, many = (rows[count][flow]["requests"] for count in ("2", "4"))
        assert 0 < many["list"] - few["list"] <= 2 * most, flow
        assert many["prefect"] - few["prefect"] <= 2, "the Prefect server is asked about as often"
        assert rows["4"][flow]["peak_mib"] > 0
