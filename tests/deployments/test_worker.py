"""What starting a worker ends: never a flow run. Small processes stand for workers and runs."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from prefect.client import base
from prefect.settings import PREFECT_CLIENT_RETRY_EXTRA_CODES, temporary_settings

from deployments import worker
from deployments.installation import Installation
from deployments.processes import launch, running
from deployments.server import Server, environment
from torpor.control.processes import ProcessRecord, end_processes, is_alive
from torpor.shared.errors import TorporError

SERVER = Server("http://127.0.0.1:9/api", own=False)
ELSEWHERE = Server("http://127.0.0.1:10/api", own=False)
POOL = worker.POOLS[0]
WAITS = "import time; time.sleep(600)"
STARTS = f"print('Worker started!', flush=True); {WAITS}"

Launch = Callable[..., ProcessRecord]


@pytest.fixture
def made(tmp_path: Path) -> Installation:
    return Installation(tmp_path)


@pytest.fixture
def launched(made: Installation, monkeypatch: pytest.MonkeyPatch) -> Iterator[Launch]:
    """Start a script in the name of the pool's worker, and of its flow runs."""

    def start(script: str, *arguments: str, server: Server = SERVER) -> ProcessRecord:
        argv = [sys.executable, "-c", script, *arguments]
        return launch(made, POOL.role, argv, environment(made, server))

    yield start
    end_processes(lambda: running(made, POOL.role), polite_s=0.0)


def _worker_is(monkeypatch: pytest.MonkeyPatch, launched: Launch, script: str) -> None:
    monkeypatch.setattr(worker, "launch", lambda *_: launched(script, "start"))


@pytest.mark.parametrize(
    ("script", "ready_s"), [("raise SystemExit(1)", 60.0), (WAITS, 0.5)], ids=["dies", "hangs"]
)
def test_a_worker_that_does_not_start_ends_no_flow_run(
    made: Installation,
    launched: Launch,
    monkeypatch: pytest.MonkeyPatch,
    script: str,
    ready_s: float,
) -> None:
    """The supervisor starts a worker exactly when runs have outlived one."""
    run = launched(WAITS)
    _worker_is(monkeypatch, launched, script)
    monkeypatch.setattr(worker, "READY_S", ready_s)
    with pytest.raises(TorporError, match="did not start"):
        worker.start(made, SERVER, [POOL])
    assert is_alive(run)
    assert not worker.works(made)  # nothing is left of the worker that did not start


def test_a_run_asks_again_where_the_database_of_its_server_is_away(
    made: Installation, launched: Launch, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: dict[str, str] = {}

    def launch_worker(*arguments: Any) -> ProcessRecord:
        given.update(arguments[-1])
        return launched(STARTS, "start")

    monkeypatch.setattr(worker, "launch", launch_worker)
    assert worker.start(made, SERVER, [POOL])
    answers = iter([500, 500, 200])
    monkeypatch.setattr(base, "time", SimpleNamespace(sleep=lambda _: None))
    codes = PREFECT_CLIENT_RETRY_EXTRA_CODES
    away = httpx.MockTransport(lambda _: httpx.Response(next(answers)))
    with (
        temporary_settings({codes: given[codes.name]}),
        base.PrefectHttpxSyncClient(transport=away) as client,
    ):
        assert client.get("http://127.0.0.1:9/api/health").status_code == 200


def test_a_worker_of_another_server_is_replaced_and_its_flow_runs_go_on(
    made: Installation, launched: Launch, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A worker that is asked to end ends its runs.
    asked = "import os, signal; signal.signal(signal.SIGTERM, lambda *_: os.kill(RUN, 9));"
    run = launched(WAITS, server=ELSEWHERE)
    old = launched(asked.replace("RUN", str(run.pid)) + STARTS, "start", server=ELSEWHERE)
    log = made.log(POOL.role)
    while b"started!" not in log.read_bytes():
        assert is_alive(old)
    _worker_is(monkeypatch, launched, STARTS)
    assert worker.start(made, SERVER, [POOL])
    assert (is_alive(old), is_alive(run)) == (False, True)
    assert not worker.start(made, SERVER, [POOL])  # it runs
