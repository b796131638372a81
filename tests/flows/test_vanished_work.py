"""A machine is kept while it holds, or has lost, what the workspace had before."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from flows import backup
from tests.fixtures.lab import Lab
from tests.fixtures.plain_flows import hibernate_plainly, run_plainly, wake_plainly
from torpor.control.upkeep.reports import BackupReport
from torpor.shared.errors import UnsavedWork
from torpor.shared.values import MachineId

BOTH = ["~/workspace", "~/data"]


@pytest.fixture
def home(lab: Lab) -> Path:
    """A machine with two directories, of which a snapshot was taken."""
    home = lab.home(lab.rent().id)
    for folder in ("workspace", "data"):
        (home / folder).mkdir()
        for number in range(20):
            (home / folder / f"{number}.txt").write_text(f"{folder} {number}")
    hibernate_plainly(lab.wanting(paths=BOTH), destroy=False)
    return home


def test_a_directory_that_the_block_names_no_more_keeps_the_machine(lab: Lab, home: Path) -> None:
    hibernate_plainly(lab.wanting(paths=BOTH))
    # The block is another one now, and the wake of before brings both.
    home = lab.home(MachineId(wake_plainly(lab.wanting(paths=BOTH)).machine))
    (home / "data/new").write_text("work of a week")
    report = hibernate_plainly(lab.opened, destroy=False)  # as each night
    assert any(str(home / "data") in line for line in report.lost)
    with pytest.raises(UnsavedWork, match=str(home / "data")):
        hibernate_plainly(lab.opened)
    assert lab.machines()
    assert hibernate_plainly(lab.opened, accept_lost=["~/data"]).destroyed
    assert lab.machines() == []


def test_a_directory_that_lost_most_of_its_files_keeps_the_machine(lab: Lab, home: Path) -> None:
    opened = lab.wanting(paths=BOTH)
    for number in range(1, 20):
        (home / f"data/{number}.txt").unlink()
    report = hibernate_plainly(opened, destroy=False)  # a backup does not make it the truth
    assert any("19 more files" in line for line in report.lost)
    with pytest.raises(UnsavedWork, match="19 more files"):
        hibernate_plainly(opened)
    assert lab.machines()
    assert hibernate_plainly(opened, accept_lost=["~/data"]).destroyed


def test_an_idle_machine_that_lost_files_gets_no_further_snapshot_at_each_look(
    lab: Lab, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tasks.guards.check_idle", lambda *_: None)
    opened = lab.wanting(paths=BOTH)
    for number in range(1, 20):
        (home / f"data/{number}.txt").unlink()
    before = lab.snapshots()
    with pytest.raises(UnsavedWork, match="19 more files"):
        hibernate_plainly(opened, only_if_idle=True)
    assert lab.snapshots() == before


def test_a_disk_that_is_no_longer_mounted_keeps_the_machine(
    lab: Lab, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = lab.wanting(paths=BOTH)
    with monkeypatch.context() as before:
        before.setattr("torpor.machine.agent.state.disks", lambda *_: [os.fsencode(home / "nvme")])
        hibernate_plainly(opened, destroy=False)
    with pytest.raises(UnsavedWork, match=f"{home}/nvme was a disk with a part of the workspace"):
        hibernate_plainly(opened)
    assert lab.machines()
    assert hibernate_plainly(opened, accept_lost=["~/nvme"]).destroyed


def test_a_backup_of_what_is_left_deletes_no_older_snapshot(lab: Lab, home: Path) -> None:
    opened = lab.wanting(paths=BOTH)
    (before,) = lab.snapshots()
    for number in range(1, 20):
        (home / f"data/{number}.txt").unlink()
    of = {"keep_last": 1, "keep_daily": 0, "keep_weekly": 0, "keep_monthly": 0}
    report = run_plainly(opened, backup, **of)
    assert isinstance(report, BackupReport)
    assert report.deleted == []
    assert before in lab.snapshots()


def test_the_newest_snapshot_is_compared_where_the_machine_remembers_none(
    lab: Lab, home: Path
) -> None:
    shutil.rmtree(home / ".torpor/workspaces")
    for number in range(1, 20):
        (home / f"workspace/{number}.txt").unlink()
    with pytest.raises(UnsavedWork, match=rf"19 more files.*|{home}/data"):
        hibernate_plainly(lab.opened)
    assert lab.machines()
