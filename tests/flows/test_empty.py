"""A workspace that never had a file: its machine can be stored, used, ended and woken again."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

from flows import backup, create, hibernate, job, verify
from tasks.machines import make_paths, open_session
from tasks.plain_runner import PlainRunner
from tasks.workspace import OpenWorkspace
from tests.fixtures.activity import sampled
from tests.fixtures.lab import DEMO, Lab
from tests.fixtures.plain_flows import hibernate_plainly, run_plainly, wake_plainly
from torpor.control.reports import HibernatePreview
from torpor.machine.agent import brought
from torpor.shared.errors import RunCancelled, WorkspaceInvalid
from torpor.shared.values import MachineId
from torpor.shared.wire.activity import PERSON


@pytest.fixture
def two(lab: Lab) -> OpenWorkspace:
    """The workspace has two directories."""
    return lab.wanting(paths=["~/workspace", "~/data"])


def _created(lab: Lab, opened: OpenWorkspace, **asked: Any) -> MachineId:
    machine = MachineId(run_plainly(opened, create, **asked).id)
    sampled(lab.market.near[machine].home)
    return machine


def _woken(lab: Lab, opened: OpenWorkspace) -> MachineId:
    machine = MachineId(wake_plainly(opened).machine)
    sampled(lab.market.near[machine].home)
    return machine


def _directories(lab: Lab, machine: str) -> list[Path]:
    home = lab.home(MachineId(machine))
    return [home / "workspace", home / "data"]


def test_a_machine_that_nobody_used_is_hibernated_and_woken_as_often_as_one_likes(
    lab: Lab, two: OpenWorkspace
) -> None:
    machine = _created(lab, two)
    for _ in range(2):
        report = hibernate_plainly(two)
        assert (report.destroyed, report.machine, report.files) == (True, machine, 0)
        run_plainly(two, verify)
        assert lab.machines() == []
        machine = _woken(lab, two)
        assert [list(place.iterdir()) for place in _directories(lab, machine)] == [[], []]
    (lab.workspace(machine) / "a.txt").write_text("the first file")
    assert hibernate_plainly(two).files == 1
    machine = MachineId(wake_plainly(two).machine)
    assert (lab.workspace(machine) / "a.txt").read_text() == "the first file"


def test_a_backup_and_a_preview_of_a_machine_that_nobody_used_go_well(
    lab: Lab, two: OpenWorkspace
) -> None:
    machine = _created(lab, two)
    for _ in range(2):
        shown = run_plainly(two, hibernate, dry_run=True)
        assert isinstance(shown, HibernatePreview)
        assert (shown.files, shown.keeps) == (0, [])
        run_plainly(two, backup)
        assert [one.id for one in lab.machines()] == [machine]


def test_a_job_runs_in_an_empty_directory(needs_server: None, lab: Lab) -> None:
    """`torpor run -- nvidia-smi` in a folder without a file: it stores the machine first."""
    _created(lab, lab.opened, job="3f2a9c81d04e")
    run_plainly(lab.opened, backup)
    with PlainRunner(lab.opened, wait_factor=0.1):
        done = job.fn(DEMO, ["true"], job="3f2a9c81d04e").job
    assert done.state == "succeeded" and lab.machines() == []


@pytest.mark.parametrize("step", ["compare packs", "commit", "verify", "confirm", "destroy"])
def test_a_hibernate_that_was_killed_is_made_again(lab: Lab, step: str) -> None:
    _created(lab, lab.opened)
    met: list[str] = []

    def strike(name: str) -> None:
        if name.startswith(step) and not met:
            met.append(name)
            raise RunCancelled("killed")

    with pytest.raises(RunCancelled), PlainRunner(lab.opened, wait_factor=0.001, before=strike):
        hibernate.fn(DEMO)
    assert met
    assert hibernate_plainly(lab.opened).destroyed


@pytest.mark.rule(22)
@pytest.mark.parametrize("held", ["woken", "stored", "in the store"])
def test_a_workspace_that_had_a_file_is_not_stored_as_an_empty_one(lab: Lab, held: str) -> None:
    machine = _created(lab, lab.opened)
    place = lab.workspace(machine)
    (place / "work").write_bytes(b"mine" * 1000)
    if held == "stored":
        run_plainly(lab.opened, backup)
    else:
        hibernate_plainly(lab.opened)
        machine = MachineId(wake_plainly(lab.opened).machine)
        place = lab.workspace(machine)
    if held == "in the store":  # a second machine, which torpor made for the workspace
        lab.lose_machines()
        other = lab.rent()
        with PlainRunner(lab.opened), open_session(lab.opened, other) as session:
            make_paths(lab.opened, session)
    else:
        (place / "work").unlink()
    before = [one.snapshot for one in lab.snapshots()]
    with pytest.raises(WorkspaceInvalid, match="is empty: there is nothing to keep"):
        hibernate_plainly(lab.opened)
    assert len(lab.machines()) == 1 and [one.snapshot for one in lab.snapshots()] == before


@pytest.mark.rule(22)
def test_a_directory_in_the_place_of_the_one_that_torpor_made_is_no_empty_workspace(
    lab: Lab,
) -> None:
    """As a disk that was mounted there, and one that did not come back."""
    place = lab.workspace(_created(lab, lab.opened))
    place.rename(place.with_name("moved"))
    place.mkdir()
    with pytest.raises(WorkspaceInvalid, match="is empty: there is nothing to keep"):
        hibernate_plainly(lab.opened)
    assert len(lab.machines()) == 1


@pytest.mark.rule(22)
@pytest.mark.parametrize("now", ["another boot", "another container", "not known"])
def test_a_machine_that_has_started_again_may_lack_a_disk_that_its_user_mounted(
    lab: Lab, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, now: str
) -> None:
    _created(lab, lab.opened)
    if now == "another boot":
        monkeypatch.setattr(brought, "boot_id", lambda: "5" * 32)
    else:
        first = tmp_path / "stat"
        monkeypatch.setattr(brought, "FIRST_PROCESS", first)
        if now == "another container":
            first.write_text(f"1 (sh) S {'0 ' * 17}")
            assert not brought.machine_start()
            first.write_text(f"1 (a) b) S {'0 ' * 18}77 0 0")
            assert brought.machine_start().endswith("-77")
    for _ in range(2):
        with pytest.raises(WorkspaceInvalid, match=r"is empty: there is nothing.*started again"):
            hibernate_plainly(lab.opened)
    assert len(lab.machines()) == 1


@pytest.mark.rule(22)
@pytest.mark.parametrize(
    ("sample", "why"),
    [
        ({"flags": PERSON}, "somebody has logged in to this one"),
        (None, "its sampler does not look"),
        ({"at_s": 0.0}, "its sampler does not look"),
        ({"boot": "5" * 32}, "its sampler does not look"),
    ],
)
def test_a_person_may_have_mounted_a_disk_and_unmounted_it(
    lab: Lab, sample: dict[str, Any] | None, why: str
) -> None:
    """Also where nobody can say whether a person was there."""
    machine = MachineId(run_plainly(lab.opened, create).id)
    if sample is not None:
        sampled(lab.market.near[machine].home, **sample)
    with pytest.raises(WorkspaceInvalid, match=f"is empty: there is nothing to keep.*{why}"):
        hibernate_plainly(lab.opened)
    assert len(lab.machines()) == 1


@pytest.mark.rule(22)
def test_a_workspace_with_excluded_files_alone_is_not_stored_as_an_empty_one(lab: Lab) -> None:
    """A pattern such as `*` may stand there by mistake."""
    opened = replace(lab.opened, spec=msgspec.structs.replace(lab.opened.spec, exclude=["*"]))
    (lab.workspace(_created(lab, opened)) / "work").touch()
    for dry_run in (True, False):
        with pytest.raises(WorkspaceInvalid, match="has nothing that a snapshot stores"):
            run_plainly(opened, hibernate, dry_run=dry_run)
    assert len(lab.machines()) == 1 and lab.snapshots() == []
