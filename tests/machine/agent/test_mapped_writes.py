"""What a program stores through a mapping while a snapshot is made is in it, or is named."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.fixtures.engine import Engine
from tests.fixtures.mapper import Mapper, stored
from tests.fixtures.snapshots import commit, store_parts
from tests.fixtures.trees import content, let_settle
from torpor.machine.tree import mappings
from torpor.shared.values import MIB


@pytest.mark.parametrize("size", [3000, 5 * MIB])
def test_the_last_store_of_a_program_that_ends_after_the_read_is_kept(
    engine: Engine, tmp_path: Path, size: int
) -> None:
    """It stores while the disk is walked, and once more after the file was read."""
    was = tmp_path / "was"
    for number in range(200):  # the walk takes a while until it looks at the file
        (was / f"{number:03}").mkdir(parents=True)
    file = was / "199/mapped"
    file.write_bytes(content(1, size))
    let_settle()
    run = engine.begin([was])
    with Mapper(file) as program:
        with program.busy():
            scan = run.scan(1)
        let_settle()
        store_parts(run, 1, scan)
        last = program.end()
    number = 2
    while (scan := run.scan(number)).parts:
        let_settle()
        store_parts(run, number, scan)
        number += 1
    snapshot, _ = commit(run)
    assert run.confirm().unaccepted == []
    run.end(committed=True)
    engine.restore(snapshot, [tmp_path / "back"])
    assert stored(tmp_path / "back/199/mapped") == last


def test_a_store_after_the_last_read_is_seen_by_the_last_look(engine: Engine, was: Path) -> None:
    run = engine.begin([was])
    with Mapper(was / "big") as program:
        program.store()
        let_settle()
        store_parts(run, 1, run.scan(1))
        assert run.scan(2).unaccepted == []
        commit(run)
        program.store()
    assert run.confirm().unaccepted == ["big"]
    run.end(committed=True)


def test_who_alone_keeps_a_file_from_counting_as_unchanged_is_named(
    engine: Engine, was: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In each walk: the machine is kept until that process has ended."""
    monkeypatch.setattr(mappings, "shows_stores", lambda place: False)
    run = engine.begin([was])
    with Mapper(was / "big") as program:
        let_settle()
        says = re.escape(f"big ({program.name} has it mapped for writing") + ", .*: end that .*"
        store_parts(run, 1, run.scan(1))
        (again,) = (seen := run.scan(2)).unaccepted
        store_parts(run, 2, seen)
        commit(run)
        (last,) = run.confirm().unaccepted
    for name in (again, last):
        assert re.fullmatch(says, name)
    run.end(committed=False)
