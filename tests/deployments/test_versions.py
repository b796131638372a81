"""An installation runs with the newest packages that pyproject.toml admits, and with the lowest
Prefect: users install without constraints.txt."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import tomllib
import yaml
from packaging.requirements import Requirement

from deployments.installation import CHECKOUT
from tests.fixtures.environments import environment
from tests.fixtures.own_installation import Alone
from tests.fixtures.prefect_api import ask
from tests.fixtures.waiting import until

KEPT = (
    "sqlalchemy==2.0.45",
    "fastapi==0.139.0",
    "starlette==1.0.1",
    "pydocket==0.23.1",
    "uvicorn==0.50.0",
)
"""What Prefect's server is made of in the oldest environment for 3.8.8, the Prefect before this
range: pip keeps them when it upgrades Prefect there."""


def _prefect() -> Requirement:
    """What pyproject.toml asks for."""
    project = tomllib.loads((CHECKOUT / "pyproject.toml").read_text())["project"]
    (found,) = (one for one in map(Requirement, project["dependencies"]) if one.name == "prefect")
    return found


def _lowest() -> str:
    (found,) = (one.version for one in _prefect().specifier if one.operator == ">=")
    return found


@pytest.mark.parametrize(
    "wanted",
    [
        pytest.param((), id="newest"),
        pytest.param((f"prefect=={_lowest()}", *KEPT), id="lowest"),
    ],
)
def test_deployments_register_and_a_schedule_runs(
    wanted: tuple[str, ...], alone: Alone, tmp_path: Path
) -> None:
    interpreter = environment(tmp_path / "env", CHECKOUT, *wanted)
    alone = dataclasses.replace(alone, interpreter=interpreter)
    alone.up()  # ends with an error where the server makes no run of a new schedule

    deployments = yaml.safe_load((CHECKOUT / "prefect.yaml").read_text())["deployments"]
    registered = _ask(alone, "POST", "deployments/filter", {})
    assert sorted(one["name"] for one in registered) == sorted(one["name"] for one in deployments)
    version = _ask(alone, "GET", "admin/version")
    assert version in _prefect().specifier
    assert not wanted or version == _lowest()

    (watch,) = (one for one in registered if one["name"] == "watch")
    (schedule,) = watch["schedules"]
    where = f"deployments/{watch['id']}/schedules/{schedule['id']}"
    _ask(alone, "PATCH", where, {"active": True})  # as the switch in the UI does
    ran = {
        "deployments": {"id": {"any_": [watch["id"]]}},
        "flow_runs": {"state": {"type": {"any_": ["COMPLETED"]}}},
    }
    (run, *_) = until(
        lambda: _ask(alone, "POST", "flow_runs/filter", ran),
        "the schedule of watch has run",
        every_s=1.0,
    )
    assert run["auto_scheduled"]


def _ask(alone: Alone, method: str, path: str, body: dict[str, Any] | None = None) -> Any:
    url = f"{alone.server.api_url}/{path}"
    return ask(method, url, body, by=alone.server.login)
