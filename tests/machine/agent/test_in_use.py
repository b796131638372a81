"""What is in use is known after a kill, and nothing of it after a start of the machine."""

from __future__ import annotations

from pathlib import Path

import pytest

from torpor.machine.agent.in_use import InUse
from torpor.machine.tree.names import Signature

SEEN = Signature(1, 2, 3, 4)


def _kept(path: Path) -> None:
    in_use = InUse(path, b"id")
    in_use.add({0: SEEN, 1: None})
    in_use.attributes.refused_xattrs.add((0, b"name", b"user.x"))
    in_use.attributes.warnings.append("a warning")
    in_use.add({2: SEEN})


def test_the_next_agent_knows_it(tmp_path: Path) -> None:
    _kept(tmp_path / "in-use")
    again = InUse(tmp_path / "in-use", b"id")
    assert again.signatures == {0: SEEN, 1: None, 2: SEEN}
    assert again.attributes.refused_xattrs == {(0, b"name", b"user.x")}
    assert again.attributes.warnings == ["a warning"]
    assert not again.lapsed
    again.clear()
    assert [*tmp_path.iterdir()] == []


def test_another_restore_and_another_boot_know_nothing_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _kept(tmp_path / "in-use")
    other = InUse(tmp_path / "in-use", b"another")
    assert (other.signatures, other.lapsed) == ({}, False)
    monkeypatch.setattr("torpor.machine.agent.in_use.boot_id", lambda: "another boot")
    for _ in range(2):  # also once names of this boot are in use
        later = InUse(tmp_path / "in-use", b"id")
        assert later.lapsed
        later.add({7: SEEN})
    assert later.signatures == {7: SEEN}
