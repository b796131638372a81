"""What a benchmark measured before is kept when something that may fail does."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import pytest

from flows.procedures import measurement
from flows.procedures.measurement import Measurement
from tasks.measure import Sizes
from tasks.plain_runner import PlainRunner
from torpor.control.measure import peers
from torpor.control.measure.figures import Figure, find
from torpor.shared.errors import StoreError


def test_another_tool_that_fails_is_noted_and_costs_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def measured(peer: str, *_: Any) -> list[Figure]:
        if peer == "restic":
            raise StoreError("restic ended with [1]: it does not like this store")
        return [Figure("peer", peer, "s", (1.0,), "up")]

    monkeypatch.setattr(measurement, "measure_peer", measured)
    monkeypatch.setattr(peers, "missing", lambda _: None)
    opened: Any = SimpleNamespace(spec=SimpleNamespace(name="benchmark--demo"))
    block, store, here = (SimpleNamespace() for _ in range(3))
    sizes = Sizes((4,), (1,), (1,), 8, 1)
    work = Measurement(block, opened, [store], sizes, time.monotonic(), 60.0)  # type: ignore[arg-type,list-item]
    flow = Figure("hibernate", "torpor", "s", (2.0,), "up", parts=4, machines=1)
    work.figures += [flow, Figure("hibernate", "torpor", "bytes", (9.0,), "up", parts=4)]
    work.figures += [Figure("wake", "torpor", "s", (1.0,), "down", parts=4)]
    here.here = True
    with PlainRunner():
        work.others(here)  # type: ignore[arg-type]
    assert flow in work.figures
    assert {one.name for one in find(work.figures, "peer")} == {"torpor", "tar+lz4+s5cmd"}
    assert any("restic was not measured: restic ended" in note for note in work.notes)
