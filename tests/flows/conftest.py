"""A workspace on its machine whose snapshots come and go, and the events that it sends."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.fixtures.lab import Lab, make_lab
from tests.fixtures.plain_flows import sent


@pytest.fixture(scope="module")
def standing() -> Iterator[Lab]:
    with make_lab() as lab:
        home = lab.workspace(lab.rent().id)
        (home / "notes").mkdir(parents=True)
        (home / "notes" / "a.txt").write_text("first\n")
        (home / "weights.bin").write_bytes(os.urandom(100_000))
        yield lab


@pytest.fixture
def home(standing: Lab) -> Path:
    (machine,) = standing.machines()
    return standing.workspace(machine.id)


@pytest.fixture
def events() -> deque[dict[str, Any]]:
    """The events that were sent since the test began."""
    sent.clear()
    return sent
