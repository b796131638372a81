"""Runs a flow of torpor on a schedule of its own, on the server of `torpor up`.

    python examples/schedule.py NAME FLOW CRON TIMEZONE PARAMETER=VALUE...
    python examples/schedule.py notes-nightly backup "0 3 * * *" Europe/Berlin workspace=notes

It makes a deployment FLOW/NAME beside torpor's own one, with these parameters and this schedule.
The same command with other values changes it; Deployments in the UI pauses or deletes it.
"""

from __future__ import annotations

import json
import sys
from typing import Any

from prefect.client.orchestration import get_client
from prefect.client.schemas.actions import DeploymentScheduleCreate
from prefect.client.schemas.schedules import CronSchedule

import blocks  # noqa: F401 - finds the server of `torpor up`, and its login


def value_of(text: str) -> Any:
    """A number, true, false or a list where JSON reads the text as one; otherwise the text."""
    try:
        return json.loads(text)
    except ValueError:
        return text


def main(name: str, flow: str, cron: str, timezone: str, *given: str) -> None:
    parameters = {one.partition("=")[0]: value_of(one.partition("=")[2]) for one in given}
    with get_client(sync_client=True) as client:
        own = client.read_deployment_by_name(f"{flow}/{flow}")
        client.create_deployment(
            flow_id=own.flow_id,
            name=name,
            parameters={**own.parameters, **parameters},
            schedules=[
                DeploymentScheduleCreate(schedule=CronSchedule(cron=cron, timezone=timezone))
            ],
            work_pool_name=own.work_pool_name,
            work_queue_name=own.work_queue_name,
            job_variables=own.job_variables,
            pull_steps=own.pull_steps,
            path=own.path,
            entrypoint=own.entrypoint,
            enforce_parameter_schema=own.enforce_parameter_schema,
            parameter_openapi_schema=own.parameter_openapi_schema,
        )
    print(f"{flow}/{name} runs at {cron} {timezone} with {json.dumps(parameters)}")


if __name__ == "__main__":
    main(*sys.argv[1:])
