"""What a snapshot says about its machine."""

from __future__ import annotations

import importlib.metadata
from pathlib import Path

import pytest

from torpor.machine.agent import environment
from torpor.machine.agent.environment import python_places, record_environment


def test_the_packages_are_those_that_python_finds() -> None:
    found = importlib.metadata.distributions(path=python_places())
    named = {package.metadata["Name"]: package.version for package in found}
    assert record_environment()["python_packages"] == named
    assert named["msgspec"]


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
