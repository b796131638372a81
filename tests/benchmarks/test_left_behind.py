"""The look for losses, measured small."""

from __future__ import annotations

import secrets
import tempfile
from pathlib import Path

from benchmarks.left_behind import measure
from benchmarks.machine import BenchMachine
from torpor.control.store.embedded import EmbeddedStore


def test_the_look_is_measured_alone_and_beside_a_snapshot(needs_server: None) -> None:
    keys = ("ak" + secrets.token_hex(8), secrets.token_hex(20))
    with (
        tempfile.TemporaryDirectory(prefix="torpor-") as folder,  # its path is short
        EmbeddedStore.start(Path(folder) / "store", *keys, "torpor") as store,
        BenchMachine(Path(folder) / "machine", store) as machine,
    ):
        figures = measure(machine, outside=600, inside=10, times=2)
    assert (figures["complete"], figures["look_s"]["n"]) == (True, 2)
    assert 600 <= figures["seen_files"] < 1000  # the agent's own are among them
    assert figures["unchanged_snapshot_s"]["least"] > 0
