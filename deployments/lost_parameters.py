"""Parameters that a flow no longer has, and that an earlier version has stored on the server.

Prefect accepts a run with such a parameter, and then fails it: "Function expects parameters ...".
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Set
from typing import Any

from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.actions import DeploymentUpdate

from tasks.runs_of_block import all_deployments, open_runs


def remove_lost_parameters(
    client: SyncPrefectClient, schemas: Mapping[str, dict[str, Any]]
) -> Iterator[str]:
    """Remove them from the deployments of torpor's flows, also the user's own ones, from their
    schedules and from runs that have not ended. ``schemas``: of the parameters that the flows have,
    by entrypoint. Returns what was removed, in words."""
    waiting = open_runs(client)
    for there in all_deployments(client):
        schema = schemas.get(there.entrypoint or "")
        if schema is None:
            continue
        names = schema.get("properties", {}).keys()
        lost: set[str] = set()
        for run in waiting:
            if run.deployment_id == there.id and run.parameters.keys() - names:
                lost |= run.parameters.keys() - names
                client.update_flow_run(run.id, parameters=_kept(run.parameters, names))
        for one in there.schedules:
            if one.parameters.keys() - names:
                lost |= one.parameters.keys() - names
                kept = _kept(one.parameters, names)
                client.update_deployment_schedule(there.id, one.id, parameters=kept)
        lost |= there.parameters.keys() - names
        if lost or (there.parameter_openapi_schema or {}).get("properties", {}).keys() - names:
            kept = _kept(there.parameters, names)
            changes = DeploymentUpdate(parameters=kept, parameter_openapi_schema=schema)
            client.update_deployment(there.id, changes)  # and with it, runs of its schedules
        if lost:
            yield (
                f"deployment {there.name} of {(there.entrypoint or '').rpartition(':')[2]}: this "
                f"version has no {', '.join(sorted(lost))}: removed from its parameters, and from "
                "those of its runs that wait (see CHANGELOG.md)"
            )


def _kept(given: Mapping[str, Any], names: Set[str]) -> dict[str, Any]:
    return {name: value for name, value in given.items() if name in names}
