"""The runner that uses Prefect: each step is a task run; tables and events go to its server."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar, cast

from prefect.artifacts import (
    create_markdown_artifact,
    create_progress_artifact,
    create_table_artifact,
    update_progress_artifact,
)
from prefect.cache_policies import NO_CACHE
from prefect.client.schemas.objects import FlowRun
from prefect.context import FlowRunContext
from prefect.deployments import run_deployment
from prefect.events import emit_event
from prefect.exceptions import MissingContextError
from prefect.flows import Flow
from prefect.futures import PrefectFuture
from prefect.logging import get_logger, get_run_logger
from prefect.runtime import deployment, flow_run
from prefect.tasks import Task

from blocks import Workspace
from blocks.reference import saved_names
from tasks.workspace import OpenWorkspace
from torpor.control.reports import Row

if TYPE_CHECKING:
    from tasks.step import Step

P = ParamSpec("P")
R = TypeVar("R")


class PrefectRunner:
    """Everything is Prefect's own. It holds no state, so one serves all flow runs."""

    @property
    def run(self) -> str:
        return str(flow_run.id)

    @property
    def log(self) -> logging.Logger | logging.LoggerAdapter[logging.Logger]:
        try:
            return get_run_logger()
        except MissingContextError:
            return get_logger("torpor")

    def open(self, workspace: Workspace | str) -> OpenWorkspace:
        return OpenWorkspace.of(workspace)

    def workspaces(self) -> list[str]:
        return saved_names(Workspace)

    def start(self, flow: Flow[..., Any], key: str, **parameters: Any) -> str:
        if not deployment.id:  # a call from Python: there may be no worker
            flow(**parameters)
            return ""
        run = run_deployment(
            f"{flow.name}/{flow.name}",
            parameters=parameters,
            timeout=0,
            as_subflow=False,
            idempotency_key=key,
        )
        return f"run {cast(FlowRun, run).name}"

    def call(self, step: Step[P, R], /, *args: P.args, **kwargs: P.kwargs) -> R:
        return _task(step)(*args, **kwargs)

    def submit(self, step: Step[P, R], /, *args: P.args, **kwargs: P.kwargs) -> PrefectFuture[R]:
        return _task(step).submit(*args, **kwargs)

    def table(self, key: str, rows: Sequence[Row], description: str) -> None:
        with self._never_failing(f"the table {key}"):
            create_table_artifact(key=key, table=list(rows), description=description)

    def page(self, key: str, markdown: str, description: str) -> None:
        with self._never_failing(f"the page {key}"):
            create_markdown_artifact(key=key, markdown=markdown, description=description)

    def progress(self, key: str, description: str) -> Callable[[float], None]:
        created: Any = None  # Prefect's type is also that of its async twin
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


def _task(step: Step[P, R]) -> Task[P, R]:
    if FlowRunContext.get() is None:
        raise RuntimeError(
            f"step {step.name!r} was called outside of a run: call the flow, or call its function "
            "under a PlainRunner"
        )
    return cast("Task[P, R]", _task_of(step))


@cache
def _task_of(step: Step[..., Any]) -> Task[..., Any]:
    retries = step.retries

    def again(task: Task[..., Any], task_run: Any, state: Any) -> bool:
        error = _error(state)
        return error is not None and retries.again(error)

    return Task(
        step.function,
        name=step.name,
        task_run_name=step.run_name,
        retries=len(retries.waits_s),
        retry_delay_seconds=list(retries.waits_s),
        retry_jitter_factor=0.5,
        retry_condition_fn=again,
        cache_policy=NO_CACHE,  # sessions and blocks are no cache keys
        persist_result=False,  # and no results either
    )


def _error(state: Any) -> BaseException | None:
    data = getattr(state, "data", None)
    if isinstance(data, BaseException):
        return data
    exception = getattr(data, "exception", None)
    return exception if isinstance(exception, BaseException) else None
