"""The sampler's cost, measured small."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.sampler import BOUND_MIB, measure
from tests.fixtures.nvml import StandIn


@pytest.mark.usefixtures("needs_server")
def test_the_sampler_is_measured_and_small(
    stand_in_gpus: StandIn, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    stand_in_gpus.are(*["samples=0,0,0,0,0,0 rate=0"] * 8)
    figures = measure(tmp_path / "home", 1.0, start_s=2.0)
    assert figures["gpus"] == 8
    assert 0 < figures["resident_mib"] < BOUND_MIB
    assert figures["cpu_percent"] >= 0
