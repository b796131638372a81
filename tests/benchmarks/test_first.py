"""The benchmark of a wake in the user's order, small: it counts bytes, not seconds."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.first import MOST_FETCHED, measure


@pytest.fixture
def folder(needs_server: None) -> Iterator[Path]:
    """A short path: a Unix socket's name in a machine's home has at most 107 bytes."""
    folder = Path(tempfile.mkdtemp(prefix="torpor-"))
    yield folder
    shutil.rmtree(folder)


def test_an_order_costs_no_bytes(folder: Path) -> None:
    result = measure(folder, gib=0.25, line_mib_s=50.0, rounds=1)
    assert result["fetched_over_usual"] <= MOST_FETCHED
    ordered = result["first"]
    assert ordered["line_bytes_before_usable"]["median"] <= ordered["line_bytes"]["median"]
