"""A machine's agent and a little workspace, for the tests of snapshots."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fixtures.engine import Engine
from tests.fixtures.memory_store import MemoryStore
from tests.fixtures.snapshots import Machines, Two
from tests.fixtures.trees import content, let_settle
from torpor.control.store.object_store import ObjectStore
from torpor.shared.values import MIB


@pytest.fixture
def machines() -> Iterator[Machines]:
    made: list[Engine] = []

    def machine(store: ObjectStore, home: Path, key: bytes | None = None) -> Engine:
        made.append(Engine(store, home, key))
        return made[-1]

    yield machine
    for engine in made:
        engine.runs.close()


@pytest.fixture
def engine(machines: Machines, memory_store: MemoryStore, tmp_path: Path) -> Engine:
    return machines(memory_store, tmp_path / "home")


@pytest.fixture
def was(tmp_path: Path) -> Path:
    """A small workspace at rest."""
    was = tmp_path / "was"
    (was / "d").mkdir(parents=True)
    (was / "big").write_bytes(random.Random(1).randbytes(5 * MIB))
    (was / "small").write_bytes(content(2, 3000))
    (was / "d/other").write_bytes(content(3, 2000))
    let_settle()
    return was


@pytest.fixture
def two(engine: Engine, tmp_path: Path) -> Two:
    return Two(engine, tmp_path / "was")
