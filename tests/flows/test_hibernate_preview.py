"""A dry run of a hibernate says what would be stored, lost and saved, and changes nothing."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

from flows import backup, hibernate
from tests.fixtures.driver import attempt_on, left_job
from tests.fixtures.lab import Lab
from tests.fixtures.plain_flows import hibernate_plainly, run_plainly
from tests.fixtures.rentals import standing
from torpor.control.remote.snapshot import RemoteSnapshot
from torpor.control.reports import HibernatePreview
from torpor.control.store_prices import StorePrice
from torpor.shared.errors import WorkspaceBusy, WorkspaceInvalid
from torpor.shared.values import GIB

PRICE = StorePrice(0.02, 0.0, "2026-08-03", "a list")


@pytest.fixture
def work(lab: Lab) -> Path:
    work = lab.workspace(lab.rent().id)
    work.mkdir()
    (work / "train.py").write_text("print()")
    (work / "data.bin").write_bytes(os.urandom(1 << 20))
    return work


def _preview(lab: Lab, **options: Any) -> HibernatePreview:
    opened = replace(lab.opened, store_price=lambda: PRICE)
    report = run_plainly(opened, hibernate, dry_run=True, **options)
    assert isinstance(report, HibernatePreview)
    return report


def _row(report: HibernatePreview, what: str) -> str:
    return "; ".join(row["value"] for row in report.rows() if row["what"] == what)


def _objects(lab: Lab) -> dict[str, int]:
    return {found.key: found.bytes for found in lab.store.list("")}


def _files(home: Path) -> dict[Path, tuple[int, int]]:
    """Size and time of each file of the machine."""
    files = [path for path in home.rglob("*") if path.is_file()]
    return {path: (path.stat().st_size, path.stat().st_mtime_ns) for path in files}


def test_what_is_new_since_the_newest_snapshot_is_counted_and_nothing_changes(
    lab: Lab, work: Path
) -> None:
    run_plainly(lab.opened, backup)
    (newest,) = lab.snapshots()
    stored = newest.snapshot
    (work / "notes.txt").write_bytes(b"x" * 5000)
    (work / "train.py").write_text("print(1)")
    before, files = _objects(lab), _files(work.parent)
    report = _preview(lab)
    assert (report.since, report.files, report.new_files) == (stored, 3, 2)
    assert report.new_bytes == 5000 + len("print(1)")
    assert report.bytes == (1 << 20) + report.new_bytes
    assert (1 << 20) <= report.stored_bytes - report.new_bytes < (1 << 20) + 10_000
    assert _row(report, "would store") == f"2 new or changed files since {stored}, 5,008 bytes"
    assert _row(report, "machine").endswith("would be destroyed")
    (machine,) = lab.machines()
    assert report.price_usd_h == machine.price_usd_h > 0
    assert (_objects(lab), _files(work.parent)) == (before, files)
    assert hibernate_plainly(lab.opened).new_bytes == report.new_bytes


def test_a_workspace_that_was_never_stored_is_new_as_a_whole(lab: Lab, work: Path) -> None:
    report = _preview(lab)
    assert (report.since, report.new_files) == ("", 2)
    assert report.new_bytes == report.bytes == (1 << 20) + len("print()")
    assert "remembers no earlier snapshot" in _row(report, "would store")
    assert len(lab.machines()) == 1


def test_what_sleeping_saves_is_beside_what_storing_costs(lab: Lab, work: Path) -> None:
    with (work / "model.bin").open("wb") as file:
        file.truncate(GIB)  # a hole, which is not read
    (machine,) = lab.machines()
    report = _preview(lab)
    assert report.bytes > GIB > report.new_bytes
    assert report.storage_usd_month == pytest.approx(report.stored_bytes / 1e9 * 0.02)
    assert _row(report, "saves").startswith(f"{machine.price_usd_h:.2f} $ an hour; storing it, ")
    assert _row(report, "saves").endswith("costs 0.00 $ a month")
    unpriced = run_plainly(lab.opened, hibernate, dry_run=True)
    assert isinstance(unpriced, HibernatePreview)
    assert "is not known (`price_gb_month_usd` of its block)" in _row(unpriced, "saves")
    assert _row(_preview(lab, destroy=False), "saves") == "nothing: the machine would be kept"


def test_what_would_be_left_behind_is_named_and_what_would_keep_the_machine(
    lab: Lab, work: Path
) -> None:
    (work.parent / "train2.py").write_text("mine")
    nvme = work.parent / "nvme"
    nvme.mkdir()
    (nvme / "last.pt").write_bytes(b"x" * 2000)
    (work / "checkpoints").symlink_to(nvme)
    report = _preview(lab)
    assert "workspace/checkpoints is a link to" in _row(report, "keeps it")
    assert _row(report, "machine").endswith("would be kept")
    assert "train2.py" in _row(report, "left behind")
    assert "train2.py" in _row(report, "beside it")
    accepted = _preview(lab, accept_lost=["~/nvme", "~/*"])
    assert (accepted.keeps, accepted.yours) == ([], "")


def test_of_a_machine_that_is_kept_only_links_out_of_the_workspace_are_looked_at(
    lab: Lab, work: Path
) -> None:
    (work.parent / "train2.py").write_text("mine")
    (work.parent / "nvme").mkdir()
    (work.parent / "nvme" / "last.pt").write_bytes(b"x" * 2000)
    (work / "checkpoints").symlink_to(work.parent / "nvme")
    report = _preview(lab, destroy=False)
    assert (report.keeps, report.yours) == ([], "")
    (line,) = report.lost
    assert "workspace/checkpoints is a link to" in line


def test_what_would_keep_a_machine_that_is_not_idle_or_freezes_nothing_is_named(
    lab: Lab, work: Path
) -> None:
    assert "is unknown: " in _row(_preview(lab, only_if_idle=True), "keeps it")
    assert "kept: no sampler has written" in _row(_preview(lab, only_if_unused=True), "keeps it")
    spec = msgspec.structs.replace(lab.opened.spec, programs=["jupyter"], process="require")
    report = run_plainly(replace(lab.opened, spec=spec), hibernate, dry_run=True)
    assert isinstance(report, HibernatePreview)
    (kept,) = report.keeps
    assert kept.startswith("`process` requires that its programs are frozen: jupyter: ")


def test_a_machine_that_nobody_will_use_stands_after_a_dry_run(lab: Lab, work: Path) -> None:
    """A hibernation ends it first."""
    run_plainly(lab.opened, backup)  # whose login records the machine's host key
    left, rental = standing(lab.opened)
    lab.opened.rentals.change(rental, state="abandoned", why="SSH did not answer")
    before = _objects(lab)
    _preview(lab)
    assert left.id in {machine.id for machine in lab.machines()}
    assert _objects(lab) == before


def test_a_job_and_a_half_restored_workspace_are_named(lab: Lab, work: Path) -> None:
    (rental,) = lab.opened.rentals.open()
    left_job(lab, attempts=[attempt_on(lab.machines()[0], rental)])
    assert _row(_preview(lab), "keeps it").startswith("job ")
    (work.parent / ".torpor/workspaces/demo/restore").write_text("")
    with pytest.raises(WorkspaceInvalid, match="only half restored"):
        _preview(lab)


def test_it_looks_while_a_run_works_on_the_workspace_and_is_in_the_way_of_none(
    lab: Lab, work: Path
) -> None:
    near = lab.market.near[lab.machines()[0].id]
    first, second = (
        RemoteSnapshot(near, lab.store, lab.opened.spec, lab.opened.key, run)
        for run in ("first", "second")
    )
    first.begin()
    assert _preview(lab).new_files == 2
    with pytest.raises(WorkspaceBusy):
        second.begin()
    first.end(committed=False)
    assert not near.hello.busy
