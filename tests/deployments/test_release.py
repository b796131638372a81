"""The notes of a release are its section of the changelog, and nothing undated or uncommitted is
released."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from deployments.release import extract, notes_of
from torpor.shared.errors import InvalidInput

CHANGELOG = """# Changelog

## 0.3.0, unreleased

* new

## 0.2.0, 2026-12-24

* second
  in two lines

## 0.1.0, 2026-12-01

* first
"""


def test_the_notes_are_the_section_of_the_version() -> None:
    assert notes_of("0.2.0", CHANGELOG) == "## 0.2.0, 2026-12-24\n\n* second\n  in two lines\n"
    assert notes_of("0.1.0", CHANGELOG) == "## 0.1.0, 2026-12-01\n\n* first\n"


def test_a_version_without_a_date_or_a_section_is_refused() -> None:
    with pytest.raises(InvalidInput, match=r"calls 0\.3\.0 unreleased: write the date"):
        notes_of("0.3.0", CHANGELOG)
    with pytest.raises(InvalidInput, match=r"no section `## 0\.4\.0, DATE`"):
        notes_of("0.4.0", CHANGELOG)


def test_what_git_ignores_or_does_not_know_is_in_no_release(tmp_path: Path) -> None:
    checkout, into = tmp_path / "checkout", tmp_path / "into"
    checkout.mkdir()
    into.mkdir()
    (checkout / "code.py").write_text("committed")
    (checkout / ".gitignore").write_text("*.key\n")
    as_somebody = ["-c", "user.name=somebody", "-c", "user.email=somebody@example.com"]
    for argv in (["init", "--quiet"], ["add", "."], [*as_somebody, "commit", "-qm", "first"]):
        subprocess.run(["git", *argv], cwd=checkout, check=True)
    (checkout / "mine.key").write_text("secret")
    (checkout / "notes.txt").write_text("not added")
    (checkout / "code.py").write_text("changed since")
    extract(checkout, into)
    assert sorted(path.name for path in into.iterdir()) == [".gitignore", "code.py"]
    assert (into / "code.py").read_text() == "committed"
