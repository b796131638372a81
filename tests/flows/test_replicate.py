"""One snapshot to several machines: identical, each on its own, and nothing left behind."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import patch

import msgspec
import pytest

from tests.fixtures.plain_flows import hibernate_plainly, replicate_plainly
from tests.fixtures.stores import Server
from tests.fixtures.tree_print import TreePrint, differences, fill, print_of
from tests.fixtures.world import World, make_world
from torpor.remote import bundle


@pytest.fixture(scope="module")
def kept(seaweed: Server, short_agent_source: Path) -> Iterator[tuple[World, TreePrint]]:
    """A workspace of five parts that is in the store only."""
    with patch.object(bundle, "_SOURCE", short_agent_source), make_world(seaweed) as world:
        world.access = msgspec.structs.replace(
            world.access, spec=msgspec.structs.replace(world.access.spec, parts=16)
        )
        machine = world.rent()
        fill(world.workspace(machine.id), random.Random(2), big=5)
        truth = print_of(world.workspace(machine.id))
        hibernate_plainly(world.place)
        yield world, truth


def test_every_machine_gets_the_same_workspace(kept: tuple[World, TreePrint]) -> None:
    world, truth = kept
    report = replicate_plainly(world.place, count=3, peers="always")
    print(report)
    assert len(report.ready) == 3
    for machine in world.machines():
        assert not differences(truth, print_of(world.workspace(machine.id)))
