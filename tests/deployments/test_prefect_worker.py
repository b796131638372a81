"""How long a worker of a cluster asks a server that is away, and what becomes of its runs."""

from __future__ import annotations

import asyncio
import inspect
import os
import subprocess
import sys

import anyio
import httpx
import pytest
from prefect.cli import worker as prefect_command
from prefect.utilities.services import critical_service_loop
from prefect.workers import base

from deployments.prefect_worker import PATIENCE_S, end_runs, patient_loop


def test_prefects_worker_has_its_parts_where_ours_replace_them() -> None:
    assert base.critical_service_loop is critical_service_loop  # type: ignore[attr-defined]
    assert "critical_service_loop" in base.BaseWorker.start.__code__.co_names
    handlers = "from prefect.utilities.processutils import setup_signal_handlers_worker"
    assert f"    {handlers}\n" in inspect.getsource(prefect_command)


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


def test_its_runs_are_asked_to_end_and_waited_for_and_no_others() -> None:
    program = "import signal, time; signal.signal(signal.SIGTERM, lambda *_: time.sleep(0.5) or "
    program += "exit(7)); print('ready', flush=True); time.sleep(600)"
    ours, other = (
        subprocess.Popen(
            [sys.executable, "-c", program],
            env={**os.environ, "PREFECT__WORKER_NAME": name},
            stdout=subprocess.PIPE,
            start_new_session=True,
        )
        for name in ("torpor-worker-1", "torpor-worker-10")
    )
    try:
        for run in (ours, other):
            assert run.stdout is not None
            run.stdout.readline()
        end_runs("torpor-worker-1")
        assert ours.poll() == 7
        assert other.poll() is None
    finally:
        for run in (ours, other):
            run.kill()
            run.communicate()
