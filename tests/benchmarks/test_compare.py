"""The benchmark of compare, small: it counts offers, not seconds."""

from __future__ import annotations

from tests.benchmarks.compare import measure


def test_it_compares_hundreds_of_offers() -> None:
    result = measure(rounds=1, rentals=3)
    assert result["offers"] >= 300
    assert result["compare_s"]["n"] == 1
