"""A workspace on its machine whose snapshots come and go, and the events that it sends."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.fixtures.plain_flows import sent
from tests.fixtures.stores import Server
from tests.fixtures.world import World, make_world


@pytest.fixture(scope="module")
def standing(seaweed: Server) -> Iterator[World]:
    with make_world(seaweed) as world:
        home = world.workspace(world.rent().id)
        (home / "notes").mkdir(parents=True)
        (home / "notes" / "a.txt").write_text("first\n")
        (home / "weights.bin").write_bytes(os.urandom(100_000))
        yield world


@pytest.fixture
def home(standing: World) -> Path:
    (machine,) = standing.machines()
    return standing.workspace(machine.id)


@pytest.fixture
def events() -> deque[dict[str, Any]]:
    """The events that were sent since the test began."""
    sent.clear()
    return sent
