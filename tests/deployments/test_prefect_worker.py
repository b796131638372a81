"""How long a worker of a cluster asks a server that is away."""

from __future__ import annotations

import asyncio

import anyio
import httpx
import pytest
from prefect.utilities.services import critical_service_loop
from prefect.workers import base

from deployments.prefect_worker import PATIENCE_S, patient_loop


def test_prefects_worker_has_its_loop_where_ours_replaces_it() -> None:
    assert base.critical_service_loop is critical_service_loop  # type: ignore[attr-defined]
    assert "critical_service_loop" in base.BaseWorker.start.__code__.co_names


@pytest.mark.parametrize("interval", [1, 2, 10, 30])
def test_it_asks_a_server_that_is_away_for_ten_minutes_before_it_ends(
    interval: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    slept: list[float] = []

    async def sleep(seconds: float) -> None:
        slept.append(seconds)

    async def away() -> None:
        raise httpx.ConnectError("refused")

    monkeypatch.setattr(anyio, "sleep", sleep)
    with pytest.raises(RuntimeError, match="exceeded error threshold"):
        asyncio.run(
            patient_loop(workload=away, interval=interval, backoff=4, printer=lambda *_: None)
        )
    assert sum(slept) + max(slept) >= PATIENCE_S
    assert max(slept) <= PATIENCE_S / 2  # and is soon back when the server is
