"""A sync that is killed at any step leaves every file whole, and the next one completes it."""

from __future__ import annotations

import os
import shutil
from functools import partial
from pathlib import Path

import pytest

from tests.fixtures.engine import WORKSPACE, Engine
from tests.fixtures.kill_points import OF_TREES, killed_at
from tests.fixtures.memory_store import MemoryStore
from tests.fixtures.trees import Facts, content, differences, facts, kept, let_settle, set_xattr
from torpor.machine.agent.state import WorkspaceState
from torpor.shared.errors import WorkspaceInvalid
from torpor.shared.values import MIB, SnapshotId


def _plant(root: Path) -> None:
    (root / "d/deep").mkdir(parents=True)
    (root / "big").write_bytes(content(1, 5 * MIB))
    (root / "moves").write_bytes(content(2, 2 * MIB))
    for number in range(3):
        (root / f"d/{number}").write_bytes(content(number + 10, 3000))
    os.link(root / "d/0", root / "d/deep/same")
    (root / "link").symlink_to("big")
    (root / "becomes-directory").write_bytes(b"a file")
    (root / "becomes-file/with").mkdir(parents=True)
    (root / "becomes-file/with/content").write_bytes(b"below")
    with (root / "sparse").open("wb") as file:
        file.truncate(6 * MIB)
        os.pwrite(file.fileno(), b"end", 5 * MIB)


def _change(root: Path) -> None:
    """Everything that can become of a name."""
    with (root / "big").open("r+b") as file:
        os.pwrite(file.fileno(), b"changed", 4 * MIB + 5)  # most of it stays: it is patched
    (root / "moves").rename(root / "d/deep/moved")
    (root / "d/1").write_bytes(content(20, 3000))
    (root / "d/2").unlink()
    (root / "d/deep/same").unlink()
    os.link(root / "d/1", root / "d/deep/same")
    (root / "link").unlink()
    (root / "link").symlink_to("d")
    (root / "becomes-directory").unlink()
    (root / "becomes-directory").mkdir(0o711)
    (root / "becomes-directory/new").write_bytes(content(30, 2000))
    shutil.rmtree(root / "becomes-file")
    (root / "becomes-file").write_bytes(b"a file now")
    (root / "d/0").chmod(0o600)
    set_xattr(os.fsencode(root / "d"), "user.new", b"value")
    with (root / "sparse").open("r+b") as file:
        os.pwrite(file.fileno(), b"begin", 0)


@pytest.mark.rule(12)
def test_a_sync_killed_at_any_step_is_completed_by_the_next(
    memory_store: MemoryStore, tmp_path: Path
) -> None:
    was, home, store = tmp_path / "was", tmp_path / "home", memory_store
    _plant(was)
    let_settle()
    engine = Engine(store, home)
    states = {engine.snapshot([was]): kept(was)}
    _change(was)
    let_settle()
    states[engine.snapshot([was])] = kept(was)
    half = step = finished = 0
    while finished < 2:  # there and back again, each killed at every other step
        engine.runs.close()
        step += 1
        wanted = list(states)[step % 2 - 1]
        if not killed_at(step, partial(_sync_anew, store, home, wanted), OF_TREES):
            finished += 1
        engine = Engine(store, home)
        _is_of_the_two(was, *states.values())
        record = WorkspaceState(home, WORKSPACE).sync_record()
        if record is not None and record.mixed:
            half += 1
            with pytest.raises(WorkspaceInvalid, match=f"only half of snapshot {wanted}"):
                engine.begin([was])
        done = engine.sync(wanted)
        assert differences(states[wanted], facts(was)) == [], f"killed at step {step}"
        assert done.kept == []
    assert half > 20


def _sync_anew(store: MemoryStore, home: Path, wanted: SnapshotId) -> None:
    Engine(store, home).sync(wanted)


def _is_of_the_two(root: Path, before: dict[bytes, Facts], after: dict[bytes, Facts]) -> None:
    """Every file under a name of the snapshots has the content that one of them says."""
    for path, now in facts(root).items():
        if any(name.startswith(b".torpor-") for name in path.split(b"/")):
            continue
        contents = {
            (fact.kind, fact.size, fact.content, fact.target)
            for fact in (before.get(path), after.get(path))
            if fact is not None
        }
        assert (now.kind, now.size, now.content, now.target) in contents, path
