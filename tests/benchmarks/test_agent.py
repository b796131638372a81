"""The agent's own limits, measured small."""

from __future__ import annotations

from pathlib import Path

from benchmarks.agent import attach
from benchmarks.machine import BenchMachine
from tests.fixtures.stores import Server


def test_attaching_is_measured_as_often_as_asked(seaweed: Server, machines_folder: Path) -> None:
    with BenchMachine(machines_folder / "machines", seaweed) as machine:  # type: ignore[arg-type]
        agent = set(machine.agent_pids())
        figures = attach(machine, 3)
        assert agent & set(machine.agent_pids()), "another agent answered"
    assert figures["n"] == 3
    least, most = figures["attach_least_wall_s"], figures["attach_most_wall_s"]
    assert 0 < least <= figures["attach_wall_s"] <= most
    assert figures["attach_cpu_s"] > 0
