"""The runner that uses Prefect: each step is a task run; tables and events go to its server."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from functools import cache, wraps
from typing import TYPE_CHECKING, Any, Final, ParamSpec, TypeVar, cast
from uuid import UUID

from prefect.artifacts import (
    create_markdown_artifact,
    create_progress_artifact,
    create_table_artifact,
    update_progress_artifact,
)
from prefect.cache_policies import NO_CACHE
from prefect.client.orchestration import get_client
from prefect.client.schemas.filters import (
    FlowFilter,
    FlowFilterName,
    FlowRunFilter,
    FlowRunFilterEndTime,
    FlowRunFilterState,
    FlowRunFilterStateType,
    WorkPoolFilter,
    WorkPoolFilterName,
    WorkQueueFilter,
    WorkQueueFilterName,
)
from prefect.client.schemas.objects import FlowRun, State, StateDetails, StateType
from prefect.client.schemas.sorting import FlowRunSort
from prefect.context import FlowRunContext, TaskRunContext
from prefect.deployments import run_deployment
from prefect.events import emit_event
from prefect.exceptions import MissingContextError, ObjectNotFound
from prefect.flows import Flow
from prefect.futures import PrefectFuture
from prefect.logging import get_logger, get_run_logger
from prefect.runtime import deployment, flow_run
from prefect.states import Cancelled, Cancelling, Completed, Crashed, Scheduled
from prefect.tasks import Task

from blocks import Workspace
from blocks.reference import saved_names
from tasks.alert_server import AlertServer
from tasks.block_names import BlockNames
from tasks.branch import current_branch
from tasks.front_page import renew_front_page
from tasks.own_deployments import check_own
from tasks.prefect_alerts import PrefectAlerts
from tasks.runs import JOB_POOL, JobRun, RunState
from tasks.waiting import waits_of
from tasks.workspace import OpenWorkspace
from torpor.control.reports import Row

if TYPE_CHECKING:
    from tasks.step import Step

P = ParamSpec("P")
R = TypeVar("R")

MOST_CRASHED: Final = 3
"""After this many killed runs of one key no further run follows at once, and a killed run of a job
is started again at most this often."""
_PAGE: Final = 200  # the most rows in one answer of Prefect's API
_STATES: Final[dict[StateType, RunState]] = {
    StateType.SCHEDULED: "waiting",
    StateType.PENDING: "taken",
    StateType.RUNNING: "running",
    StateType.PAUSED: "running",
    StateType.CANCELLING: "cancelled",
    StateType.CANCELLED: "cancelled",
    StateType.COMPLETED: "ended",
    StateType.FAILED: "ended",
    StateType.CRASHED: "crashed",
}


def _has_news(record: logging.LogRecord) -> bool:
    """Whether a log record says something new: not Prefect's line for each step that succeeded. A
    run has dozens of steps, and logs its phases itself."""
    ended_well = str(record.msg).startswith("Finished in state Completed(")
    return record.levelno > logging.INFO or not ended_well


logging.getLogger("prefect.task_runs").addFilter(_has_news)


class PrefectRunner:
    """The runner that uses Prefect for everything. It holds no state, so one object serves all flow
    runs."""

    @property
    def run(self) -> str:
        return str(flow_run.id)

    @property
    def log(self) -> logging.Logger | logging.LoggerAdapter[logging.Logger]:
        try:
            return get_run_logger()
        except MissingContextError:
            return get_logger("torpor")

    @property
    def alerts(self) -> AlertServer:
        return PrefectAlerts()

    def open(self, workspace: Workspace | str) -> OpenWorkspace:
        return OpenWorkspace.of(workspace, waits_of(self).hear)

    def workspaces(self) -> list[str]:
        return saved_names(Workspace)

    def start(self, flow: Flow[..., Any], key: str, *, queue: str = "", **parameters: Any) -> str:
        if not deployment.id and not queue:  # a call from Python, where no worker may be running
            flow(**parameters)
            return ""
        wanted = f"{flow.name}/{flow.name}"
        check_own(wanted)
        for again in range(MOST_CRASHED + 1):
            started = run_deployment(
                wanted,
                parameters=parameters,
                timeout=0,
                as_subflow=False,
                work_queue_name=queue or None,
                idempotency_key=f"{key}-{again}" if again else key,
            )
            run = cast(FlowRun, started)
            # A killed run has decided nothing, so another one may follow. Jobs' runs are continued
            # instead.
            if queue or run.state is None or not run.state.is_crashed():
                break
        return f"run {run.name}"

    def job_runs(self, *states: RunState, queue: str = "", ended_unix: float = 0.0) -> list[JobRun]:
        types = [kind for kind, state in _STATES.items() if state in states]
        in_queue = WorkQueueFilter(name=WorkQueueFilterName(any_=[queue])) if queue else None
        # pydantic converts it to Prefect's own type
        since: Any = datetime.fromtimestamp(ended_unix, UTC)
        found: list[FlowRun] = []
        with get_client(sync_client=True) as client:
            while len(found) % _PAGE == 0:
                page = client.read_flow_runs(
                    flow_filter=FlowFilter(name=FlowFilterName(any_=["job"])),
                    flow_run_filter=FlowRunFilter(
                        state=FlowRunFilterState(type=FlowRunFilterStateType(any_=types)),
                        end_time=FlowRunFilterEndTime(after_=since) if ended_unix else None,
                    ),
                    # another team may have a flow of this name
                    work_pool_filter=WorkPoolFilter(name=WorkPoolFilterName(any_=[JOB_POOL])),
                    work_queue_filter=in_queue,
                    sort=FlowRunSort.EXPECTED_START_TIME_ASC,
                    limit=_PAGE,
                    offset=len(found),
                )
                if not page:
                    break
                found += page
            blocks = BlockNames(client)
            return [_job_run(run, run.state, blocks) for run in found if run.state is not None]

    def state(self, run: str) -> RunState:
        with get_client(sync_client=True) as client:
            try:
                found = client.read_flow_run(UUID(run))
            except (ObjectNotFound, ValueError):  # a run of another server, or of no server
                return "unknown"
        return "unknown" if found.state_type is None else _STATES[found.state_type]

    def cancel(self, run: str) -> None:
        with get_client(sync_client=True) as client:
            client.set_flow_run_state(UUID(run), Cancelling())

    def give_up(self, run: str, seen: RunState, why: str) -> None:
        with get_client(sync_client=True) as client:
            found = client.read_flow_run(UUID(run))
            if found.state is None or found.state.is_final() or _STATES[found.state.type] != seen:
                return
            ended = Cancelled if found.state.is_cancelling() else Crashed
            client.set_flow_run_state(found.id, ended(message=why))

    def put_back(self, run: str, since_unix: float = 0.0) -> bool:
        with get_client(sync_client=True) as client:
            found = client.read_flow_run(UUID(run))
            if found.state_type is StateType.CRASHED:
                states = client.read_flow_run_states(found.id)
                if sum(state.is_crashed() for state in states) > MOST_CRASHED:
                    return False
                scheduled = (one.timestamp.timestamp() for one in states if one.is_scheduled())
                if max(scheduled, default=0.0) < since_unix:
                    return False
            elif found.state_type is not StateType.PENDING or found.infrastructure_pid is not None:
                return False
            again: State[Any] = Scheduled(scheduled_time=found.expected_start_time)
            client.set_flow_run_state(found.id, again)
            return True

    def call(self, step: Step[P, R], /, *args: P.args, **kwargs: P.kwargs) -> R:
        linked: dict[str, Any] = _followed(beside=False)
        return _task(step, beside=False)(*args, **kwargs, **linked)

    def submit(self, step: Step[P, R], /, *args: P.args, **kwargs: P.kwargs) -> PrefectFuture[R]:
        linked: dict[str, Any] = _followed(beside=True)
        return _task(step, beside=True).submit(*args, **kwargs, **linked)

    def table(self, key: str, rows: Sequence[Row], description: str) -> None:
        with self._never_failing(f"the table {key}"):
            create_table_artifact(key=key, table=list(rows), description=description)

    def page(self, key: str, markdown: str, description: str) -> None:
        with self._never_failing(f"the page {key}"):
            create_markdown_artifact(key=key, markdown=markdown, description=description)

    def front_page(self, markdown: str) -> None:
        with self._never_failing("torpor's page"):
            renew_front_page(markdown)

    def progress(self, key: str, description: str) -> Callable[[float], None]:
        created: Any = None  # Prefect's type covers its async twin, too
        with self._never_failing(f"the progress bar {key}"):
            created = create_progress_artifact(progress=0.0, key=key, description=description)

        def update(percent: float) -> None:
            if created is not None:
                with self._never_failing(f"{percent:.0f} % on the progress bar {key}"):
                    update_progress_artifact(created, progress=percent)

        return update

    def event(self, **event: Any) -> None:
        emit_event(**event)

    @contextmanager
    def _never_failing(self, what: str) -> Iterator[None]:
        """Log a failure to show ``what`` as a warning: the flow's work does not depend on it."""
        try:
            yield
        except Exception as error:  # noqa: BLE001 - the server may fail in any way
            self.log.warning("%s is not shown in the UI; the run goes on: %s", what, error)


