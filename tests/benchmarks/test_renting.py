"""The benchmark of renting, small. What it counts holds on any machine."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.benchmarks.renting import CASES, measure
from tests.fixtures.stores import Server


@pytest.mark.usefixtures("booted_machines")
def test_it_measures_from_the_wake_until_ssh_is_known_to_answer(
    seaweed: Server, tmp_path: Path
) -> None:
    result = measure(seaweed.store(), tmp_path, rounds=1, boot_s=0.2)
    for case in CASES:
        figures = {name: summed["median"] for name, summed in result[case].items()}
        assert figures["added_s"] == figures["before_create_s"] + figures["after_ssh_s"]
        assert figures["before_create_s"] > 0
        assert figures["market_s"] > 0
        assert figures["requests"] >= 5
