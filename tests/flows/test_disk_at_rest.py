"""A disk that comes to rest, or does not: what is paused and resumed, and what the report says."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import flows
from tasks.plain_runner import PlainRunner
from tasks.workspace import OpenWorkspace
from tests.fixtures.lab import Lab
from tests.fixtures.passes import before_each_store, before_each_walk
from tests.fixtures.plain_flows import hibernate_plainly, run_plainly, wake_plainly
from tests.fixtures.trees import let_settle
from torpor.control.reports import HibernateReport
from torpor.machine.tree import walk
from torpor.shared.errors import StillChanging


@pytest.fixture
def root(lab: Lab) -> Path:
    root = lab.workspace(lab.rent().id)
    root.mkdir()
    (root / "app.log").write_text("a line\n")
    (root / "notes.txt").write_text("kept")
    let_settle()
    return root


def _hibernate(
    opened: OpenWorkspace, before: Callable[[str], None], **options: Any
) -> HibernateReport:
    """``before`` is called with the name of each step."""
    with PlainRunner(opened, wait_factor=0.001, at_once=1, before=before):
        report: HibernateReport = flows.hibernate.fn(opened.spec.name, **options)
    return report


def _append(path: Path) -> None:
    with path.open("a") as file:
        file.write("one more line\n")


def _row(report: HibernateReport, what: str) -> str:
    return "; ".join(row["value"] for row in report.rows() if row["what"] == what)


def test_what_a_backup_paused_is_resumed_and_a_failure_of_that_is_a_warning(
    lab: Lab, root: Path
) -> None:
    said = root.parent / "said"
    resume = ["sh", "-c", f"echo resumed >> {said}; echo no database; exit 3"]
    opened = lab.wanting(quiesce=["sh", "-c", f"echo paused >> {said}"], resume=resume)
    report = run_plainly(opened, flows.backup).hibernated
    assert said.read_text() == "paused\nresumed\n"
    assert "status 3 and printed: no database" in report.warnings[0]
    assert report.warnings[0] in _row(report, "warning")


def test_a_file_that_was_changed_a_moment_ago_comes_to_rest(
    lab: Lab, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(walk, "RACY_NS", 1_500_000_000)  # as where times are whole seconds
    (root / "notes.txt").write_text("saved right before the machine was hibernated")
    assert hibernate_plainly(lab.opened).destroyed


def test_a_disk_that_never_rests_is_read_ten_times_and_what_was_paused_is_resumed(
    lab: Lab, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said, passes = root.parent / "said", []
    resume = ["sh", "-c", f"echo resumed >> {said}; exit 3"]
    opened = lab.wanting(quiesce=["sh", "-c", f"echo paused >> {said}"], resume=resume)

    def write() -> None:
        passes.append(said.exists())
        _append(root / "notes.txt")

    before_each_walk(monkeypatch, write)
    with pytest.raises(StillChanging, match=r"rest in 10 passes, last: notes.txt"):
        hibernate_plainly(opened)
    assert passes == [False] * 2 + [True] * 8
    assert said.read_text() == "paused\nresumed\n"


def test_a_machine_that_ends_is_not_resumed(lab: Lab, root: Path, tmp_path: Path) -> None:
    said = tmp_path / "said"
    commands = {name: ["sh", "-c", f"echo {name} >> {said}"] for name in ("quiesce", "resume")}
    assert hibernate_plainly(lab.wanting(**commands)).destroyed
    assert said.read_text() == "quiesce\n"


@pytest.mark.parametrize("step", ["commit", "confirm"])
def test_the_report_names_accepted_files_that_changed_and_the_moment_that_the_snapshot_holds(
    lab: Lab, root: Path, step: str
) -> None:
    def before(label: str) -> None:
        if label == step:
            _append(root / "app.log")

    report = _hibernate(lab.opened, before, accept_changed=["*.log"])
    assert (report.accepted_count, report.accepted, report.changed) == (1, ["app.log"], [])
    assert "1 name, app.log" in _row(report, "changed, as accepted")
    assert ", as of 20" in _row(report, "snapshot")


def test_a_wake_names_the_files_that_changed_while_they_were_stored(
    lab: Lab, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before_each_store(monkeypatch, lambda: _append(root / "app.log"))
    report = hibernate_plainly(lab.opened, accept_changed=["*.log"])
    assert report.accepted == ["app.log"]
    woken = wake_plainly(lab.opened)
    assert "app.log changed while they were stored, so each may mix two states" in woken.warnings[0]
