"""What a destroy would lose: it is named, and what a link leads to keeps the machine."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Any

import pytest

from flows import backup
from tests.fixtures.lab import Lab
from tests.fixtures.plain_flows import hibernate_plainly, run_plainly, wake_plainly
from torpor.shared.errors import InvalidInput, UnsavedWork
from torpor.shared.wire.losses import LookForLosses


@pytest.fixture
def home(lab: Lab) -> Path:
    machine = lab.rent()
    work = lab.workspace(machine.id)
    work.mkdir()
    (work / "train.py").write_text("print()")
    return lab.home(machine.id)


def _link_out(home: Path) -> None:
    """The usual layout on GPU hosts."""
    (home / "nvme" / "checkpoints").mkdir(parents=True)
    (home / "nvme" / "checkpoints" / "last.pt").write_bytes(b"x" * 2_000_000)
    (home / "workspace" / "checkpoints").symlink_to(home / "nvme" / "checkpoints")
    (home / "workspace" / "python3").symlink_to("/usr/bin/python3")  # as in each venv


def test_a_link_that_leads_out_to_data_keeps_the_machine(lab: Lab, home: Path) -> None:
    _link_out(home)
    with pytest.raises(
        UnsavedWork, match=r"workspace/checkpoints is a link to .*2\.0 MB in 1 file"
    ):
        hibernate_plainly(lab.opened)
    assert len(lab.machines()) == 1
    assert lab.verify_listed() == 1
    run_plainly(lab.opened, backup)  # which keeps the machine, so it only warns
    report = hibernate_plainly(lab.opened, accept_lost=["~/nvme"])
    assert (report.destroyed, lab.machines()) == (True, [])
    assert report.lost == []


def test_the_look_knows_where_volumes_were_mounted_when_the_machine_was_rented(
    lab: Lab, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a provider block says today is of other machines."""
    asked: list[list[str]] = []

    def looking(*told: Any) -> LookForLosses:
        asked.append(told[-1])
        return LookForLosses(*told)

    monkeypatch.setattr("torpor.control.remote.snapshot.LookForLosses", looking)
    monkeypatch.setattr(lab.market, "volumes", ["/models"], raising=False)
    (rental,) = lab.opened.rentals.open()
    lab.opened.rentals.change(rental, volumes=("/data",))
    assert hibernate_plainly(lab.opened).destroyed
    assert asked and all(paths == ["/data"] for paths in asked)


def test_a_rental_keeps_where_volumes_are_mounted_and_none_may_be_in_the_workspace(
    lab: Lab, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lab.market, "volumes", ["/root/workspace/data"], raising=False)
    hibernate_plainly(lab.opened)  # a block that is changed later holds up no hibernate
    with pytest.raises(InvalidInput, match="overlaps the workspace's path ~/workspace"):
        wake_plainly(lab.opened)
    assert lab.machines() == []
    monkeypatch.setattr(lab.market, "volumes", ["/models"])
    wake_plainly(lab.opened)
    (rental,) = lab.opened.rentals.open()
    assert rental.volumes == ("/models",)


def test_what_no_snapshot_holds_is_named(lab: Lab, home: Path) -> None:
    os.mkfifo(home / "workspace" / "pipe")
    report = hibernate_plainly(lab.opened)
    assert (report.skipped, report.skipped_names) == (1, ["~/workspace/pipe (fifo)"])
    assert {"what": "not kept", "value": "1 name, ~/workspace/pipe (fifo)"} in report.rows()


def test_an_idle_machine_that_is_kept_again_and_again_gets_no_further_snapshots(
    lab: Lab, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tasks.guards.check_idle", lambda *_: None)
    _link_out(home)
    for _ in range(3):
        with pytest.raises(UnsavedWork, match="workspace/checkpoints is a link"):
            hibernate_plainly(lab.opened, only_if_idle=True)
    assert lab.verify_listed() == 1
    (home / "workspace" / "new").write_text("work of today")
    with pytest.raises(UnsavedWork):
        hibernate_plainly(lab.opened, only_if_idle=True)
    assert lab.verify_listed() == 2


def test_a_backup_warns_of_a_link_that_leads_out(
    lab: Lab, home: Path, caplog: pytest.LogCaptureFixture
) -> None:
    _link_out(home)
    with caplog.at_level(logging.WARNING):
        run_plainly(lab.opened, backup)
    assert "workspace/checkpoints is a link to" in caplog.text
    assert "python3" not in caplog.text


def test_what_is_left_behind_is_in_the_report_and_told_at_the_wake(lab: Lab, home: Path) -> None:
    (home / "data" / "raw").mkdir(parents=True)
    (home / "data" / "raw" / "a").write_bytes(b"x" * 3_100_000)
    (home / ".cache" / "pip").mkdir(parents=True)
    (home / ".cache" / "pip" / "wheel").write_bytes(b"x" * 1000)
    (home / "notes.txt").write_text("do not lose me")
    report = hibernate_plainly(lab.opened)
    assert report.destroyed
    assert report.lost[0].startswith("3.1 MB in 2 files")
    assert [line.partition(":")[0] for line in report.lost[1:]] == [
        f"{home}/data/raw", str(home), "caches, which are made again",
    ]  # fmt: skip
    assert {"what": "left behind", "value": report.lost[1]} in report.rows()
    warnings = " ".join(wake_plainly(lab.opened).warnings)
    assert f"destroyed, 3.1 MB in {home}/data/raw (3.1 MB), {home} (14 bytes) were left" in warnings


def test_a_block_that_refuses_losses_keeps_the_machine_above_its_size(lab: Lab, home: Path) -> None:
    (home / "data").mkdir()
    (home / "data" / "a").write_bytes(b"x" * 3_000_000)
    strict = lab.wanting(left_behind="refuse", left_behind_gib=0.001)
    with pytest.raises(UnsavedWork, match=r"3\.0 MB in 1 file, .* would be lost.*accept_lost"):
        hibernate_plainly(strict)
    assert len(lab.machines()) == 1
    wide = lab.wanting(left_behind="refuse", left_behind_gib=0.01)
    assert hibernate_plainly(wide).destroyed
