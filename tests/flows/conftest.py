"""A workspace on its machine whose snapshots come and go, the events that it sends, and one that
sleeps."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.fixtures.driver import hurried
from tests.fixtures.lab import Lab, make_lab
from tests.fixtures.plain_flows import hibernate_plainly, sent


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


@pytest.fixture
def stored(lab: Lab, short_agent: None) -> Iterator[Lab]:
    """A workspace with a snapshot, on no machine; the waits of jobs are short."""
    place = lab.workspace(lab.rent().id)
    place.mkdir()
    (place / "work").write_bytes(b"mine" * 1000)
    hibernate_plainly(lab.opened)
    with hurried():
        yield lab


@pytest.fixture(autouse=True)
def _looks_again_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine of which one look does not say who uses it is looked at again without a wait."""
    monkeypatch.setattr("tasks.watch.LOOK_AGAIN_S", (0.0,))
