"""Runs whose process was killed, as the worker's API and real processes show them."""

from __future__ import annotations

import os
import secrets
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from typing import Any

import psutil
import pytest

from deployments import lost_runs
from deployments.lost_runs import end_lost_runs
from deployments.server import Server
from deployments.worker import Pool
from tests.fixtures.prefect_api import ask

Run = Callable[[str], dict[str, Any]]


@pytest.fixture
def run(prefect_server: Server, monkeypatch: pytest.MonkeyPatch) -> Iterator[Run]:
    """A run in that state, of a pool of this test's own that no worker serves."""
    api, name = prefect_server.api_url, f"lost-{secrets.token_hex(4)}"
    monkeypatch.setattr(lost_runs, "POOLS", (Pool(name, "none", ""),))
    ask("POST", f"{api}/work_pools/", {"name": name, "type": "process"})
    flow = ask("POST", f"{api}/flows/", {"name": name})
    wanted = {
        "name": name,
        "flow_id": flow["id"],
        "work_pool_name": name,
        "concurrency_limit": 1,
        "concurrency_options": {"collision_strategy": "CANCEL_NEW"},
    }
    deployment = ask("POST", f"{api}/deployments/", wanted)["id"]

    def made(*states: str) -> dict[str, Any]:
        created = ask(
            "POST", f"{api}/deployments/{deployment}/create_flow_run", {"name": states[-1]}
        )
        for state in states:
            ask("POST", f"{api}/flow_runs/{created['id']}/set_state", {"state": {"type": state}})
        return state_of(prefect_server, created)

    yield made
    ask("DELETE", f"{api}/work_pools/{name}")


def state_of(server: Server, run: dict[str, Any]) -> Any:
    return ask("GET", f"{server.api_url}/flow_runs/{run['id']}")


def test_a_dead_run_frees_its_slot_and_a_live_one_is_left_alone(
    prefect_server: Server, run: Any
) -> None:
    dead = run("PENDING", "RUNNING")
    # What held up every later `watch`: the dead run has the only slot of its deployment.
    assert run("PENDING")["state"]["name"] == "Cancelled"
    (said,) = end_lost_runs(prefect_server, workers=True)
    assert said.startswith("run RUNNING crashed: its process on this host is gone")
    assert state_of(prefect_server, dead)["state_type"] == "CRASHED"

    living = run("PENDING", "RUNNING")
    assert living["state_type"] == "RUNNING"  # the slot is free
    env = {**os.environ, "PREFECT__FLOW_RUN_ID": living["id"]}
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, env=env) as own:
        assert end_lost_runs(prefect_server, workers=True) == []
        own.kill()
    assert len(end_lost_runs(prefect_server, workers=True)) == 1

    cancelled = run("PENDING", "RUNNING", "CANCELLING")
    assert len(end_lost_runs(prefect_server, workers=True)) == 1
    assert state_of(prefect_server, cancelled)["state_type"] == "CANCELLED"


def test_a_run_that_no_worker_started_waits_again(
    prefect_server: Server, run: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken = run("PENDING")
    assert end_lost_runs(prefect_server, workers=True) == []  # a worker may be starting it
    (said,) = end_lost_runs(prefect_server, workers=False)
    assert "waits again" in said
    assert state_of(prefect_server, taken)["state_type"] == "SCHEDULED"
    taken = run("PENDING")
    assert taken["state_type"] == "PENDING"  # the one that waits again holds no slot
    monkeypatch.setattr(lost_runs, "STUCK_S", 0.0)
    assert len(end_lost_runs(prefect_server, workers=True)) == 1
    assert state_of(prefect_server, taken)["state_type"] == "SCHEDULED"


class FakeApi:
    """One run of that process, which began at ``since``, and a server that gives ``answer``."""

    def __init__(self, pid: int, since: float) -> None:
        at = datetime.fromtimestamp(since, UTC).isoformat()
        state = {"timestamp": at}
        self.run: dict[str, Any] = {"id": "1", "name": "a", "state_type": "RUNNING", "state": state}
        self.answer: dict[str, Any] = {"status": "ACCEPT", "details": {}}
        self.run["infrastructure_pid"] = str(pid)

    def __enter__(self) -> FakeApi:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def all(self, *_: object) -> list[dict[str, Any]]:
        return [self.run]

    def ask(self, verb: str, *_: object) -> dict[str, Any]:
        return self.run if verb == "GET" else self.answer


OWN = Server("http://127.0.0.1:9/api", own=True)


@pytest.mark.rule(20)
def test_an_end_that_the_server_refuses_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    api = FakeApi(2**22 + 1, time.time())
    monkeypatch.setattr(lost_runs, "Api", lambda _: api)
    assert end_lost_runs(OWN, workers=True)[0].startswith("run a crashed: ")
    api.answer = {"status": "ABORT", "details": {"reason": "it is over"}}
    (said,) = end_lost_runs(OWN, workers=True)
    assert said.startswith("run a is not ended: ")
    assert said.endswith("answered ABORT: it is over")


@pytest.mark.rule(20)
def test_a_run_whose_process_hides_its_environment_is_left_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = time.time()
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as hidden:
        process = psutil.Process(hidden.pid)
        monkeypatch.setattr(lost_runs, "all_processes", lambda: {process: set()})
        monkeypatch.setattr(lost_runs, "Api", lambda _: FakeApi(hidden.pid, now))
        assert end_lost_runs(OWN, workers=True) == []
        # The pid is used again, after a boot for example.
        monkeypatch.setattr(lost_runs, "Api", lambda _: FakeApi(hidden.pid, now - 3600))
        assert len(end_lost_runs(OWN, workers=True)) == 1
        monkeypatch.setattr(lost_runs, "Api", lambda _: FakeApi(hidden.pid, now))
        hidden.kill()
        while process.status() != psutil.STATUS_ZOMBIE:
            pass
        assert len(end_lost_runs(OWN, workers=True)) == 1


def test_a_server_of_the_users_own_may_have_workers_elsewhere(prefect_server: Server) -> None:
    assert end_lost_runs(Server(prefect_server.api_url, own=False), workers=False) == []
