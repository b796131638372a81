"""What an earlier version deployed goes at `make up`, and what its user deployed stays."""

from __future__ import annotations

from typing import Any

import pytest

from deployments.outdated import delete_outdated
from deployments.server import Server
from tests.fixtures.prefect_api import ask

pytestmark = pytest.mark.together("automations and make up")  # those look at the same deployments
SAYS = "  note      deployment {} of an earlier version {}"


def test_a_deployment_of_an_earlier_version_goes_with_its_schedule_and_without_runs_that_wait(
    torpor_up: Server, capsys: pytest.CaptureFixture[str]
) -> None:
    def deployed(name: str, entrypoint: str, **fields: Any) -> str:
        flow = ask("POST", f"{torpor_up.api_url}/flows/", {"name": "outdated"})
        wanted = {"flow_id": flow["id"], "name": name, "entrypoint": entrypoint}
        wanted |= {"tags": ["torpor"], **fields}
        return str(ask("POST", f"{torpor_up.api_url}/deployments/", wanted)["id"])

    hourly = [{"schedule": {"cron": "30 * * * *"}, "slug": "hourly", "active": True}]
    gone = deployed("check-backup", "flows/check_backup.py:check_backup", schedules=hourly)
    watch = ask("GET", f"{torpor_up.api_url}/deployments/name/watch/watch", None)
    assert "backup_hours" not in watch["parameters"]
    merged = deployed("high", "flows/job.py:job")
    waits = deployed("low", "flows/job.py:job")
    run = f"{torpor_up.api_url}/deployments/{waits}/create_flow_run"
    ask("POST", run, {"state": {"type": "SCHEDULED"}})
    mine = deployed("mine", "flows/job.py:job")
    others = deployed("others", "flows/gone.py:is_gone")  # a user's own flow, or a newer version's

    delete_outdated()
    assert sorted(capsys.readouterr().out.splitlines()) == [
        SAYS.format("check-backup/check-backup", "was deleted, with its schedules"),
        SAYS.format("job/high", "was deleted"),
        SAYS.format("job/low", "stays: its runs wait"),
        "  note      watch checks backups now, once its schedule is on: backup_hours is 26",
    ]
    its = f"{torpor_up.api_url}/deployments/{watch['id']}"
    now = ask("GET", its, None)["parameters"]
    ask("PATCH", its, {"parameters": watch["parameters"]})
    assert now == {**watch["parameters"], "backup_hours": 26.0}
    found = ask("POST", f"{torpor_up.api_url}/deployments/filter", {})
    there = {deployment["id"] for deployment in found}
    assert there.isdisjoint({gone, merged})
    assert {waits, mine, others} <= there
    for left in (waits, mine, others):
        ask("DELETE", f"{torpor_up.api_url}/deployments/{left}")
