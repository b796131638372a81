"""What a machine that vanishes costs, measured small."""

from __future__ import annotations

import pytest

from tests.benchmarks.vanished import measure, month


@pytest.mark.usefixtures("needs_server")
def test_a_machine_that_vanishes_is_measured() -> None:
    result = measure(machines=1, at_once=1, gib=0.01, lives_s=(2.0, 3.0))
    (lost,) = result["machines"]
    assert result["lost_s"]["max"] == lost["lost_s"] == lost["age_s"]  # no save was due
    assert lost["stored_bytes"] > 0


def test_a_month_costs_its_requests_and_what_it_keeps() -> None:
    of = {"saves": 2, "puts": 20, "lists": 4, "gets": 6, "new_bytes": 2 * 10**6}
    told = month([{**of, "age_s": 120.0, "stored_bytes": 10**9}])
    assert told["saves_a_day"] == 480
    assert told["kept_bytes"] == 10**9 + 480 * 4 * 10**6
    s3 = told["usd"]["aws-s3"]
    assert round(s3["requests"], 4) == round(480 * 22 * (12 * 5.0 + 3 * 0.4) / 1e6, 4)
    assert round(s3["storage"], 4) == round(told["kept_bytes"] / 1e9 * 0.023, 4)
