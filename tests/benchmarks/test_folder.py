"""`torpor run` in a folder, as a person types it: what it sends and what comes back."""

from __future__ import annotations

import pytest

from benchmarks.folder import measure


@pytest.mark.usefixtures("needs_server")
def test_each_run_sends_what_differs_and_brings_what_the_command_has_written() -> None:
    steps = measure(files=30, large_bytes=3_000_000, breaks=0)["steps"]
    assert steps["first"]["sent_files"] == 30
    assert steps["one file changed"]["sent_files"] == 1
    large = steps["one large file"]
    assert (large["sent_files"], large["sent_mb"]) == (1, 3.0)
    assert all(step["s"] > 0 and step["connected_again"] == 0 for step in steps.values())
