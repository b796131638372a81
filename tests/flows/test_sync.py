"""The sync flow on a real machine: what it moves, what it refuses, what it reports."""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest

import flows
from tests.fixtures.plain_flows import hibernate_plainly, run_plainly
from tests.fixtures.trees import differences, facts, fill, mutate
from tests.fixtures.world import World, kill
from torpor.control.reports import SyncReport
from torpor.shared.errors import InvalidInput, UnsavedWork
from torpor.shared.values import MIB


@pytest.fixture
def root(sealed_world: World) -> Path:
    """The workspace on a rented machine."""
    machine = sealed_world.rent()
    root = sealed_world.workspace(machine.id)
    fill(root, random.Random(1), big=2)
    return root


def _sync(world: World, **options: object) -> SyncReport:
    report: SyncReport = run_plainly(world.opened, flows.sync, **options)
    return report


def test_a_machine_goes_back_and_forth(sealed_world: World, root: Path) -> None:
    world = sealed_world
    first, before = hibernate_plainly(world.opened, destroy=False), facts(root)
    mutate(root, random.Random(2))
    with pytest.raises(UnsavedWork, match="Nothing was changed: save them with `save_first`"):
        _sync(world, snapshot=first.snapshot)
    mine = facts(root)

    back = _sync(world, snapshot=first.snapshot, save_first=True, full_check=True)
    assert differences(before, facts(root)) == []
    assert (back.last, back.snapshot) == (back.saved, first.snapshot)
    assert back.checked == "every byte and attribute"
    assert len(back.rows()) <= 10  # a page in the UI

    forth = _sync(world)  # the newest one is what was saved
    assert differences(mine, facts(root)) == []
    assert (forth.last, forth.snapshot) == (first.snapshot, back.saved)
    assert 0 < forth.stored_bytes < first.stored_bytes

    (root / "more").write_bytes(b"not kept")
    lost = _sync(world, discard_local=True)
    assert differences(mine, facts(root)) == []
    assert lost.discarded == ["more"]
    saved = hibernate_plainly(world.opened, destroy=False)
    assert saved.new_bytes == 0
    assert world.verify_listed() == 3


def test_an_agent_that_is_killed_costs_nothing_twice(sealed_world: World, root: Path) -> None:
    world = sealed_world
    machine = world.machines()[0].id
    first = hibernate_plainly(world.opened, destroy=False)
    (root / "weights-0.bin").write_bytes(os.urandom(9 * MIB))
    (root / "new").write_bytes(b"new")
    second, after = hibernate_plainly(world.opened, destroy=False), facts(root)
    _sync(world, snapshot=first.snapshot)
    kill(world.agents(machine))
    report = _sync(world, snapshot=second.snapshot)
    assert differences(after, facts(root)) == []
    assert report.last == first.snapshot


def test_impossible_syncs_are_refused(sealed_world: World, root: Path) -> None:
    hibernate_plainly(sealed_world.opened, destroy=False)
    with pytest.raises(InvalidInput, match="is on no machine"):
        _sync(sealed_world, machine="local:nowhere")
