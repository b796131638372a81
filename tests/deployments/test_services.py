"""The services of the Prefect server of `make up`: all that happens without a click."""

from __future__ import annotations

import secrets

import pytest

from deployments import services
from deployments.server import Server
from tests.fixtures.prefect_api import ask
from tests.fixtures.waiting import until
from torpor.shared.errors import TorporError


def test_the_scheduler_is_seen_to_work(prefect_server: Server) -> None:
    services.check_scheduler(prefect_server)
    left = ask("POST", f"{prefect_server.api_url}/deployments/filter", {})
    assert not [deployment for deployment in left if deployment["name"] == services.NAME]


def test_a_scheduler_that_makes_no_runs_is_named(
    prefect_server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(services, "SCHEDULED_S", 0.0)
    with pytest.raises(TorporError, match="runs no schedules"):
        services.check_scheduler(prefect_server)


def test_a_run_that_no_worker_takes_is_late(prefect_server: Server) -> None:
    api, name = prefect_server.api_url, f"late-{secrets.token_hex(4)}"
    ask("POST", f"{api}/work_pools/", {"name": name, "type": "process"})
    flow = ask("POST", f"{api}/flows/", {"name": name})["id"]
    wanted = {"name": name, "flow_id": flow, "work_pool_name": name}
    deployment = ask("POST", f"{api}/deployments/", wanted)["id"]
    run = ask("POST", f"{api}/deployments/{deployment}/create_flow_run", {})["id"]
    until(
        lambda: ask("GET", f"{api}/flow_runs/{run}")["state"]["name"] == "Late",
        "the server says that the run is late",
        every_s=0.5,
    )
    ask("DELETE", f"{api}/flows/{flow}")
    ask("DELETE", f"{api}/work_pools/{name}")
