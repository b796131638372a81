"""What is in use is known after a kill, and nothing of it after a start of the machine."""

from __future__ import annotations

from pathlib import Path

import pytest

from torpor.machine.agent.in_use import UNKNOWN, InUse
from torpor.machine.tree.names import Signature

SEEN = Signature(1, 2, 3, 4)


def _noted(path: Path) -> InUse:
    in_use = InUse(path, b"id")
    in_use.add({0: SEEN, 1: None})
    in_use.note({2: UNKNOWN, 3: UNKNOWN, 4: UNKNOWN})
    in_use.attributes.refused_xattrs.add((0, b"name", b"user.x"))
    in_use.attributes.warnings.append("a warning")
    in_use.note({2: SEEN}, [3])
    return in_use


def test_it_is_read_from_both_files_and_settled_into_one(tmp_path: Path) -> None:
    known = {0: SEEN, 1: None, 2: SEEN, 4: UNKNOWN}
    assert _noted(tmp_path / "in-use").signatures == known
    again = InUse(tmp_path / "in-use", b"id")
    assert again.signatures == known
    again.settle(lambda number: number != 4)
    assert [path.name for path in tmp_path.iterdir()] == ["in-use"]
    again.note({5: SEEN})
    last = InUse(tmp_path / "in-use", b"id")
    assert last.signatures == {0: SEEN, 1: None, 2: SEEN, 5: SEEN}
    assert last.attributes.refused_xattrs == {(0, b"name", b"user.x")}
    assert last.attributes.warnings == ["a warning"]
    assert not last.lapsed
    last.clear()
    assert [*tmp_path.iterdir()] == []


def test_a_kill_tears_only_the_last_note(tmp_path: Path) -> None:
    _noted(tmp_path / "in-use")
    log = tmp_path / "in-use.log"
    whole = log.read_bytes()
    for size in range(len(whole)):
        log.write_bytes(whole[:size])
        in_use = InUse(tmp_path / "in-use", b"id")
        noted = set(in_use.signatures) - {0, 1}
        assert noted in (set(), {2, 3, 4})
    assert noted == {2, 3, 4}


def test_another_restore_and_another_boot_know_nothing_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _noted(tmp_path / "in-use")
    other = InUse(tmp_path / "in-use", b"another")
    assert (other.signatures, other.lapsed) == ({}, False)
    monkeypatch.setattr("torpor.machine.agent.in_use.boot_id", lambda: "another boot")
    for _ in range(2):  # also once names of this boot are in use
        later = InUse(tmp_path / "in-use", b"id")
        later.settle(lambda number: True)
        assert later.lapsed
        later.note({7: SEEN})
    assert later.signatures == {7: SEEN}
