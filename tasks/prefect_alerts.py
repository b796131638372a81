"""The part of Prefect's server that alerts use. Alerts are remembered in Prefect variables, one for
each alert."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Mapping
from datetime import datetime, timezone
from typing import Any, Final
from uuid import UUID

import msgspec
from prefect.blocks.abstract import NotificationBlock
from prefect.blocks.core import Block
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.actions import VariableCreate, VariableUpdate
from prefect.client.schemas.filters import (
    ArtifactCollectionFilter,
    ArtifactCollectionFilterKey,
    DeploymentFilter,
    DeploymentFilterTags,
    FlowFilter,
    FlowFilterName,
    FlowRunFilter,
    FlowRunFilterDeploymentId,
    FlowRunFilterEndTime,
    FlowRunFilterExpectedStartTime,
    FlowRunFilterState,
    FlowRunFilterStateType,
    FlowRunFilterTags,
    LogFilter,
    LogFilterFlowRunId,
    LogFilterLevel,
)
from prefect.client.schemas.objects import FlowRun, StateType
from prefect.client.schemas.sorting import FlowRunSort, LogSort
from prefect.exceptions import ObjectNotFound
from prefect.utilities.urls import url_for

from tasks.alert_server import NO_WATCH, ComingRun, LiveRun, Sleeping
from tasks.block_names import BlockNames
from tasks.own_deployments import is_own
from torpor.control.alerts.delivery import Remembered, without_secrets
from torpor.control.alerts.runs import OVERDUE_S, FailedRun, FlowSchedule
from torpor.control.reports import read_moment
from torpor.control.watch_report import EXPECTED, RUNS_ON
from torpor.shared.errors import InvalidInput, NotDelivered
from torpor.shared.values import learned

NOTIFIERS: Final = "torpor_notify"
"""The variable with the names of the notification blocks; `torpor up --notify` writes it."""
TAG: Final = "torpor"
_MEMORY: Final = "torpor_alert_"
_PAGE: Final = 200  # the most rows in one answer of Prefect's API
# a watch that fails every two minutes makes 780 failed runs in the time looked at
_MOST_FAILED: Final = 2000
_MOST_WORDS: Final = 500  # characters kept of a log's last errors
_FEW: Final = 20  # later runs of a deployment that are searched for one of the same workspace
_WATCH: Final = "watch"
_WATCHES: Final = "flows/watch.py:watch"
_WORKING: Final = ("wake", "replicate", "create", "deploy", "job")
_ALIVE: Final = (StateType.PENDING, StateType.RUNNING, StateType.CANCELLING)


class PrefectAlerts:
    """The ``tasks.alert_server.AlertServer`` of Prefect. It holds no state."""

    def notifiers(self) -> list[str]:
        with get_client(sync_client=True) as client:
            found = client.read_variable_by_name(NOTIFIERS)
        value = [] if found is None else found.value
        if not isinstance(value, list) or not all(isinstance(one, str) for one in value):
            raise InvalidInput(
                f"the variable {NOTIFIERS} is no list of notification blocks: run "
                "`torpor up --notify type/name`"
            )
        return [str(one) for one in value]

    def notify(self, block: str, subject: str, body: str) -> None:
        try:
            found: Any = Block.load(block, _sync=True)  # type: ignore[call-arg, unused-ignore]
        except Exception as error:  # noqa: BLE001 - whatever it raises, nobody was notified
            raise _undelivered(block, error) from None
        if not isinstance(found, NotificationBlock):
            raise NotDelivered(
                f"{block} was not notified: it is no notification block. Name another one with "
                "`torpor up --notify type/name`"
            )
        try:
            with found.raise_on_failure():
                notified: Any = found.notify
                notified(body, subject, _sync=True)
        except Exception as error:  # noqa: BLE001 - each block raises errors of its own
            raise _undelivered(block, error) from None

    def remembered(self) -> list[Remembered]:
        found = []
        with get_client(sync_client=True) as client:
            for one in _variables(client):
                # a variable of another version: the alert is sent again
                with contextlib.suppress(msgspec.MsgspecError):
                    found.append(msgspec.convert(one["value"], learned(Remembered)))
        return found

    def remember(self, one: Remembered) -> None:
        value = msgspec.to_builtins(one)
        with get_client(sync_client=True) as client:
            name = f"{_MEMORY}{one.name}"
            if client.read_variable_by_name(name) is None:
                made = VariableCreate(name=name, value=value, tags=[TAG])
                client.create_variable(made)
            else:
                client.update_variable(VariableUpdate(name=name, value=value, tags=[TAG]))

    def forget(self, one: Remembered) -> None:
        with get_client(sync_client=True) as client, contextlib.suppress(ObjectNotFound):
            client.delete_variable_by_name(f"{_MEMORY}{one.name}")

    def failed_runs(self, since_unix: float) -> list[FailedRun]:
        ours = FlowRunFilter(
            tags=FlowRunFilterTags(all_=[TAG]),
            state=_states(StateType.FAILED, StateType.CRASHED),
            end_time=FlowRunFilterEndTime(after_=_time(since_unix)),
        )
        with get_client(sync_client=True) as client:
            runs: list[FlowRun] = []
            while len(runs) < _MOST_FAILED and len(runs) % _PAGE == 0:
                page = client.read_flow_runs(
                    flow_run_filter=ours,
                    sort=FlowRunSort.END_TIME_DESC,
                    limit=_PAGE,
                    offset=len(runs),
                )
                if not page:
                    break
                runs += page
            seen = _Names(client)
            newest: dict[tuple[str, str], FailedRun] = {}
            for run in runs:  # newest first
                failed = _failed(run, seen)
                if failed.key not in newest:
                    newest[failed.key] = _looked_into(client, run, failed, seen)
        return [*newest.values()]

    def live_runs(self) -> list[LiveRun]:
        with get_client(sync_client=True) as client:
            seen = _Names(client)
            runs = client.read_flow_runs(
                flow_filter=FlowFilter(name=FlowFilterName(any_=[*_WORKING])),
                flow_run_filter=FlowRunFilter(state=_states(*_ALIVE)),
                limit=_PAGE,
            )
            return [
                LiveRun(
                    run.name,
                    seen.flow(run),
                    seen.workspace(run),
                    _unix(run.start_time or run.created),
                )
                for run in runs
            ]

    def schedule(self, flow: str, now_unix: float) -> FlowSchedule:
        none = FlowSchedule(deployment=flow, active=False, coming={}, due_unix={}, ended_unix=None)
        with get_client(sync_client=True) as client:
            found = client.read_deployments(
                flow_filter=FlowFilter(name=FlowFilterName(any_=[flow])), limit=_PAGE
            )
            on = [
                one.id
                for one in found
                if not one.paused and any(schedule.active for schedule in one.schedules)
            ]
            if not on:
                return none
            of = FlowRunFilterDeploymentId(any_=on)
            coming: dict[str, list[float]] = {}
            due: dict[str, float] = {}
            seen = _Names(client)
            planned = client.read_flow_runs(
                flow_run_filter=FlowRunFilter(deployment_id=of, state=_states(StateType.SCHEDULED)),
                sort=FlowRunSort.EXPECTED_START_TIME_ASC,
                limit=_PAGE,
            )
            for workspace, at_unix in _by_schedule(planned, seen):
                coming.setdefault(workspace, []).append(at_unix)
            past = client.read_flow_runs(
                flow_run_filter=FlowRunFilter(
                    deployment_id=of,
                    expected_start_time=FlowRunFilterExpectedStartTime(
                        before_=_time(now_unix - OVERDUE_S)
                    ),
                ),
                sort=FlowRunSort.EXPECTED_START_TIME_DESC,
                limit=_PAGE,
            )
            for workspace, at_unix in _by_schedule(past, seen):
                due.setdefault(workspace, at_unix)
            ended = client.read_flow_runs(
                flow_run_filter=FlowRunFilter(
                    deployment_id=of, state=_states(StateType.COMPLETED, StateType.FAILED)
                ),
                sort=FlowRunSort.END_TIME_DESC,
                limit=1,
            )
        return FlowSchedule(
            deployment=flow,
            active=True,
            coming=coming,
            due_unix=due,
            ended_unix=_unix(ended[0].end_time) if ended else None,
        )

    def coming(self) -> list[ComingRun]:
        found: list[ComingRun] = []
        with get_client(sync_client=True) as client:
            seen = _Names(client)
            deployments = client.read_deployments(
                deployment_filter=DeploymentFilter(tags=DeploymentFilterTags(all_=[TAG])),
                limit=_PAGE,
            )
            for one in deployments:
                if one.paused or not any(schedule.active for schedule in one.schedules):
                    continue
                planned = client.read_flow_runs(
                    flow_run_filter=FlowRunFilter(
                        deployment_id=FlowRunFilterDeploymentId(any_=[one.id]),
                        state=_states(StateType.SCHEDULED),
                    ),
                    sort=FlowRunSort.EXPECTED_START_TIME_ASC,
                    limit=_FEW,
                )
                first: dict[str, ComingRun] = {}
                for run in planned:
                    if run.auto_scheduled and run.expected_start_time is not None:
                        at_unix, workspace = _unix(run.expected_start_time), seen.workspace(run)
                        name = seen.flow(run)
                        first.setdefault(workspace, ComingRun(name, workspace, at_unix))
                found += first.values()
        return found

    def sleeping(self) -> Sleeping:
        with get_client(sync_client=True) as client:
            found = client.read_deployments(
                flow_filter=FlowFilter(name=FlowFilterName(any_=[_WATCH])), limit=_PAGE
            )
            runs = [
                {**one.parameters, **schedule.parameters}
                for one in found
                if not one.paused and is_own(one, _WATCHES)
                for schedule in one.schedules
                if schedule.active
            ]
            acting = [one for one in runs if not (one.get("dry_run", True) or _reports(one))]
            if not acting:
                only_report = any(map(_reports, runs))
                why = "watch only reports idle machines" if only_report else NO_WATCH.off
                return Sleeping(why)
            only = [tuple(one.get("workspaces") or ()) for one in acting]
            tables = client.read_latest_artifacts(
                artifact_filter=ArtifactCollectionFilter(
                    key=ArtifactCollectionFilterKey(any_=[_WATCH])
                ),
                limit=1,
            )
        at_unix = {}
        for row in json.loads(str(tables[0].data)) if tables else ():
            if expected := row.get(EXPECTED):
                at_unix[row[RUNS_ON]] = read_moment(expected)
        looks_at = () if () in only else tuple(name for names in only for name in names)
        return Sleeping("", looks_at, at_unix)


class _Names:
    """The names of blocks that runs refer to by ids."""

    def __init__(self, client: SyncPrefectClient) -> None:
        self._client = client
        self._blocks = BlockNames(client)
        self._flows: dict[UUID, str] = {}
        self._deployments: dict[UUID, str] = {}

    def flow(self, run: FlowRun) -> str:
        if run.flow_id not in self._flows:
            self._flows[run.flow_id] = self._client.read_flow(run.flow_id).name
        return self._flows[run.flow_id]

    def deployment(self, run: FlowRun) -> str:
        if run.deployment_id is None:
            return ""
        if run.deployment_id not in self._deployments:
            try:
                name = self._client.read_deployment(run.deployment_id).name
            except ObjectNotFound:
                name = "deleted"
            self._deployments[run.deployment_id] = name
        return self._deployments[run.deployment_id]

    def workspace(self, run: FlowRun) -> str:
        found = self._blocks.in_place(run.parameters.get("workspace"))
        if isinstance(found, Mapping):
            found = found.get("name")
        return "" if found is None else str(found)


def _reports(parameters: Mapping[str, Any]) -> bool:
    return bool(parameters.get("only_report"))


def _failed(run: FlowRun, seen: _Names) -> FailedRun:
    state = run.state
    crashed = state is not None and state.type == StateType.CRASHED
    return FailedRun(
        id=str(run.id),
        name=run.name,
        flow=seen.flow(run),
        deployment=seen.deployment(run),
        workspace=seen.workspace(run),
        state="Crashed" if crashed else "Failed",
        message=(state.message if state is not None else None) or "its state has no message",
        ended_unix=_unix(run.end_time),
    )


def _looked_into(
    client: SyncPrefectClient, run: FlowRun, failed: FailedRun, seen: _Names
) -> FailedRun:
    """The failed run with its last error lines, its page, and whether a later run has succeeded."""
    logs = client.read_logs(
        LogFilter(
            flow_run_id=LogFilterFlowRunId(any_=[run.id]),
            level=LogFilterLevel(ge_=40),  # errors
        ),
        limit=1,
        sort=LogSort.TIMESTAMP_DESC,
    )
    words = " ".join(line.message for line in logs)
    later = [] if failed.flow == "job" or run.deployment_id is None else client.read_flow_runs(
        flow_run_filter=FlowRunFilter(
            deployment_id=FlowRunFilterDeploymentId(any_=[run.deployment_id]),
            state=_states(StateType.COMPLETED),
            end_time=FlowRunFilterEndTime(after_=_time(failed.ended_unix)),
        ),
        sort=FlowRunSort.END_TIME_DESC,
        limit=_FEW,
    )  # fmt: skip
    return msgspec.structs.replace(
        failed,
        last_words=without_secrets(words)[-_MOST_WORDS:],
        url=url_for("flow-run", obj_id=run.id) or "",
        mended=any(seen.workspace(one) == failed.workspace for one in later),
    )


def _by_schedule(runs: list[FlowRun], seen: _Names) -> Iterator[tuple[str, float]]:
    for run in runs:
        if run.auto_scheduled and run.expected_start_time is not None:
            yield seen.workspace(run), _unix(run.expected_start_time)


def _variables(client: SyncPrefectClient) -> Iterator[dict[str, Any]]:
    """torpor's variables; the client's own method reads only 200 of all variables."""
    offset = 0
    while True:
        answer = client.request(
            "POST",
            "/variables/filter",
            json={
                "variables": {"name": {"like_": _MEMORY}},
                "sort": "NAME_ASC",
                "limit": _PAGE,
                "offset": offset,
            },
        )
        page = json.loads(answer.content)
        yield from page
        if len(page) < _PAGE:
            return
        offset += _PAGE


def _states(*types: StateType) -> FlowRunFilterState:
    return FlowRunFilterState(type=FlowRunFilterStateType(any_=[*types]))


def _undelivered(block: str, error: Exception) -> NotDelivered:
    """The error of a message that was not delivered, without the block's own words, which may hold
    a web hook's address."""
    answer = getattr(error, "response", None)
    status = getattr(answer, "status_code", None)
    what = f"it answered with status {status}" if status else type(error).__name__
    return NotDelivered(
        f"{block} was not notified ({what}): see that the block is there and send a test message "
        "from its page. The next look of watch tries again"
    )


def _time(unix: float) -> Any:
    return datetime.fromtimestamp(unix, timezone.utc)


def _unix(time: datetime | None) -> float:
    return 0.0 if time is None else time.timestamp()
