"""Deployments of earlier versions, which prefect.yaml no longer names: `make up` deletes them.

Their schedules go with them: each run would fail, because its flow has gone.
"""

from __future__ import annotations

from typing import Final

from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.actions import DeploymentUpdate
from prefect.client.schemas.filters import (
    DeploymentFilter,
    DeploymentFilterId,
    DeploymentFilterTags,
    FlowRunFilter,
    FlowRunFilterState,
    FlowRunFilterStateType,
)
from prefect.client.schemas.objects import StateType
from prefect.client.schemas.responses import DeploymentResponse

from deployments.installation import CHECKOUT
from deployments.schedules import WATCH

_TAG: Final = "torpor"
"""Each deployment of prefect.yaml has it."""
_RETIRED: Final = frozenset(
    f"{name}/{name}"
    for name in ("benchmark-deploy", "check-backup", "find", "job-log", "list-jobs", "unpin")
)
"""Deployments whose flow is gone. A user's own and a newer version's stay, whatever their tag."""
_CHECK: Final = "check-backup/check-backup"
_DAILY_HOURS: Final = 26.0
_MERGED: Final = frozenset({"job/critical", "job/high", "job/normal", "job/low"})
"""Deployments whose flow is there, under another deployment."""


def delete_outdated() -> None:
    """Delete what an earlier version deployed, and say so in a line for each. Other deployments of
    a flow that is there stay: their user made them."""
    ours = DeploymentFilter(tags=DeploymentFilterTags(all_=[_TAG]))
    with get_client(sync_client=True) as client:
        for deployment in client.read_deployments(deployment_filter=ours):
            file, _, function = (deployment.entrypoint or "").partition(":")
            name = f"{function.replace('_', '-')}/{deployment.name}"
            gone = name in _RETIRED and not (CHECKOUT / file).exists()
            if not gone and name not in _MERGED:
                continue
            if not gone and _has_waiting_runs(client, deployment):  # they would be deleted too
                print(f"  note      deployment {name} of an earlier version stays: its runs wait")
                continue
            if name == _CHECK and any(one.active for one in deployment.schedules):
                _check_by_watch(client, deployment.parameters.get("most_hours", _DAILY_HOURS))
            client.delete_deployment(deployment.id)
            also = ", with its schedules" if deployment.schedules else ""
            print(f"  note      deployment {name} of an earlier version was deleted{also}")


def _check_by_watch(client: SyncPrefectClient, hours: float) -> None:
    """What the schedule of `check-backup` did, `watch` goes on doing."""
    watch = client.read_deployment_by_name(WATCH)
    if not watch.parameters.get("backup_hours"):
        parameters = {**watch.parameters, "backup_hours": hours}
        client.update_deployment(watch.id, DeploymentUpdate(parameters=parameters))
        on = "" if any(one.active for one in watch.schedules) else ", once its schedule is on"
        print(f"  note      watch checks backups now{on}: backup_hours is {hours:g}")


def _has_waiting_runs(client: SyncPrefectClient, deployment: DeploymentResponse) -> bool:
    scheduled = FlowRunFilterStateType(any_=[StateType.SCHEDULED, StateType.PENDING])
    waiting = client.read_flow_runs(
        deployment_filter=DeploymentFilter(id=DeploymentFilterId(any_=[deployment.id])),
        flow_run_filter=FlowRunFilter(state=FlowRunFilterState(type=scheduled)),
        limit=1,
    )
    return bool(waiting)