def _job_run(run: FlowRun, state: State[Any], blocks: BlockNames) -> JobRun:
    changed_unix = state.timestamp.timestamp()
    due = run.next_scheduled_start_time or run.expected_start_time
    return JobRun(
        str(run.id),
        run.work_queue_name or "",
        _STATES[state.type],
        changed_unix,
        run.created.timestamp() if run.created else changed_unix,
        {name: blocks.in_place(value) for name, value in run.parameters.items()},
        due.timestamp() if due else 0.0,
    )


def _followed(*, beside: bool) -> dict[str, Any]:
    """The argument that links a task to those that it follows in its branch. Prefect itself links a
    task within a task to the outer one. All of the linked tasks have ended, so nothing waits."""
    branch = current_branch()
    if branch is None or TaskRunContext.get() is not None:
        return {}
    states: list[State[bool]] = [
        Completed(data=True, state_details=StateDetails(task_run_id=step))
        for step in branch.follows(beside=beside)
    ]
    return {"wait_for": states}


def _task(step: Step[P, R], *, beside: bool) -> Task[P, R]:
    if FlowRunContext.get() is None:
        raise RuntimeError(
            f"step {step.name!r} was called outside of a run: call the flow, or call its function "
            "under a PlainRunner"
        )
    if current_branch() is None:
        return cast("Task[P, R]", _task_of(step))
    within = TaskRunContext.get() is not None
    return cast("Task[P, R]", _task_of_branch(step, beside=beside, within=within))


