"""A workspace with `environment` keep: its packages of apt and pip on the next machine."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from tests.fixtures.images import Image, put_wheels
from tests.fixtures.lab import Lab
from tests.fixtures.plain_flows import hibernate_plainly, wake_plainly
from torpor.control.store.manifests import find_snapshot, read_manifest
from torpor.machine.agent import restore, snapshot
from torpor.machine.agent.packages import System
from torpor.shared.errors import AgentLost, RunCancelled
from torpor.shared.format.packages import Packages, packages_in
from torpor.shared.values import SnapshotId
from torpor.shared.wire.packages import PutPackagesBack


@pytest.fixture
def images(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Image]:
    """The image of the machine now, last; a machine's own packages were added in its time."""
    made = [Image(tmp_path / "first")]

    def system(home: Path, *, rented: bool = True) -> System:
        return made[-1].system(why_not="" if rented else "your own")

    monkeypatch.setattr(snapshot, "this_system", system)
    monkeypatch.setattr(restore, "this_system", system)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "wheels"))
    return made


@pytest.fixture
def asleep(lab: Lab, images: list[Image], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Lab:
    """A workspace whose user had installed four packages, before a wake on another image."""
    work = lab.workspace(lab.rent().id)
    work.mkdir()
    (work / "train.py").write_text("import wanted")
    images[0].has("jq", "1.6-2.1")
    images[0].has("left-pad", "1.0")
    images[0].has_of_pip("wanted", "1.5")
    images[0].has_of_pip("private", "3.0", by_file=True)
    assert hibernate_plainly(lab.opened).destroyed
    images.append(Image(tmp_path / "second"))
    images[1].offers(jq="1.6-2.1")
    put_wheels(tmp_path / "wheels", {"wanted": "1.5"})
    monkeypatch.setenv("PATH", f"{images[1].programs}:{os.environ['PATH']}")
    return lab


def _keeps(lab: Lab) -> Lab:
    spec = msgspec.structs.replace(lab.opened.spec, environment="keep")
    return replace(lab, opened=replace(lab.opened, spec=spec))


def _named(lab: Lab, snapshot: SnapshotId) -> Packages:
    opened = lab.opened
    found = find_snapshot(opened.store, opened.spec.name, snapshot)
    manifest = read_manifest(opened.store, found, opened.seal, opened.spec.restorable)
    return packages_in(manifest.environment)


def test_packages_are_back_on_another_image_and_the_others_are_named(
    asleep: Lab, images: list[Image]
) -> None:
    kept = _keeps(asleep)
    report = wake_plainly(kept.opened)
    assert report.packages == [
        "back: jq 1.6-2.1 (apt), wanted 1.5 (pip)",
        "not back: left-pad (apt): no package source of this machine has it",
        "not back: private (pip): pip had it from a file, a folder or an address, and no index has "
        "to have it; install it from there",
        "to install others by hand: `torpor ssh demo`",
    ]
    assert {"what": "packages", "value": report.packages[0]} in report.rows()
    assert images[1].system().apt() == {"jq": "1.6-2.1"}
    assert images[1].system().pip()["wanted"] == "1.5"
    slept = hibernate_plainly(kept.opened)  # a machine's snapshot names what it was to have
    was = _named(kept, report.snapshot)
    assert _named(kept, slept.snapshot) == was
    assert {*was.apt} == {"jq", "left-pad"}


def test_a_wake_that_keeps_no_environment_installs_nothing(
    asleep: Lab, images: list[Image]
) -> None:
    report = wake_plainly(asleep.opened)
    assert report.packages == []
    assert images[1].asked() == []
    assert _named(asleep, hibernate_plainly(asleep.opened).snapshot) == Packages()


def test_a_machine_that_does_not_answer_for_packages_fails_no_wake(
    asleep: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def packages(run: restore.RestoreRun, request: PutPackagesBack, call: object) -> object:
        asked.append(request.run)
        raise AgentLost("the agent was restarted")

    monkeypatch.setattr("torpor.machine.agent.operations.RestoreRun.packages", packages)
    kept = _keeps(asleep)
    report = wake_plainly(kept.opened)
    assert len(kept.machines()) == len(asked) == 1  # the restore is not begun again
    assert "whether packages of apt and pip are back is not known" in report.packages[0]
    was = _named(kept, report.snapshot)  # and the next snapshot loses no name
    assert {*was.apt, *was.pip, *was.files} == {"jq", "left-pad", "wanted", "private"}
    assert _named(kept, hibernate_plainly(kept.opened).snapshot) == was


def test_packages_are_back_before_a_machine_is_handed_over_and_a_killed_wake_is_asked_again(
    asleep: Lab, images: list[Image], monkeypatch: pytest.MonkeyPatch
) -> None:
    real = restore.RestoreRun.packages
    states: list[str] = []

    def packages(run: restore.RestoreRun, request: PutPackagesBack, call: object) -> object:
        states.extend(rental.state for rental in kept.opened.rentals.open())
        if len(states) == 1:
            raise RunCancelled("the flow was killed")
        return real(run, request, call)  # type: ignore[arg-type]

    monkeypatch.setattr("torpor.machine.agent.operations.RestoreRun.packages", packages)
    kept = _keeps(asleep)
    with pytest.raises(RunCancelled):
        wake_plainly(kept.opened)
    report = wake_plainly(kept.opened)
    assert len(kept.machines()) == 1
    assert "handed over" not in states
    assert len(states) == 2
    assert report.packages[0] == "back: jq 1.6-2.1 (apt), wanted 1.5 (pip)"
