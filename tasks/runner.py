"""What runs a flow's steps and shows its output: Prefect, or a plain runner."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, ParamSpec, Protocol, TypeVar

from tasks.alert_server import AlertServer
from tasks.prefect_runner import PrefectRunner
from tasks.runs import JobRun, RunState
from torpor.control.reports import Row

if TYPE_CHECKING:
    from prefect.flows import Flow

    from blocks import Workspace
    from tasks.step import Step
    from tasks.workspace import OpenWorkspace

P = ParamSpec("P")
R = TypeVar("R")
R_co = TypeVar("R_co", covariant=True)


class StepFuture(Protocol[R_co]):
    """A step that was submitted."""

    def result(self) -> R_co:
        """Wait for the end of the step; raises what the step raised."""


class Runner(Protocol):
    """Everything that flows and steps need from Prefect. Any thread may call it."""

    @property
    def run(self) -> str:
        """The id of this run, unique among runs."""

    @property
    def log(self) -> logging.Logger | logging.LoggerAdapter[logging.Logger]:
        """Where this run writes its messages."""

    @property
    def alerts(self) -> AlertServer:
        """What alerts need of the installation's server."""

    def open(self, workspace: Workspace | str) -> OpenWorkspace:
        """The workspace of that block or name, with its store, provider and identity."""

    def workspaces(self) -> list[str]:
        """The names by which ``open`` knows every workspace of the installation."""

    def start(self, flow: Flow[..., Any], key: str, *, queue: str = "", **parameters: Any) -> str:
        """Run a flow of torpor's: as a run of its own where that is possible, and otherwise in this
        run. A second run with the same ``key`` is not started unless the first was killed. With
        ``queue``, the flow runs in that queue, and never in this run. Returns what runs now; empty
        if it has ended."""

    def job_runs(self, *states: RunState, queue: str = "", ended_unix: float = 0.0) -> list[JobRun]:
        """The runs of jobs that are in one of these states, in the order of their submission.
        ``queue``: only runs of that queue. ``ended_unix``: only runs that have ended since then."""

    def state(self, run: str) -> RunState:
        """The state of a run."""

    def cancel(self, run: str) -> None:
        """Cancel a run, as a person does in the UI."""

    def give_up(self, run: str, seen: RunState, why: str) -> None:
        """Record that the process of a run is gone, so that it holds no slot of its pool. Does
        nothing if the run's state differs from the one that was ``seen``."""

    def put_back(self, run: str, since_unix: float = 0.0) -> bool:
        """Put a run back into its queue, at its place: one that a worker took and never started, or
        one that has crashed. False if its process was started, if it has crashed too often, if it
        is in another state, or if it crashed and was not scheduled since ``since_unix``."""

    def call(self, step: Step[P, R], /, *args: P.args, **kwargs: P.kwargs) -> R:
        """Call the step's function, with the step's retries."""

    def submit(self, step: Step[P, R], /, *args: P.args, **kwargs: P.kwargs) -> StepFuture[R]:
        """Call the step's function as ``call`` does, on another thread of a bounded number, in a
        copy of this context."""

    def table(self, key: str, rows: Sequence[Row], description: str) -> None:
        """Show a table in the UI. A failure to show it is a warning in the log, as for pages and
        progress bars."""

    def page(self, key: str, markdown: str, description: str) -> None:
        """Show a page in the UI."""

    def front_page(self, markdown: str) -> None:
        """Renew torpor's own page in the UI."""

    def progress(self, key: str, description: str) -> Callable[[float], None]:
        """Show a progress bar in the UI; the returned function sets it, in percent."""

    def event(self, **event: Any) -> None:
        """Send an event that automations can act on; may raise whatever the client raises."""


_PREFECT = PrefectRunner()
_current: ContextVar[Runner] = ContextVar("runner", default=_PREFECT)


def runner() -> Runner:
    """The runner of this context: Prefect, unless a plain runner is active."""
    return _current.get()


@contextmanager
def run_by(other: Runner) -> Iterator[None]:
    """Make ``other`` the runner within this context."""
    token = _current.set(other)
    try:
        yield
    finally:
        _current.reset(token)
