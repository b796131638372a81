"""Parameters that a flow no longer has, and that an earlier version has stored on the server.

Prefect accepts a run with such a parameter, and then fails it: "Function expects parameters ...".
What has another name now keeps its value.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Set
from typing import Any, Final

from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.actions import DeploymentUpdate
from prefect.client.schemas.responses import DeploymentResponse

from tasks.runs_of_block import all_deployments, open_runs

RENAMED: Final = {"most_hours": "max_hours", "most_usd": "max_usd"}
"""Parameters that have another name now. A job that waits for its turn must not lose its limits."""


def renew_parameters(
    client: SyncPrefectClient, schemas: Mapping[str, dict[str, Any]]
) -> Iterator[str]:
    """Remove old parameters from the deployments of torpor's flows, also the user's own ones, from
    their schedules and from runs that have not ended; rename those that have another name now.
    ``schemas``: of the parameters that the flows have, by entrypoint. Returns what was removed or
    renamed, in words."""
    waiting = open_runs(client)
    for there in all_deployments(client):
        schema = schemas.get(there.entrypoint or "")
        if schema is None:
            continue
        names = schema.get("properties", {}).keys()
        older: set[str] = set()
        for run in waiting:
            if run.deployment_id == there.id and run.parameters.keys() - names:
                older |= run.parameters.keys() - names
                client.update_flow_run(run.id, parameters=_kept(run.parameters, names))
        for one in there.schedules:
            if one.parameters.keys() - names:
                older |= one.parameters.keys() - names
                kept = _kept(one.parameters, names)
                client.update_deployment_schedule(there.id, one.id, parameters=kept)
        older |= there.parameters.keys() - names
        if older or (there.parameter_openapi_schema or {}).get("properties", {}).keys() - names:
            kept = _kept(there.parameters, names)
            changes = DeploymentUpdate(parameters=kept, parameter_openapi_schema=schema)
            client.update_deployment(there.id, changes)  # also updates the runs of its schedules
        if older:
            yield from _in_words(there, older, names)


def _kept(given: Mapping[str, Any], names: Set[str]) -> dict[str, Any]:
    kept = {name: value for name, value in given.items() if name in names}
    older = {RENAMED[name]: value for name, value in given.items() if _is_renamed(name, names)}
    return older | kept


def _is_renamed(name: str, names: Set[str]) -> bool:
    return name not in names and RENAMED.get(name) in names


def _in_words(there: DeploymentResponse, older: Set[str], names: Set[str]) -> Iterator[str]:
    what = f"deployment {there.name} of {(there.entrypoint or '').rpartition(':')[2]}"
    renamed = sorted(name for name in older if _is_renamed(name, names))
    if renamed:
        words = ", ".join(f"{name} is {RENAMED[name]}" for name in renamed)
        yield (
            f"{what}: in this version {words}: renamed in its parameters, and in those of its runs "
            "that wait (see CHANGELOG.md)"
        )
    if removed := sorted(older - set(renamed)):
        yield (
            f"{what}: this version has no {', '.join(removed)}: removed from its parameters, and "
            "from those of its runs that wait (see CHANGELOG.md)"
        )
