"""What follows what comes first: it has no name before it is complete, and takes no other's."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path

import pytest

from tests.fixtures.engine import Engine
from tests.fixtures.kill_points import OF_TREES, killed_at
from tests.fixtures.memory_store import MemoryStore
from tests.fixtures.snapshots import Machines, Waking, waking_of
from tests.fixtures.trees import content, differences, facts, let_settle
from torpor.shared.errors import InvalidInput
from torpor.shared.values import MIB

FIRST = ["model"]
LONG = "n" * 255


@pytest.fixture
def waking(machines: Machines, memory_store: MemoryStore, tmp_path: Path) -> Waking:
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
    return waking_of(machines, memory_store, was)


def _named(back: Path) -> set[str]:
    """Every name but those of directories, and those in a directory of torpor's own."""
    return {
        os.fsdecode(path)
        for path, fact in facts(back).items()
        if fact.kind != "directory" and not path.startswith(b".torpor-")
    }


@pytest.mark.rule(5)
def test_what_follows_has_no_name_until_it_is_complete(waking: Waking) -> None:
    """A server that starts on what came first must fail, not load zeros."""
    waking.begin(FIRST)
    assert _named(waking.back) == set()
    waking.fetch(waking.parts(first=True))
    waking.run.finish_first()
    assert _named(waking.back) == {"model/weights", "model/config"}
    for part in waking.parts(first=False):
        waking.fetch([part])
        assert _named(waking.back) == {"model/weights", "model/config"}
    waking.complete()


@pytest.mark.rule(5)
@pytest.mark.parametrize("killed", [False, True], ids=["going on", "killed"])
def test_what_a_program_made_under_a_name_that_follows_is_never_overwritten(
    waking: Waking, killed: bool
) -> None:
    waking.use(FIRST)
    back = waking.back
    made = ["rest/big", "rest/small", "rest/none", "rest/hole", "rest/link", f"rest/{LONG}"]
    for name in made:
        (back / name).write_bytes(b"precious")
    waking.begin_again(FIRST)
    for _ in range(2):
        if killed:
            waking.begin_again(FIRST)
        waking.fetch()
        with pytest.raises(InvalidInput, match=r"overwritten\. Move them") as refused:
            waking.run.finish()
        assert all(repr(name) in str(refused.value) for name in made)
        assert {(back / name).read_bytes() for name in made} == {b"precious"}
        assert not (back / "rest/deep/same").exists()  # it would be the program's file
    for name in made:
        (back / name).unlink()
    (back / "rest/deep/same").write_bytes(b"precious")
    with pytest.raises(InvalidInput, match=r"'rest/deep/same': .* overwritten"):
        waking.run.finish()
    (back / "rest/deep/same").unlink()
    waking.complete()


@pytest.mark.parametrize(("before", "after"), [([], FIRST), (FIRST, []), (FIRST, ["rest/big"])])
@pytest.mark.parametrize("parts", [1, 2, 100])
def test_an_order_that_changes_between_two_wakes_fetches_nothing_again(
    waking: Waking, before: list[str], after: list[str], parts: int
) -> None:
    whole = waking.begin(before).parts
    fetched = waking.fetch(whole[:parts])
    waking.begin_again(after)
    fetched += waking.fetch(waking.parts(first=True))
    if after:
        assert waking.run.finish_first().differences == []
    fetched += waking.fetch(waking.parts(first=False))
    waking.complete()
    assert fetched == sum(part.stored_bytes for part in whole)


@pytest.mark.rule(5)
def test_a_restore_killed_at_any_step_is_completed_whatever_comes_first_then(
    waking: Waking,
) -> None:
    store, home = waking.engine.store, waking.engine.home
    orders: list[list[str]] = [FIRST, [], ["rest/deep", "rest/small"]]

    def restore(back: Path, first: list[str]) -> None:
        Engine(store, home).restore(waking.snapshot, [back], first=first)

    waking.engine.runs.close()
    step, killed = 0, True
    while killed:
        step += 1
        back = waking.back.with_name(f"back-{step}")
        killed = killed_at(step, partial(restore, back, orders[step % 3]), OF_TREES)
        engine = Engine(store, home)
        engine.restore(waking.snapshot, [back], first=orders[step // 3 % 3], resume=True)
        assert differences(waking.truth, facts(back)) == [], f"killed at step {step}"
        engine.runs.close()
    assert step > 40
