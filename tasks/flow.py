"""The decorator of all flows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, ParamSpec, TypeVar

import prefect
from prefect.flows import Flow
from prefect.runtime import flow_run
from prefect.task_runners import ThreadPoolTaskRunner

P = ParamSpec("P")
R = TypeVar("R")

PARTS_AT_ONCE: Final = 8
"""Task runs of parts under way; the agent works eight parts at a time."""


def flow(name: str, *, at_once: int = PARTS_AT_ONCE) -> Callable[[Callable[P, R]], Flow[P, R]]:
    """Make a Prefect flow of a function. Its runs are called ``hibernate-mywork``, it submits
    ``at_once`` steps at the same time, and Prefect keeps no result of it."""
    return prefect.flow(
        name=name,
        flow_run_name=_run_name,
        task_runner=ThreadPoolTaskRunner(max_workers=at_once),  # type: ignore[arg-type]
        persist_result=False,
    )


def _run_name() -> str:
    """The name of a run: the flow and its workspace, if it is about one."""
    workspace = flow_run.parameters.get("workspace")
    of = f"-{getattr(workspace, 'name', workspace)}" if workspace else ""
    return f"{flow_run.flow_name}{of}"