@cache
def _task_of(step: Step[..., Any]) -> Task[..., Any]:
    return _made(step, step.function, step.run_name)


@cache
def _task_of_branch(step: Step[..., Any], *, beside: bool, within: bool) -> Task[..., Any]:
    """The Prefect task of a step that a branch calls: it has the branch's name, and the branch
    learns when it ends, unless it is ``within`` another task."""

    @wraps(step.function)
    def function(*args: Any, **kwargs: Any) -> Any:
        result = step.function(*args, **kwargs)
        branch, here = current_branch(), TaskRunContext.get()
        if branch is not None and here is not None and not within:
            branch.ended(here.task_run.id, beside=beside)
        return result

    def run_name(parameters: dict[str, Any]) -> str:
        branch, label = current_branch(), step.label(**parameters)
        return f"{branch.name}: {label}" if branch is not None and branch.name else label

    return _made(step, function, run_name)


def _made(
    step: Step[..., Any], function: Callable[..., Any], run_name: str | Callable[..., str] | None
) -> Task[..., Any]:
    retries = step.retries

    def again(task: Task[..., Any], task_run: Any, state: Any) -> bool:
        error = _error(state)
        return error is not None and retries.again(error)

    return Task(
        function,
        name=step.name,
        task_run_name=run_name,
        retries=len(retries.waits_s),
        retry_delay_seconds=list(retries.waits_s),
        retry_jitter_factor=0.5,
        retry_condition_fn=again,
        cache_policy=NO_CACHE,  # sessions and blocks cannot be cache keys
        persist_result=False,  # Prefect stores no results
    )


def _error(state: Any) -> BaseException | None:
    data = getattr(state, "data", None)
    if isinstance(data, BaseException):
        return data
    exception = getattr(data, "exception", None)
    return exception if isinstance(exception, BaseException) else None
