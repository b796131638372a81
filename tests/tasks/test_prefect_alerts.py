"""Notification blocks, the memory of alerts and the history of runs on a real server."""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import msgspec
import pytest
from prefect.artifacts import create_table_artifact
from prefect.blocks.notifications import CustomWebhookNotificationBlock
from prefect.client.orchestration import get_client
from prefect.client.schemas.actions import DeploymentScheduleCreate, DeploymentUpdate
from prefect.client.schemas.filters import FlowFilter, FlowFilterName
from prefect.client.schemas.objects import StateType
from prefect.client.schemas.schedules import IntervalSchedule
from prefect.flows import Flow
from prefect.states import Completed, Crashed, Failed, Running, Scheduled

from deployments import idle
from deployments.installation import Installation
from deployments.server import Server
from flows import watch
from tasks.plain_runner import PlainRunner
from tasks.prefect_alerts import PrefectAlerts
from tasks.prefect_runner import PrefectRunner
from tests.fixtures.inbox import Inbox
from tests.fixtures.lab import Lab
from tests.fixtures.waiting import until
from torpor.control.alerts.delivery import Alert, Remembered, newly_seen
from torpor.control.alerts.runs import FailedRun
from torpor.control.watch_report import Watched, WatchReport
from torpor.shared.errors import NotDelivered
from torpor.shared.values import MachineId, WorkspaceName

pytestmark = pytest.mark.together("automations and make up")

BLOCK = "custom-webhook/alerts"


class _Ours(PrefectAlerts):
    """Of the server that tests share, only the runs of one flow and the memory of them."""

    def __init__(self, flow: str) -> None:
        self.flow = flow

    def failed_runs(self, since_unix: float) -> list[FailedRun]:
        return [run for run in super().failed_runs(since_unix) if run.flow == self.flow]

    def remembered(self) -> list[Remembered]:
        return [kept for kept in super().remembered() if self.flow in kept.subject]


@pytest.fixture
def inbox(prefect_server: Server) -> Iterator[Inbox]:
    made = Inbox()
    CustomWebhookNotificationBlock(
        name="alerts",
        url=f"{made.url}/secret-token",
        json_data={"subject": "{{subject}}", "body": "{{body}}"},
    ).save("alerts", overwrite=True)
    yield made
    made.close()


@pytest.fixture
def flow_name() -> str:
    """No other test has a flow of this name on the server they share."""
    return f"nightly-{secrets.token_hex(4)}"


def _deployment(flow_name: str, name: str = "", **options: Any) -> Any:
    with get_client(sync_client=True) as client:
        flow = client.create_flow(Flow(lambda: None, name=flow_name))
        return client.create_deployment(flow, name or flow_name, tags=["torpor"], **options)


def _run(deployment: Any, state: Any, **parameters: Any) -> Any:
    with get_client(sync_client=True) as client:
        run = client.create_flow_run_from_deployment(deployment, parameters=parameters)
        client.set_flow_run_state(run.id, Running(), force=True)
        client.set_flow_run_state(run.id, state, force=True)
        return run


@pytest.mark.rule(19)
def test_an_alert_arrives_once_also_after_a_refusal(lab: Lab, inbox: Inbox, flow_name: str) -> None:
    """Watch, a real block, and what it is answered."""
    crashed = Crashed(message="Process exited with a general error")
    _run(_deployment(flow_name), crashed, workspace="demo")

    def look() -> list[dict[str, str]]:
        refused: AbstractContextManager[Any]
        refused = pytest.raises(NotDelivered) if inbox.status == 500 else nullcontext()
        with PlainRunner(lab.opened, alerts=_Ours(flow_name)), refused:
            watch.fn(dry_run=False, notify=[BLOCK])
        return inbox.of(f"torpor: {flow_name} for workspace demo crashed")

    inbox.status = 500
    assert look() == []
    inbox.status = 204
    (told,) = look()
    assert f"Deployment: {flow_name}/{flow_name}" in told["body"]
    assert "Workspace: demo" in told["body"] and "Its process was killed" in told["body"]
    assert look() == [told]


def test_a_message_that_no_block_accepts_is_not_told(inbox: Inbox) -> None:
    server = PrefectAlerts()
    inbox.status = 404
    with pytest.raises(NotDelivered, match="answered with status 404") as refused:
        server.notify(BLOCK, "subject", "body")
    assert "secret-token" not in str(refused.value) and inbox.url not in str(refused.value)
    inbox.close()
    with pytest.raises(NotDelivered, match="ConnectError"):
        server.notify(BLOCK, "subject", "body")
    with pytest.raises(NotDelivered, match="custom-webhook/nobody"):
        server.notify("custom-webhook/nobody", "subject", "body")


@pytest.mark.rule(19)
def test_what_is_remembered_outlives_the_run(prefect_server: Server) -> None:
    alert = Alert(
        kind="machine left", subject=secrets.token_hex(8), workspace="demo", title="left",
        cause="\x1b" * 5000, next_step="log in", at_unix=1.5,
    )  # fmt: skip
    first = msgspec.structs.replace(newly_seen(alert, 1.5), told={BLOCK: 2.5})
    server = PrefectAlerts()
    server.remember(first)
    assert first in server.remembered()
    later = msgspec.structs.replace(first, told={})
    server.remember(later)
    assert later in PrefectAlerts().remembered() and first not in PrefectAlerts().remembered()
    server.forget(later)
    server.forget(later)
    assert later not in server.remembered()


