"""The sync benchmark, small: what it moves is a count, and holds on any machine."""

from __future__ import annotations

from pathlib import Path

from benchmarks.sync import MOST_MOVED, measure


def test_a_sync_moves_what_changed_and_little_more(machines_folder: Path) -> None:
    result = measure(machines_folder, gib=0.03, share=0.01, rounds=1)
    assert 0 < result["moved_over_changed"] <= MOST_MOVED
    assert result["sync"]["cpu_s"]["median"] < result["restore"]["cpu_s"]["median"]
