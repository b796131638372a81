"""What a snapshot says about its machine."""

from __future__ import annotations

import importlib.metadata
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from torpor.machine.agent import environment
from torpor.machine.agent.environment import python_places, record_environment


def test_the_packages_are_those_that_python_finds() -> None:
    found = importlib.metadata.distributions(path=python_places())
    named = {package.metadata["Name"]: package.version for package in found}
    assert record_environment()["python_packages"] == named
    assert named["msgspec"]


def test_the_places_of_packages_are_found_also_from_a_folder_that_was_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An editable installation adds a name to the path that is no place."""
    removed = tmp_path / "removed"
    removed.mkdir()
    monkeypatch.chdir(removed)
    removed.rmdir()
    hook = "__editable__.torpor-0.1.0.finder.__path_hook__"
    monkeypatch.setattr(sys, "path", ["/bundle", "/usr/lib/python3", hook, ""])
    assert python_places() == ["/usr/lib/python3"]


def test_what_processes_need_of_a_machine_is_recorded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tool = tmp_path / "nvidia-smi"
    lines = [f"NVIDIA L4, 23034 MiB, {uuid}" for uuid in ("GPU-7b", "GPU-9c")]
    tool.write_text("\n".join(["#!/bin/sh", *(f"echo {line}" for line in lines), ""]))
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    code = "import json; from torpor.machine.agent import environment as machine; "
    code += "print(json.dumps(machine.record_environment()))"
    found = json.loads(subprocess.check_output([sys.executable, "-c", code]))  # an agent reads once
    assert found["gpus"] == ["NVIDIA L4, 23034 MiB"] * 2
    assert found["gpu_uuids"] == ["GPU-7b", "GPU-9c"]
    assert found["kernel"] == os.uname().release
    assert {"fpu", "sse2"} <= set(found["cpu_features"].split())


@pytest.mark.parametrize("file", ["a.dist-info/METADATA", "a.egg-info/PKG-INFO", "a.egg-info"])
def test_every_kind_of_package_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, file: str
) -> None:
    head = "Metadata-Version: 2.1\nName: a-package\nVersion: 1.2+cu121\nSummary: it\n"
    (tmp_path / file).parent.mkdir(exist_ok=True)
    (tmp_path / file).write_text(f"{head}\nName: a line of the description\n")
    (tmp_path / "broken.dist-info").mkdir()
    (tmp_path / "broken.dist-info/METADATA").write_text("Name: broken\n")
    monkeypatch.setattr(environment, "python_places", lambda: [str(tmp_path)])
    assert record_environment()["python_packages"] == {"a-package": "1.2+cu121"}


def test_an_odd_record_of_a_package_stops_no_snapshot(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("latin", "loop"):
        (tmp_path / f"{name}-1.0.dist-info").mkdir()
    head = b"Name: latin\nVersion: 1.0\nAuthor: J\xf6rg\n"
    (tmp_path / "latin-1.0.dist-info/METADATA").write_bytes(head)
    (tmp_path / "loop-1.0.dist-info/METADATA").symlink_to("METADATA")
    monkeypatch.setattr(environment, "python_places", lambda: [str(tmp_path)])
    assert record_environment()["python_packages"] == {"latin": "1.0"}
