"""What a flow takes beside its work, measured once."""

from __future__ import annotations

import pytest

from benchmarks.overhead import measure


@pytest.mark.usefixtures("needs_server")
def test_each_flow_s_phases_and_the_rest_are_its_whole_time() -> None:
    result = measure(runs=1)
    assert set(result["flows"]) == {"hibernate", "wake"}
    for name, rounds in result["rounds"].items():
        (seconds,) = rounds
        whole = seconds.pop("all")
        assert sum(seconds.values()) == pytest.approx(whole)
        assert 0 < result["flows"][name]["overhead_s"]["p95"] < whole
