"""What follows what comes first: it has no name before it is complete, and takes no other's."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path

import pytest

from tests.fixtures.engine import Engine
from tests.fixtures.kill_points import OF_TREES, killed_at
from tests.fixtures.stores import Server
from tests.fixtures.trees import content, differences, facts, kept, let_settle
from torpor.control.store.s3 import S3Store
from torpor.shared.errors import InvalidInput
from torpor.shared.values import MIB, SnapshotId
from torpor.shared.wire.restore import RestorePart, RestorePlan

FIRST = ["model"]
LONG = "n" * 255


@pytest.fixture
def was(tmp_path: Path) -> Path:
    """A workspace with every kind of name, before and after what comes first."""
    was = tmp_path / "was"
    (was / "model").mkdir(parents=True)
    (was / "rest/deep").mkdir(parents=True)
    (was / "model/weights").write_bytes(content(1, 5 * MIB))
    (was / "model/config").write_bytes(content(2, 3000))
    (was / "rest/big").write_bytes(content(3, 5 * MIB))
    (was / "rest/small").write_bytes(content(4, 3000))
    (was / "rest/small").chmod(0o400)
    (was / f"rest/{LONG}").write_bytes(b"the longest name")
    (was / "rest/none").write_bytes(b"")
    with (was / "rest/hole").open("wb") as file:
        file.truncate(2 * MIB)
    os.link(was / "rest/small", was / "rest/deep/same")
    (was / "rest/link").symlink_to("small")
    (was / "rest").chmod(0o2551)
    let_settle()
    return was


def _fetched(plan: RestorePlan, *, first: bool) -> list[RestorePart]:
    return [part for part in plan.parts if part.first == first]


def _named(back: Path) -> set[str]:
    """Every name but those of directories, and those in a directory of torpor's own."""
    return {
        os.fsdecode(path)
        for path, fact in facts(back).items()
        if fact.kind != "directory" and not path.startswith(b".torpor-")
    }


def _used(engine: Engine, snapshot: SnapshotId, back: Path) -> None:
    """Restore what comes first, and kill the agent."""
    run, plan = engine.begin_restore(snapshot, [back], first=FIRST)
    for part in _fetched(plan, first=True):
        run.restore_part(part)
    assert run.finish_first().differences == []
    engine.restart()


def test_what_follows_has_no_name_until_it_is_complete(engine: Engine, was: Path) -> None:
    """A server that starts on what came first must fail, not load zeros."""
    engine.part_bytes = 2 * MIB
    snapshot, back, truth = engine.snapshot([was]), was.with_name("back"), kept(was)
    run, plan = engine.begin_restore(snapshot, [back], first=FIRST)
    assert _named(back) == set()
    for part in _fetched(plan, first=True):
        run.restore_part(part)
    run.finish_first()
    assert _named(back) == {"model/weights", "model/config"}
    for part in _fetched(plan, first=False):
        run.restore_part(part)
        assert _named(back) == {"model/weights", "model/config"}
    run.finish()
    assert run.check(full=True).differences == []
    assert differences(truth, facts(back)) == []


@pytest.mark.parametrize("killed", [False, True], ids=["going on", "killed"])
def test_what_a_program_made_under_a_name_that_follows_is_never_overwritten(
    engine: Engine, was: Path, killed: bool
) -> None:
    engine.part_bytes = 2 * MIB
    snapshot, back, truth = engine.snapshot([was]), was.with_name("back"), kept(was)
    _used(engine, snapshot, back)
    made = ["rest/big", "rest/small", "rest/none", "rest/hole", "rest/link", f"rest/{LONG}"]
    for name in made:
        (back / name).write_bytes(b"precious")
    run, plan = engine.begin_restore(snapshot, [back], resume=True, first=FIRST)
    for _ in range(2):
        if killed:
            engine.restart()
            run, plan = engine.begin_restore(snapshot, [back], resume=True, first=FIRST)
        for part in plan.parts:
            run.restore_part(part)
        with pytest.raises(InvalidInput, match=r"overwritten\. Move them") as refused:
            run.finish()
        assert all(repr(name) in str(refused.value) for name in made)
        assert {(back / name).read_bytes() for name in made} == {b"precious"}
        assert not (back / "rest/deep/same").exists()  # it would be the program's file
    for name in made:
        (back / name).unlink()
    (back / "rest/deep/same").write_bytes(b"precious")
    with pytest.raises(InvalidInput, match=r"'rest/deep/same': .* overwritten"):
        run.finish()
    (back / "rest/deep/same").unlink()
    run.finish()
    assert run.check(full=True).differences == []
    assert differences(truth, facts(back)) == []


@pytest.mark.parametrize(("before", "after"), [([], FIRST), (FIRST, []), (FIRST, ["rest/big"])])
@pytest.mark.parametrize("parts", [1, 2, 100])
def test_an_order_that_changes_between_two_wakes_fetches_nothing_again(
    engine: Engine, was: Path, before: list[str], after: list[str], parts: int
) -> None:
    engine.part_bytes = 2 * MIB
    snapshot, back = engine.snapshot([was]), was.with_name("back")
    run, plan = engine.begin_restore(snapshot, [back], first=before)
    fetched = sum(run.restore_part(part).stored_bytes for part in plan.parts[:parts])
    engine.restart()
    run, again = engine.begin_restore(snapshot, [back], first=after, resume=True)
    for wanted in (True, False):
        for part in _fetched(again, first=wanted):
            fetched += run.restore_part(part).stored_bytes
        if wanted and after:
            assert run.finish_first().differences == []
    run.finish()
    assert run.check(full=True).differences == []
    assert differences(kept(was), facts(back)) == []
    assert fetched == sum(part.stored_bytes for part in plan.parts)


def test_a_restore_killed_at_any_step_is_completed_whatever_comes_first_then(
    seaweed: Server, tmp_path: Path, was: Path
) -> None:
    store, home, truth = seaweed.store(), tmp_path / "home", kept(was)
    engine = Engine(store, home)
    snapshot = engine.snapshot([was])
    orders: list[list[str]] = [FIRST, [], ["rest/deep", "rest/small"]]
    step = 0
    while True:
        engine.runs.close()
        step += 1
        back = tmp_path / f"back-{step}"
        first = orders[step % 3]
        if not killed_at(step, partial(_restore, store, home, snapshot, back, first), OF_TREES):
            break
        engine = Engine(store, home)
        engine.restore(snapshot, [back], first=orders[step // 3 % 3], resume=True)
        assert differences(truth, facts(back)) == [], f"killed at step {step}"
    assert step > 40


def _restore(
    store: S3Store, home: Path, snapshot: SnapshotId, back: Path, first: list[str]
) -> None:
    Engine(store, home).restore(snapshot, [back], first=first)
