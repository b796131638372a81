"""Names of one file in two directories of a workspace come back as two files, and the user hears
it."""

from __future__ import annotations

from pathlib import Path

from tests.fixtures.engine import Engine
from tests.fixtures.trees import let_settle


def test_hard_links_between_two_directories_are_named(engine: Engine, tmp_path: Path) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    for folder in (one, two):
        (folder / "d").mkdir(parents=True)
        (folder / "d/within").write_text("a file of two names in one directory")
        (folder / "same").hardlink_to(folder / "d/within")
    (two / "d/name").hardlink_to(one / "d/within")
    (two / "other").hardlink_to(one / "same")
    let_settle()
    expected = [f"{two}/d/name", f"{two}/other"]
    for _ in range(2):  # also while nothing is new
        report = engine.hibernate([one, two])
        assert sorted(report.parted) == expected
    assert [row["value"] for row in report.rows() if "separate" in row["value"]] == [
        f"2 names, {', '.join(report.parted)}: they come back as separate files"
    ]
    assert engine.hibernate([one]).parted == []
