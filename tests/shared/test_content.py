"""Content to measure with: never twice the same, like a workspace's, and only ours is removed."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from torpor.shared import content
from torpor.shared.codecs.layout import Element, Run
from torpor.shared.codecs.planes import PLANES
from torpor.shared.errors import InvalidInput
from torpor.shared.values import MIB


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HOME", str(tmp_path))
    return tmp_path


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


def test_the_weights_are_like_weights() -> None:
    plain = content.weights(MIB, random.Random(1))
    stored = PLANES.encode(memoryview(plain), [Run(len(plain), Element.BF16)])
    assert stored is not None
    assert 1.45 < len(plain) / len(stored) < 1.55


def test_only_what_was_made_is_removed(home: Path) -> None:
    content.make("x", MIB, 1, lambda: None)
    assert (home / "torpor-benchmark/x/models").is_dir()
    content.remove("x", place_too=False)
    assert not (home / "torpor-benchmark/x").exists()
    (home / "torpor-benchmark/x").mkdir()  # as a wake makes it again
    content.make("x", MIB, 2, lambda: None)
    content.remove("x", place_too=True)
    assert list(home.iterdir()) == []


def test_a_folder_of_the_user_s_is_left_alone(home: Path) -> None:
    (home / "torpor-benchmark/x").mkdir(parents=True)
    (home / "torpor-benchmark/x/mine").write_text("mine")
    with pytest.raises(InvalidInput, match="was not made by torpor"):
        content.make("x", MIB, 1, lambda: None)
    content.remove("x", place_too=True)
    assert (home / "torpor-benchmark/x/mine").read_text() == "mine"


@pytest.mark.parametrize("name", ["..", "a/b", "", "A"])
def test_a_name_never_leads_out(name: str, home: Path) -> None:
    with pytest.raises(InvalidInput):
        content.path_of(name)


def test_a_cancelled_making_ends(home: Path) -> None:
    def check() -> None:
        raise KeyError("cancelled")

    with pytest.raises(KeyError):
        content.make("x", MIB, 1, check)


def test_nothing_at_all_can_be_made_so_that_the_place_is_ours(home: Path) -> None:
    assert content.make("x", 0, 0, lambda: None).bytes < 1024
    content.remove("x", place_too=False)
    (home / "torpor-benchmark/x/models").mkdir(parents=True)  # as a replicate makes it
    content.remove("x", place_too=False)
    assert not (home / "torpor-benchmark/x").exists()