def test_a_failed_run_is_mended_by_a_later_one_of_its_workspace(
    prefect_server: Server, flow_name: str
) -> None:
    deployment = _deployment(flow_name)
    since_unix = time.time() - 60

    def found() -> dict[str, bool]:
        failed = PrefectAlerts().failed_runs(since_unix)
        return {run.workspace: run.mended for run in failed if run.flow == flow_name}

    for workspace in ("demo", "other"):
        _run(deployment, Failed(message="the store is away"), workspace=workspace)
    assert found() == {"demo": False, "other": False}
    _run(deployment, Completed(), workspace="other")
    assert found() == {"demo": False, "other": True}


def test_a_schedule_shows_what_comes(prefect_server: Server, flow_name: str) -> None:
    assert not PrefectAlerts().schedule(flow_name, time.time()).active
    every = IntervalSchedule(
        interval=timedelta(hours=1), anchor_date=datetime(2026, 1, 1, tzinfo=timezone.utc)
    )
    plan = DeploymentScheduleCreate(schedule=every, active=True)
    _deployment(flow_name)
    _deployment(
        flow_name, f"{flow_name}-all", schedules=[plan], parameters={"workspace": "all workspaces"}
    )
    seen = until(
        lambda: (
            found if (found := PrefectAlerts().schedule(flow_name, time.time())).coming else None
        ),
        "its runs are planned",
        every_s=0.5,
    )
    assert seen.interval_s("demo") == 3600
    assert seen.quiet_s == 3 * 3600
    (coming,) = [one for one in PrefectAlerts().coming() if one.flow == flow_name]
    assert coming.workspace == "all workspaces"
    assert coming.at_unix == min(seen.coming["all workspaces"])


@pytest.fixture
def watching(prefect_server: Server) -> Iterator[Any]:
    """The deployment `watch`, as `make up` makes it, with its schedule off; and no other."""
    with get_client(sync_client=True) as client:
        for one in client.read_deployments(
            flow_filter=FlowFilter(name=FlowFilterName(any_=["watch"]))
        ):
            client.delete_deployment(one.id)
        flow = client.create_flow(Flow(lambda: None, name="watch"))
        every = IntervalSchedule(interval=timedelta(hours=1))
        made = client.create_deployment(
            flow,
            "watch",
            tags=["torpor"],
            entrypoint="flows/watch.py:watch",
            parameters={"dry_run": False},
            schedules=[DeploymentScheduleCreate(schedule=every, active=False)],
        )
        yield made
        client.delete_deployment(made)


def test_a_run_that_crashed_is_put_back_unless_it_ended_its_job_in_that_start(
    prefect_server: Server, flow_name: str
) -> None:
    run = _run(_deployment(flow_name), Crashed())
    with get_client(sync_client=True) as client:
        state: Any = client.read_flow_run(run.id).state
        ended_unix = state.timestamp.timestamp()
        assert not PrefectRunner().put_back(str(run.id), ended_unix)
        client.set_flow_run_state(run.id, Scheduled(), force=True)  # Retry
        client.set_flow_run_state(run.id, Crashed(), force=True)
        assert PrefectRunner().put_back(str(run.id), ended_unix)
        assert client.read_flow_run(run.id).state_type is StateType.SCHEDULED


def test_idle_machines_sleep_once_the_schedule_of_watch_was_switched_on(
    watching: Any, tmp_path: Path
) -> None:
    server = PrefectAlerts()
    assert server.sleeping().never("demo") == "the schedule of watch is off"
    with get_client(sync_client=True) as client:
        client.update_deployment(watching, DeploymentUpdate(paused=True))
    idle.choose(Installation(tmp_path), "hibernate")  # as the UI's switch does, and unpauses it
    assert server.sleeping().never("demo") == ""
    idle.choose(Installation(tmp_path), "report")
    assert server.sleeping().never("demo") == "watch only reports idle machines"
    idle.choose(Installation(tmp_path), "off")
    assert server.sleeping().never("demo") == "the schedule of watch is off"
    idle.choose(Installation(tmp_path), "hibernate")
    with get_client(sync_client=True) as client:
        only = DeploymentUpdate(parameters={"dry_run": False, "workspaces": ["other"]})
        client.update_deployment(watching, only)
        assert "other workspaces only: other" in server.sleeping().never("demo")
        assert server.sleeping().never("other") == ""
        client.update_deployment(watching, DeploymentUpdate(parameters={}))
    assert server.sleeping().never("demo"), "a run of watch changes nothing without dry_run=False"


def test_status_finds_when_watch_expects_a_machine_to_sleep(watching: Any, tmp_path: Path) -> None:
    idle.choose(Installation(tmp_path), "hibernate")
    at_unix = 60.0 * int(time.time() / 60 + 20)
    row = Watched(
        WorkspaceName("demo"), "busy", "works", "none", MachineId("m-1"), "vast:1",
        idle_unix=at_unix,
    )  # fmt: skip
    off = Watched(WorkspaceName("asleep"), "off", "", "wake it")
    report = WatchReport(at_unix=time.time(), watched=[row, off], findings=[], silent=[])
    Flow(
        lambda: create_table_artifact(key="watch", table=report.rows(), description="a look"),
        name="looks",
    )()
    assert PrefectAlerts().sleeping().at_unix == {"m-1 at vast:1": at_unix}
