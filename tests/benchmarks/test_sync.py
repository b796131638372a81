"""The sync benchmark, small: what it moves is a count, and holds on any machine."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.sync import MOST_MOVED, measure


@pytest.fixture
def folder(needs_server: None) -> Iterator[Path]:
    """A short path: a Unix socket's name in a machine's home has at most 107 bytes."""
    folder = Path(tempfile.mkdtemp(prefix="torpor-"))
    yield folder
    shutil.rmtree(folder)


def test_a_sync_moves_what_changed_and_little_more(folder: Path) -> None:
    result = measure(folder, gib=0.03, share=0.01, rounds=1)
    assert 0 < result["moved_over_changed"] <= MOST_MOVED
    assert result["sync"]["cpu_s"]["median"] < result["restore"]["cpu_s"]["median"]
