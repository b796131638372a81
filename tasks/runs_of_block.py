"""Flow runs, schedules and deployments that name a Workspace block."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from itertools import count
from typing import Any, Final, NamedTuple, TypeVar
from uuid import UUID

from prefect.client.orchestration import get_client
from prefect.client.schemas.filters import (
    FlowRunFilter,
    FlowRunFilterState,
    FlowRunFilterStateType,
)
from prefect.client.schemas.objects import TERMINAL_STATES, StateType
from prefect.exceptions import ObjectNotFound

from tasks.block_names import BlockNames

_PAGE: Final = 200
"""What Prefect lists at once, at most."""

T = TypeVar("T")


class Schedule(NamedTuple):
    """A schedule whose runs are for one workspace."""

    deployment: UUID
    id: UUID
    words: str


class RunsOfBlock(NamedTuple):
    """``runs``: those that have not ended, but for those that ``schedules`` will start. A run that
    was killed seems to go on. ``deployments``: those whose own parameters name the workspace."""

    runs: list[str]
    schedules: list[Schedule]
    deployments: list[str]


def runs_of_block(block: str, workspace: str) -> RunsOfBlock:
    """What names the workspace by its block, or by its own name."""
    names = {block, f"workspace/{block}", workspace}
    with get_client(sync_client=True) as client:
        blocks = BlockNames(client)

        def is_meant(parameters: Mapping[str, Any]) -> bool:
            found = blocks.in_place(parameters.get("workspace"))
            if isinstance(found, Mapping):
                found = found.get("name")
            return isinstance(found, str) and found.strip() in names

        alive = FlowRunFilterStateType(any_=[*({*StateType} - TERMINAL_STATES)])
        wanted = FlowRunFilter(state=FlowRunFilterState(type=alive))
        runs = [
            f"run {run.name} ({run.state_name})"
            for run in all_pages(partial(client.read_flow_runs, flow_run_filter=wanted))
            if is_meant(run.parameters)
            and not (run.auto_scheduled and run.state_type == StateType.SCHEDULED)
        ]
        schedules, deployments = [], []
        for one in all_pages(client.read_deployments):
            named = is_meant(one.parameters)
            mine = [
                each
                for each in one.schedules
                if is_meant(each.parameters) or (named and "workspace" not in each.parameters)
            ]
            if not (named or mine):
                continue
            title = f"{client.read_flow(one.flow_id).name}/{one.name}"
            schedules += [
                Schedule(one.id, each.id, f"schedule {each.slug or each.id} of {title}")
                for each in mine
            ]
            deployments += [title] * named
    return RunsOfBlock(runs, schedules, deployments)


def delete_schedule(schedule: Schedule) -> None:
    """Delete it, with the runs that it would start."""
    with get_client(sync_client=True) as client:
        try:
            client.delete_deployment_schedule(schedule.deployment, schedule.id)
        except ObjectNotFound:
            return  # somebody has deleted it meanwhile


def all_pages(page: Callable[..., list[T]]) -> Iterator[T]:
    """Everything that a request of Prefect's client reads in pages."""
    for number in count():
        found = page(limit=_PAGE, offset=number * _PAGE)
        yield from found
        if len(found) < _PAGE:
            return
