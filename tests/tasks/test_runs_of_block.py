"""What names a Workspace block: runs that have not ended, schedules and deployments."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from typing import Any, cast
from uuid import UUID, uuid4

import pytest
from prefect import flow
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.actions import DeploymentScheduleCreate
from prefect.client.schemas.filters import FlowRunFilter
from prefect.client.schemas.objects import FlowRun, StateType
from prefect.client.schemas.schedules import IntervalSchedule
from prefect.states import Completed, Running, Scheduled

from blocks import Workspace
from tasks.runs_of_block import RunsOfBlock, open_runs, runs_of_block
from tests.fixtures.waiting import PATIENCE_S

NAMED = "of-a-block"
OWN = "its-own-name"
"""The block's name, and that of the workspace whose settings it has."""


class _Busy:
    """A server on which a run of each page that was read ends before the next one is asked for."""

    def __init__(self, count: int) -> None:
        flow = uuid4()
        self.alive = [FlowRun(id=uuid4(), flow_id=flow, state=Running()) for _ in range(count)]
        self.pages = 0

    def read_flow_runs(
        self, *, flow_run_filter: FlowRunFilter, limit: int, offset: int = 0, **_: Any
    ) -> list[FlowRun]:
        self.pages += 1
        ids = flow_run_filter.id
        read: list[UUID] = (ids.not_any_ or []) if ids else []
        found = [run for run in self.alive if run.id not in read][offset : offset + limit]
        self.alive.remove(found[0])
        return found


def test_no_run_is_missed_because_another_one_ends_between_two_pages() -> None:
    server = _Busy(450)
    every = {run.id for run in server.alive}
    assert {run.id for run in open_runs(cast(SyncPrefectClient, server))} == every
    assert server.pages > 2


@flow(name="of-a-user")
def of_a_user(workspace: str) -> None:
    """A flow of the user's own."""


@pytest.fixture
def block(prefect_server: object) -> Iterator[Workspace]:
    Workspace(name=OWN).save(NAMED, overwrite=True)
    yield Workspace.load(NAMED)
    for name in (NAMED, f"home--{NAMED}"):
        with suppress(ValueError):  # it is not there
            Workspace.delete(name)


def _reference() -> dict[str, Any]:
    """The block as a form gives it to a run."""
    with get_client(sync_client=True) as client:
        saved = client.read_block_document_by_name(NAMED, "workspace")
    return {"$ref": {"block_document_id": str(saved.id)}}


def _with(parameters: dict[str, Any], scheduled: dict[str, Any]) -> RunsOfBlock:
    """What is found where a deployment and its schedule have these parameters."""
    with get_client(sync_client=True) as client:
        schedule = DeploymentScheduleCreate(
            schedule=IntervalSchedule(interval=PATIENCE_S),
            active=False,
            slug="nightly",
            parameters=scheduled,
        )
        made = client.create_deployment(
            flow_id=client.create_flow(of_a_user),
            name="one",
            parameters=parameters,
            schedules=[schedule],
        )
        try:
            return runs_of_block(Workspace.load(NAMED))
        finally:
            client.delete_deployment(made)


def _run(state: Any, value: Any) -> list[str]:
    """The runs that are found while one with this ``workspace`` is in that state."""
    with get_client(sync_client=True) as client:
        run = client.create_flow_run(of_a_user, parameters={"workspace": value}, state=state)
        found = runs_of_block(Workspace.load(NAMED)).runs
        client.set_flow_run_state(run.id, Completed(), force=True)
    assert all(run.name in one for one in found)
    return found


def test_a_schedule_is_the_blocks_by_its_reference_its_name_or_that_of_its_home(
    block: Workspace,
) -> None:
    reference = _reference()
    for value in (NAMED, f"workspace/{NAMED}", f" {NAMED} ", f"home--{NAMED}", reference):
        found = _with({"workspace": value}, {})
        assert [one.words for one in found.schedules] == ["schedule nightly of of-a-user/one"]
        assert found.deployments == ["of-a-user/one"] and found.shared == []
        by_schedule = _with({"workspace": "another"}, {"workspace": value})
        assert len(by_schedule.schedules) == 1 and by_schedule.deployments == []


def test_a_schedule_of_another_block_is_not_the_blocks(block: Workspace) -> None:
    others: list[Any] = ["another", OWN, f"home--{OWN}", {"name": OWN, "store": "elsewhere"}]
    for value in others:
        found = _with({"workspace": NAMED}, {"workspace": value})
        assert found.schedules == [] and found.deployments == ["of-a-user/one"]
    Workspace(name=OWN).save(f"home--{NAMED}")
    assert _with({"workspace": f"home--{NAMED}"}, {}).schedules == []


def test_a_schedule_that_lists_the_block_among_others_is_shared(block: Workspace) -> None:
    listed = {"workspaces": ["another", NAMED]}
    found = _with(listed, {})
    assert found.schedules == [] and found.deployments == ["of-a-user/one"]
    assert found.shared == ["schedule nightly of of-a-user/one"]
    assert _with({}, listed).shared == ["schedule nightly of of-a-user/one"]
    assert _with(listed, {"workspaces": []}).shared == []
    assert _with({"workspaces": [OWN]}, {}).shared == []


def test_a_run_counts_until_it_has_ended_by_its_block_and_by_settings_of_its_own(
    block: Workspace,
) -> None:
    assert runs_of_block(Workspace.load(NAMED)).runs == []
    for value in (NAMED, f"home--{NAMED}", {"name": OWN}):
        assert len(_run(Running(), value)) == 1
    assert _run(Running(), OWN) == []
    assert len(_run(Scheduled(), NAMED)) == 1  # somebody asked for it


@pytest.mark.parametrize(
    ("state", "counts"),
    [
        ("Scheduled", False),
        ("Late", False),
        ("AwaitingRetry", True),
        ("AwaitingConcurrencySlot", True),
    ],
)
def test_a_run_of_a_schedule_counts_unless_it_goes_with_its_schedule(
    block: Workspace, monkeypatch: pytest.MonkeyPatch, state: str, counts: bool
) -> None:
    run = FlowRun(
        id=uuid4(),
        flow_id=uuid4(),
        auto_scheduled=True,
        parameters={"workspace": NAMED},
        state_type=StateType.SCHEDULED,
        state_name=state,
    )
    monkeypatch.setattr("tasks.runs_of_block.open_runs", lambda client: [run])
    assert [one.endswith(f"({state})") for one in runs_of_block(Workspace.load(NAMED)).runs] == [
        True
    ] * counts


def test_a_run_counts_that_a_form_has_started_with_a_block_which_was_deleted_then(
    block: Workspace,
) -> None:
    value = _reference()
    with get_client(sync_client=True) as client:
        run = client.create_flow_run(of_a_user, parameters={"workspace": value}, state=Running())
        Workspace.delete(NAMED)
        assert runs_of_block(block).runs == [f"run {run.name} (Running)"]
        client.set_flow_run_state(run.id, Completed(), force=True)
