"""A sync, and programs that have its files open for writing."""

from __future__ import annotations

import os

import pytest

from tests.fixtures.snapshots import Two
from tests.fixtures.trees import differences, facts, let_settle
from torpor.shared.errors import StillChanging, UnsavedWork


@pytest.mark.rule(12)
@pytest.mark.parametrize("name", ["d/edited", "gone", "big"])
def test_a_file_that_a_program_writes_is_refused_by_name(two: Two, name: str) -> None:
    """Replaced, removed or patched, it would have no name: the next lines would be in no file."""
    there = facts(two.root)
    with (two.root / name).open("ab", buffering=0) as log:
        this = rf"{name} \(process {os.getpid()} \(.*\)\)"
        with pytest.raises(UnsavedWork, match=rf"{this}.*stop .*discard_local"):
            two.engine.begin_sync(two.second)
        assert differences(there, facts(two.root)) == []
        log.write(b"a line")
    assert (two.root / name).read_bytes().endswith(b"a line")
    let_settle()
    two.engine.snapshot([two.root])
    two.sync()


@pytest.mark.rule(12)
@pytest.mark.parametrize("name", ["d/edited", "gone", "big"])
def test_a_file_that_a_program_opens_after_the_look_is_left_as_it_is(two: Two, name: str) -> None:
    run = two.engine.staged_sync(two.second)
    with (two.root / name).open("ab", buffering=0) as log:
        with pytest.raises(StillChanging, match=rf"'{name}' .* open for writing"):
            run.finish()
        run.end()
        with pytest.raises(UnsavedWork, match=rf"{name} .* run has changed a part already"):
            two.engine.begin_sync(two.second)
        log.write(b"a line")
    assert (two.root / name).read_bytes().endswith(b"a line")
    assert two.engine.sync(two.second).kept == [name]
    assert (two.root / name).read_bytes().endswith(b"a line")


@pytest.mark.rule(12)
def test_an_accepted_loss_names_what_a_program_still_writes(two: Two) -> None:
    with (two.root / "d/edited").open("ab"), (two.root / "d/same").open("ab"):
        done = two.sync(discard_local=True)
    assert (done.discarded, done.discarded_count) == (["d/edited"], 1)
