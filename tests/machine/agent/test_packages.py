"""Packages of apt and pip outside of the workspace: which are named, and how they come back."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.fixtures.images import Image, put_wheels
from torpor.machine.agent.packages import note_wanted, packages_to_record, put_back
from torpor.shared.errors import RunCancelled
from torpor.shared.format.packages import Packages, packages_in
from torpor.shared.wire.packages import NotBack, PackagesBack


@pytest.fixture
def image(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Image:
    """One whose apt-get comes first in PATH, and whose pip reaches local wheels alone."""
    made = Image(tmp_path / "image")
    monkeypatch.setenv("PATH", f"{made.programs}:{os.environ['PATH']}")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "wheels"))
    return made


def _nothing() -> None:
    """The request is not cancelled."""


def _cancelled() -> None:
    raise RunCancelled("the wake was cancelled")


def test_what_was_asked_for_is_recorded_and_what_came_with_it_or_is_gone_is_not(
    image: Image, tmp_path: Path
) -> None:
    for name in ("jq", "libjq1"):
        image.has(name, "1.6-2.1")
    (image.folder / "var/lib/dpkg/info/removed.list").touch()  # its settings stay
    states = image.folder / "var/lib/apt/extended_states"
    states.parent.mkdir()
    states.write_text("Package: libjq1\nAuto-Installed: 1\n")
    image.has_of_pip("Typing_Thing", "1.0")
    image.has_of_pip("mine", "2.0", by_file=True)
    pip = image.system().pip()["pip"]
    found = packages_to_record(tmp_path, image.system())
    assert found == Packages(
        {"jq": "1.6-2.1"}, {"pip": pip, "typing-thing": "1.0"}, {"mine": "2.0"}
    )
    assert packages_in(found.record()) == found
    assert packages_to_record(tmp_path, image.system(since_ns=1 << 62)) == Packages()
    assert packages_to_record(tmp_path, image.system(since_ns=0)) == Packages()


def test_packages_come_back_and_one_that_cannot_keeps_no_other_away(
    image: Image, tmp_path: Path
) -> None:
    """pip is a real one, with a local wheel."""
    image.offers(jq="1.6-2.1", tree="2.1.1", htop="3.2")
    (image.folder / "broken").write_text("htop\n")
    put_wheels(tmp_path / "wheels", {"wanted": "1.5"})
    wanted = Packages(
        {"jq": "1.6-2.1", "tree": "2.0.0", "htop": "3.2", "python3.11": "3.11.2"},
        {"wanted": "1.5", "nowhere": "3.0"},
        {"mine": "2.0"},
    )
    answer = put_back(image.system(), wanted, _nothing)
    assert answer == PackagesBack(
        ["jq 1.6-2.1 (apt)", "wanted 1.5 (pip)"], 2,
        ["tree 2.1.1 instead of 2.0.0 (apt)"], 1,
        [
            NotBack("apt", "E: htop=3.2 has a broken script", ["htop"], 1),
            NotBack("apt", "no package source of this machine has it", ["python3.11"], 1),
            NotBack("pip", "pip had it from a file, a folder or an address, which no index has to "
                    "have", ["mine"], 1),
            NotBack("pip", "ERROR: No matching distribution found for nowhere==3.0",
                    ["nowhere"], 1),
        ],
    )  # fmt: skip
    python = image.folder / "python/bin/python"
    code = "import wanted; print(wanted.version)"
    assert subprocess.check_output([python, "-c", code], text=True) == "1.5\n"
    assert not any("python3.11" in line for line in image.asked())  # else an expression
    assert all("--no-remove" in line for line in image.asked() if " install " in line)
    asked = len(image.asked())
    (image.folder / "broken").write_text("")
    again = put_back(image.system(), Packages({"jq": "1.6-2.1"}, {"wanted": "1.5"}), _nothing)
    assert again == PackagesBack([], 0, [], 0, [])
    assert len(image.asked()) == asked


@pytest.mark.parametrize("lacks", ["root", "apt-get", "lock", "pip", "leave", "time"])
def test_a_machine_that_can_install_nothing_says_why(
    image: Image, monkeypatch: pytest.MonkeyPatch, lacks: str
) -> None:
    image.offers(jq="1.6", tree="2.0")
    system, within_s = image.system(), 600.0
    wanted = Packages({"jq": "1.6", "tree": "2.0"})
    program = image.programs / "apt-get"
    if lacks == "root":
        monkeypatch.setattr(os, "geteuid", lambda: 1000)
        (image.folder / "no-sudo").touch()
        why = "its user is not root and may not use sudo without a password"
    elif lacks == "apt-get":
        monkeypatch.setenv("PATH", str(image.folder))
        why = "this machine has no apt-get"
    elif lacks == "lock":
        why = "E: Could not get lock /var/lib/dpkg/lock-frontend. It is held by process 7"
        program.write_text(f"#!/bin/sh\necho x >>{image.folder}/asked\necho '{why}'\nexit 100\n")
    elif lacks == "pip":
        shutil.rmtree(image.place / "pip")
        wanted = Packages(pip={"jq": "1.6", "tree": "2.0"})
        why = f"the machine's Python, {system.python}, has no pip"
    elif lacks == "leave":
        why = "torpor installs nothing on a machine of your own"
        system = image.system(why_not=why)
    else:
        within_s = 0.0
        why = "the 600 s that torpor takes for packages were over"
    answer = put_back(system, wanted, _nothing, within_s)
    kind = "pip" if lacks == "pip" else "apt"
    assert answer.back == answer.other == []
    (missing,) = answer.not_back
    assert (missing.kind, missing.names) == (kind, ["jq", "tree"])
    assert why in missing.why
    if lacks == "lock":  # each further try would wait for the lock
        assert len(image.asked()) == 2


def test_a_cancelled_request_ends_the_program_that_runs(image: Image) -> None:
    (image.programs / "apt-get").write_text("#!/bin/sh\nexec sleep 1000\n")
    with pytest.raises(RunCancelled):
        put_back(image.system(), Packages({"jq": "1.6"}), _cancelled)


@pytest.mark.parametrize("name", ["bash-", "-o=x", "a b", "x;reboot", "jq=1", "^a", "a*", "é1", ""])
def test_a_name_that_is_no_package_is_given_to_no_program(name: str) -> None:
    record = {"apt": {name: "1.0", "jq": "1.6"}, "pip": {name: "1.0"}, "files": {}}
    assert packages_in({"added_packages": record}) == Packages({"jq": "1.6"})
    record = {"apt": {"jq": name}, "pip": {"jq": name}, "files": {}}
    if name != "bash-":  # of a version, a hyphen removes nothing
        assert packages_in({"added_packages": record}) == Packages()


@pytest.mark.parametrize("record", [None, [], {"apt": 1}, {"apt": {"jq": 1}}])
def test_a_record_of_another_form_names_nothing(record: object) -> None:
    assert packages_in({"added_packages": record}) == Packages()


def test_what_did_not_come_back_is_named_again_and_what_a_user_removed_is_not(
    image: Image, tmp_path: Path
) -> None:
    image.has("jq", "1.7")  # as the image brought it, so that only the wake says that it is wanted
    machine = image.system(since_ns=1 << 62)
    wanted = Packages({"jq": "1.6", "tree": "2.0"}, {"pip": "0.1", "gone": "1.0"}, {"mine": "2.0"})
    note_wanted(tmp_path, machine, wanted)
    kept = Packages({"jq": "1.7", "tree": "2.0"}, wanted.pip, wanted.files)
    assert packages_to_record(tmp_path, machine) == kept
    (image.folder / "var/lib/dpkg/status").write_text("")
    kept = Packages({"tree": "2.0"}, wanted.pip, wanted.files)
    assert packages_to_record(tmp_path, machine) == kept
