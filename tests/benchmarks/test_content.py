"""Content to measure with is never twice the same."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import content
from torpor.shared.values import MIB


def _read(folder: Path) -> dict[str, bytes]:
    files = (path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


def test_the_same_seed_makes_the_same_and_another_shares_no_file(tmp_path: Path) -> None:
    made = content.make_below(tmp_path / "a", 4 * MIB, 7)
    content.make_below(tmp_path / "b", 4 * MIB, 7)
    content.make_below(tmp_path / "c", 4 * MIB, 8)
    a, b, c = (_read(tmp_path / name) for name in "abc")
    assert a == b
    assert not set(a.values()) & set(c.values())
    assert (made.files, made.bytes) == (len(a), sum(map(len, a.values())))
    assert made.bytes == pytest.approx(4 * MIB, rel=0.15)
    assert {name.split("/")[0] for name in a} == {"models", "env", "data"}
