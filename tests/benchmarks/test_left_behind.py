"""The look for losses, measured small."""

from __future__ import annotations

from pathlib import Path

from benchmarks.left_behind import measure
from benchmarks.machine import BenchMachine
from tests.fixtures.world import own_store


def test_the_look_is_measured_alone_and_beside_a_snapshot(machines_folder: Path) -> None:
    with (
        own_store(machines_folder / "store", "torpor") as store,
        BenchMachine(machines_folder / "machine", store.running) as machine,
    ):
        figures = measure(machine, outside=600, inside=10, times=2)
    assert (figures["complete"], figures["look_s"]["n"]) == (True, 2)
    assert 600 <= figures["seen_files"] < 1200  # the agent's own are among them
    assert figures["unchanged_snapshot_s"]["least"] > 0
