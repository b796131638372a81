"""Flow runs, schedules and deployments that name a Workspace block."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final, NamedTuple, Protocol, TypeVar
from uuid import UUID

from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.filters import (
    DeploymentFilter,
    DeploymentFilterId,
    FlowRunFilter,
    FlowRunFilterId,
    FlowRunFilterState,
    FlowRunFilterStateType,
)
from prefect.client.schemas.objects import TERMINAL_STATES, FlowRun, StateType
from prefect.client.schemas.responses import DeploymentResponse
from prefect.exceptions import ObjectNotFound

from blocks import Workspace
from blocks.reference import saved_names
from torpor.shared.values import HOME

_PAGE: Final = 200
"""The most rows that Prefect lists at once."""


class _Listed(Protocol):
    id: UUID


ListedT = TypeVar("ListedT", bound=_Listed)


class BlockSchedule(NamedTuple):
    """A schedule whose runs are for one workspace."""

    deployment: UUID
    id: UUID
    words: str


class RunsOfBlock(NamedTuple):
    """``runs``: those that have not ended, without those that schedules will start. A run that was
    killed still counts. ``schedules``: those whose runs are for the workspace alone. ``shared``:
    schedules that list it in ``workspaces``, in words. ``deployments``: those whose own parameters
    name it."""

    runs: list[str]
    schedules: list[BlockSchedule]
    shared: list[str]
    deployments: list[str]


def runs_of_block(block: Workspace) -> RunsOfBlock:
    """What names the block, even if it was deleted just now, and runs whose parameters hold its
    settings instead of a block. A plain text is never taken for a workspace's name, because another
    block may have been saved under it."""
    saved = block._block_document_name
    names = {saved, f"workspace/{saved}"} | ({f"{HOME}{saved}"} - {*saved_names(Workspace)})
    with get_client(sync_client=True) as client:

        def is_meant(value: Any) -> bool:
            if isinstance(value, Mapping):
                reference = value.get("$ref")
                if isinstance(reference, Mapping):
                    return reference.get("block_document_id") == str(block._block_document_id)
                value = value.get("_block_document_name")
            return isinstance(value, str) and value.strip() in names

        def is_for_it(parameters: Mapping[str, Any]) -> bool:
            return is_meant(parameters.get("workspace"))

        def lists_it(parameters: Mapping[str, Any]) -> bool:
            listed = parameters.get("workspaces")
            return isinstance(listed, list) and any(is_meant(one) for one in listed)

        def has_its_settings(parameters: Mapping[str, Any]) -> bool:
            found = parameters.get("workspace")
            return isinstance(found, Mapping) and found.get("name") == block.name

        runs = [
            f"run {run.name} ({run.state_name})"
            for run in open_runs(client)
            if not (run.auto_scheduled and run.state_name in ("Scheduled", "Late"))
            and any(fits(run.parameters) for fits in (is_for_it, lists_it, has_its_settings))
        ]
        schedules, shared, deployments = [], [], []
        for one in all_deployments(client):
            for each in one.schedules:
                parameters = one.parameters | each.parameters
                if not (is_for_it(parameters) or lists_it(parameters)):
                    continue
                words = f"schedule {each.slug or each.id} of {_title(client, one)}"
                if is_for_it(parameters):
                    schedules.append(BlockSchedule(one.id, each.id, words))
                else:
                    shared.append(words)
            if is_for_it(one.parameters) or lists_it(one.parameters):
                deployments.append(_title(client, one))
    return RunsOfBlock(runs, schedules, shared, deployments)


def _title(client: SyncPrefectClient, deployment: DeploymentResponse) -> str:
    return f"{client.read_flow(deployment.flow_id).name}/{deployment.name}"


def delete_schedule(schedule: BlockSchedule) -> None:
    """Delete a schedule. Prefect then plans all runs of its deployment again, except late runs of
    another schedule that no worker took."""
    with get_client(sync_client=True) as client:
        try:
            client.delete_deployment_schedule(schedule.deployment, schedule.id)
        except ObjectNotFound:
            return  # the schedule is deleted already


def open_runs(client: SyncPrefectClient) -> list[FlowRun]:
    """The runs that have not ended."""
    alive = FlowRunFilterStateType(any_=[*({*StateType} - TERMINAL_STATES)])
    state = FlowRunFilterState(type=alive)
    return _all_pages(
        lambda read: client.read_flow_runs(
            flow_run_filter=FlowRunFilter(id=FlowRunFilterId(not_any_=read), state=state),
            limit=_PAGE,
        )
    )


def all_deployments(client: SyncPrefectClient) -> list[DeploymentResponse]:
    """Every deployment of the server."""
    return _all_pages(
        lambda read: client.read_deployments(
            deployment_filter=DeploymentFilter(id=DeploymentFilterId(not_any_=read)), limit=_PAGE
        )
    )


def _all_pages(page: Callable[[list[UUID]], list[ListedT]]) -> list[ListedT]:
    """Everything that Prefect lists in pages. ``page`` is given the ids that were read already:
    paging by an offset would skip a run for each one that has ended since the page before."""
    read: dict[UUID, ListedT] = {}
    while True:
        found = page([*read])
        read.update((one.id, one) for one in found)
        if len(found) < _PAGE:
            return [*read.values()]
