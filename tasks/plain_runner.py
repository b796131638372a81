"""Runs flows in this process alone: no Prefect server, and none of Prefect's engine.

    with PlainRunner(opened):
        report = hibernate.fn("mywork", destroy=False)

Benchmarks and fault tests use it: a Prefect run costs seconds for its server.
"""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from contextvars import copy_context
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, ParamSpec, TypeVar

from blocks import Workspace
from tasks.alert_server import AlertServer, NobodyListens
from tasks.runner import run_by
from tasks.runs import JobRun, RunState
from tasks.workspace import OpenWorkspace
from torpor.control.reports import Row
from torpor.shared.errors import InvalidInput

if TYPE_CHECKING:
    from prefect.flows import Flow

    from tasks.step import Step

P = ParamSpec("P")
R = TypeVar("R")

AT_ONCE: Final = 8


class PlainRunner:
    """The runner of the context that enters it, until it is left. It knows these workspaces.

    ``retries`` limits the retries of each step; ``wait_factor`` scales their waits. ``before`` gets
    the label of each step before it begins, and may raise. ``on_event`` gets each event.
    ``alerts``: where alerts go; without it, alerts go nowhere.
    """

    def __init__(
        self,
        *workspaces: OpenWorkspace,
        retries: int | None = None,
        wait_factor: float = 1.0,
        at_once: int = AT_ONCE,
        before: Callable[[str], None] | None = None,
        on_event: Callable[[dict[str, Any]], None] | None = None,
        alerts: AlertServer | None = None,
    ) -> None:
        self.run = secrets.token_hex(16)
        self.log = logging.getLogger("torpor.plain")
        self._workspaces = {one.spec.name: one for one in workspaces}
        self._retries = retries
        self._wait_factor = wait_factor
        self._before = before
        self._on_event = on_event
        self.alerts = alerts or NobodyListens()
        self._pool = ThreadPoolExecutor(at_once, thread_name_prefix="step")
        self._left = ExitStack()

    def __enter__(self) -> PlainRunner:
        self._left.enter_context(self._pool)
        self._left.enter_context(run_by(self))
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._left.close()

    def open(self, workspace: Workspace | str) -> OpenWorkspace:
        name = workspace if isinstance(workspace, str) else workspace.name
        for known, opened in self._workspaces.items():
            if known == name:
                return opened
        given = ", ".join(sorted(self._workspaces)) or "none"
        raise InvalidInput(
            f"workspace {name!r} was not given to this program's runner; it was given: {given}"
        )

    def workspaces(self) -> list[str]:
        return [*self._workspaces]

    def start(self, flow: Flow[..., Any], key: str, *, queue: str = "", **parameters: Any) -> str:
        flow.fn(**parameters)
        return ""

    def job_runs(self, *states: RunState, queue: str = "", ended_unix: float = 0.0) -> list[JobRun]:
        return []

    def state(self, run: str) -> RunState:
        return "unknown"

    def cancel(self, run: str) -> None:
        """Do nothing: no run waits in a queue."""

    def give_up(self, run: str, seen: RunState, why: str) -> None:
        """Do nothing: there are no slots."""

    def put_back(self, run: str, since_unix: float = 0.0) -> bool:
        return False

    def call(self, step: Step[P, R], /, *args: P.args, **kwargs: P.kwargs) -> R:
        for wait_s in step.retries.waits_s[: self._retries]:
            try:
                return self._once(step, *args, **kwargs)
            except Exception as error:
                if not step.retries.again(error):
                    raise
                self.log.warning("%s failed, again: %s", step.label(*args, **kwargs), error)
            time.sleep(wait_s * self._wait_factor)
        return self._once(step, *args, **kwargs)

    def submit(self, step: Step[P, R], /, *args: P.args, **kwargs: P.kwargs) -> Future[R]:
        context = copy_context()
        return self._pool.submit(lambda: context.run(self.call, step, *args, **kwargs))

    def table(self, key: str, rows: Sequence[Row], description: str) -> None:
        """Do nothing: there is no UI."""

    def page(self, key: str, markdown: str, description: str) -> None:
        """Do nothing: there is no UI."""

    def front_page(self, markdown: str) -> None:
        """Do nothing: there is no UI."""

    def progress(self, key: str, description: str) -> Callable[[float], None]:
        return lambda percent: None

    def event(self, **event: Any) -> None:
        if self._on_event is not None:
            self._on_event(event)

    def _once(self, step: Step[P, R], /, *args: P.args, **kwargs: P.kwargs) -> R:
        if self._before is not None:
            self._before(step.label(*args, **kwargs))
        return step.function(*args, **kwargs)
