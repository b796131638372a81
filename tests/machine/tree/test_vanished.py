"""What a workspace held and holds no more is noticed where it is most of it."""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.fixtures.trees import let_settle
from tests.fixtures.walks import as_read
from torpor.machine.agent.state import WorkspaceState
from torpor.machine.tree.names import Names
from torpor.machine.tree.vanished import Gone, vanished
from torpor.machine.tree.walk import compile_excludes, walk
from torpor.shared.format import missed
from torpor.shared.format.missed import FEW_NAMES
from torpor.shared.values import WorkspaceName


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Half of its files are in ``disk/data``, and one more."""
    for folder in ("disk/data", "code"):
        (tmp_path / folder).mkdir(parents=True)
        for number in range(20):
            (tmp_path / folder / f"{number}.txt").write_text(f"{folder} {number}")
    (tmp_path / "disk/data/more").write_text("more")
    return tmp_path


def _held(root: Path) -> Names:
    let_settle()
    return as_read(walk([os.fsencode(root)], Names(1), None, lambda: None))


def _gone(root: Path, before: Names, exclude: Sequence[str] = ()) -> list[Gone]:
    excluded = compile_excludes(exclude)
    seen = walk([os.fsencode(root)], before, excluded, lambda: None)
    return vanished(before, seen, [os.fsencode(root)], excluded)


def test_a_directory_with_most_of_the_files_is_named_by_what_is_left_of_it(root: Path) -> None:
    before = _held(root)
    shutil.rmtree(root / "disk/data")
    (gone,) = _gone(root, before)
    assert gone.path == os.fsencode(root / "disk")
    assert gone.names == 21
    assert gone.size == sum(len(f"disk/data {number}") for number in range(20)) + len("more")
    assert gone.stays_gone
    (root / "disk/data").mkdir()
    for name in gone.sample:
        Path(os.fsdecode(name)).touch()
    assert not gone.stays_gone


def test_a_few_large_files_count_by_their_bytes(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (root / "model").write_bytes(bytes(1000))
    before = _held(root)
    (root / "model").unlink()
    assert not _gone(root, before)
    monkeypatch.setattr(missed, "FEW_BYTES", 1000)
    assert [(gone.names, gone.size) for gone in _gone(root, before)] == [(1, 1000)]


def test_new_files_make_up_for_old_ones(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As checkpoints that follow each other."""
    monkeypatch.setattr(missed, "FEW_BYTES", 1000)
    (root / "checkpoint-1").write_bytes(bytes(2000))
    before = _held(root)
    (root / "checkpoint-1").unlink()
    (root / "checkpoint-2").write_bytes(bytes(2000))
    assert not _gone(root, before)


def test_less_than_half_was_removed_on_purpose(root: Path) -> None:
    before = _held(root)
    shutil.rmtree(root / "code")
    assert not _gone(root, before)


def test_what_was_moved_or_is_excluded_now_is_not_gone(root: Path) -> None:
    before = _held(root)
    (root / "disk/data").rename(root / "elsewhere")
    assert not _gone(root, before)
    (root / "elsewhere").rename(root / "disk/data")
    assert not _gone(root, before, ["disk"])


def test_a_small_workspace_may_lose_what_it_has(tmp_path: Path) -> None:
    for number in range(FEW_NAMES - 1):
        (tmp_path / f"{number}").touch()
    (tmp_path / "kept").touch()
    before = _held(tmp_path)
    for number in range(FEW_NAMES - 1):
        (tmp_path / f"{number}").unlink()
    assert not _gone(tmp_path, before)


@pytest.mark.parametrize("own", [".torpor-jobs/3f2a9c81d04e.log", ".torpor-process/run.log"])
def test_a_workspace_that_has_only_torpors_own_files_is_gone(tmp_path: Path, own: str) -> None:
    (tmp_path / own).parent.mkdir()
    for name in (own, "kept", "removed"):
        (tmp_path / name).write_text(name)
    before = _held(tmp_path)
    (tmp_path / "removed").unlink()
    (tmp_path / own).unlink()
    assert not _gone(tmp_path, before)
    (tmp_path / own).write_text("the command ended")
    (tmp_path / "kept").unlink()
    assert [(gone.names, sorted(gone.sample)) for gone in _gone(tmp_path, before)] == [
        (2, [os.fsencode(tmp_path / name) for name in ("kept", "removed")])
    ]


@pytest.mark.rule(22)
def test_a_disk_that_did_not_come_back_is_missing_until_a_restore(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = os.fsencode(tmp_path / "disk")
    mounted = {b"/", disk}
    monkeypatch.setattr(os.path, "ismount", mounted.__contains__)
    state = WorkspaceState(tmp_path / "home", WorkspaceName("demo"))
    root = os.path.join(disk, b"work")
    state.save_index(b"", b"", [root], b"")
    assert state.past().missing_disks() == []
    mounted.remove(disk)
    assert state.past().missing_disks() == [disk]
    state.save_index(b"", b"", [root], b"", gone=[])  # a backup of what is left
    assert state.past().missing_disks() == [disk]
    state.save_index(b"", b"", [root], b"")
    assert state.past().missing_disks() == []
