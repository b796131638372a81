"""The benchmark of a wake in the user's order, small: it counts bytes, not seconds."""

from __future__ import annotations

from pathlib import Path

from benchmarks.first import MOST_FETCHED, measure


def test_an_order_costs_no_bytes(machines_folder: Path) -> None:
    result = measure(machines_folder, gib=0.125, line_mib_s=25.0, rounds=1)
    assert result["fetched_over_usual"] <= MOST_FETCHED
    usual, ordered, learned = (result[name] for name in ("usual", "first", "learned"))
    assert ordered["line_bytes_before_usable"]["median"] <= ordered["line_bytes"]["median"]
    assert learned["line_bytes"]["median"] <= MOST_FETCHED * usual["line_bytes"]["median"]
    assert learned["usable_s"]["median"] < learned["wall_s"]["median"]
