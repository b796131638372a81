"""The decorator of all flows."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from inspect import getsourcefile, signature
from typing import Any, Final, ParamSpec, TypeVar

from prefect.context import SettingsContext, get_settings_context
from prefect.flows import Flow
from prefect.runtime import flow_run
from prefect.task_runners import ThreadPoolTaskRunner
from prefect.utilities.hashing import file_hash

from tasks.error_output import mark_interrupted
from tasks.phases import measured_phases
from tasks.run_table import show, shown_as
from torpor.control.reports import Report

P = ParamSpec("P")
R = TypeVar("R")

PARTS_AT_ONCE: Final = 8
"""Task runs of parts that are under way at once; the agent works on eight parts at a time."""


class _Flow(Flow[P, R]):
    """Sends no heartbeats in runs that a program calls: Prefect waits up to a second for the
    heartbeat thread when such a run ends. Runs that a worker starts send heartbeats, and so does
    every run where the user has set their interval."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        context = get_settings_context()
        flows = context.settings.flows
        if "heartbeat_frequency" in flows.model_fields_set:
            return super().__call__(*args, **kwargs)
        silent = flows.model_copy(update={"heartbeat_frequency": None})
        settings = context.settings.model_copy(update={"flows": silent})
        with SettingsContext(profile=context.profile, settings=settings):
            return super().__call__(*args, **kwargs)


def flow(name: str, *, at_once: int = PARTS_AT_ONCE) -> Callable[[Callable[P, R]], Flow[P, R]]:
    """Make a Prefect flow of a function. Its runs are called ``hibernate-mywork``, their phases are
    measured, and a report that they return is shown as a table. A run submits ``at_once`` steps at
    the same time; Prefect keeps no result of it."""

    def make(function: Callable[P, R]) -> Flow[P, R]:
        @wraps(function)
        def run(*args: P.args, **kwargs: P.kwargs) -> R:
            with measured_phases(), shown_as(name):
                try:
                    result = function(*args, **kwargs)
                except KeyboardInterrupt as error:
                    mark_interrupted(error, name)
                    raise
                if isinstance(result, Report):
                    show(result)
                return result

        # Prefect looks for the names of types where ``run`` is, and not where the function is.
        run.__signature__ = signature(function, eval_str=True)  # type: ignore[attr-defined]
        return _Flow(
            run,
            name=name,
            version=file_hash(getsourcefile(function) or __file__),
            flow_run_name=_run_name,
            task_runner=ThreadPoolTaskRunner(max_workers=at_once),  # type: ignore[arg-type]
            persist_result=False,
        )

    return make


def _run_name() -> str:
    """The name of a run: the flow and its workspace, if it is about one."""
    workspace = flow_run.parameters.get("workspace")
    of = f"-{getattr(workspace, 'name', workspace)}" if workspace else ""
    return f"{flow_run.flow_name}{of}"
