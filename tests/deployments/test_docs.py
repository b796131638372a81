"""What the documents name is there: files, tests, and each other."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

PROJECT = Path(__file__).resolve().parents[2]
SAFETY = PROJECT / "docs" / "safety.md"


def test_safety_names_files_that_are_there() -> None:
    named = re.findall(r"`((?:torpor|tests|tasks|flows|blocks)/[\w./]*)`", SAFETY.read_text())
    assert len(named) > 30
    assert [path for path in named if not (PROJECT / path).exists()] == []


def test_safety_names_tests_that_are_there() -> None:
    found = re.findall(r"`(tests/[\w/.]+)`\s+\(((?:`test_\w+`[,\s]*)+)\)", SAFETY.read_text())
    assert len(found) > 20
    missing = [
        f"{path}::{name}"
        for path, names in found
        for name in re.findall(r"test_\w+", names)
        if f"def {name}(" not in _text(PROJECT / path)
    ]
    assert missing == []


@pytest.mark.parametrize("page", ["README.md", "docs/decisions.md", "docs/safety.md"])
def test_links_lead_somewhere(page: str) -> None:
    text = (PROJECT / page).read_text()
    links = re.findall(r"\]\((?!https?:)([^)#]+)\)", text)
    assert [link for link in links if not (PROJECT / page).parent.joinpath(link).exists()] == []


def test_the_readme_names_make_targets_that_are_there() -> None:
    targets = set(re.findall(r"^(\w+):", (PROJECT / "Makefile").read_text(), re.MULTILINE))
    named = set(re.findall(r"\bmake (\w+)", (PROJECT / "README.md").read_text()))
    assert {"demo", "test", "up", "down"} <= named
    assert named <= targets


def _text(path: Path) -> str:
    """Of a file, or of all tests in a folder."""
    files = sorted(path.glob("*.py")) if path.is_dir() else [path]
    return "\n".join(file.read_text() for file in files)
