"""Files of a snapshot come to the host of the flow, from a real store and without a rental."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest

from flows import restore_path
from tests.fixtures.plain_flows import hibernate_plainly, run_plainly
from tests.fixtures.world import World


def test_results_come_here_without_a_machine_of_the_workspace(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    place = world.workspace(world.rent().id)
    (place / "results").mkdir(parents=True)
    (place / "results/model.bin").write_bytes(b"weights" * 100_000)
    (place / "results/newest").symlink_to("model.bin")
    hibernate_plainly(world.opened)
    report = run_plainly(
        world.opened, restore_path, path="results", into="~/from torpor", machine="here"
    )
    there = tmp_path / "from torpor/results"
    assert (report.machine, report.restored_to, report.files) == ("here", str(there), 1)
    assert (there / "newest").read_bytes() == b"weights" * 100_000
    assert world.machines() == [] and world.opened.rentals.open() == []
    assert [*Path(tempfile.gettempdir()).glob("torpor-here-*/m-*")] == []
