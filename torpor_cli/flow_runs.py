"""Runs a flow for a command: here and now, or by the worker."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import ExitStack, nullcontext, redirect_stdout
from dataclasses import dataclass
from typing import Annotated, Any

from cyclopts import Parameter

from deployments.terminal import Waiting
from torpor.shared.errors import TorporError
from torpor_cli.output import print_report, quiet
from torpor_cli.server import connected


@Parameter(name="*")
@dataclass(frozen=True)
class Options:
    """What every command that runs a flow takes.

    Args:
        json: Print JSON instead of a table.
        detach: Let the worker run it, and print the run's address at once.
        wide: Show all columns of a table, however narrow the terminal is.
    """

    json: Annotated[bool, Parameter(negative=())] = False
    detach: Annotated[bool, Parameter(negative=())] = False
    wide: Annotated[bool, Parameter(negative=())] = False


@Parameter(name="*")
@dataclass(frozen=True)
class Format:
    """What every command that only looks takes.

    Args:
        json: Print JSON instead of a table.
        wide: Show all columns of a table, however narrow the terminal is.
    """

    json: Annotated[bool, Parameter(negative=())] = False
    wide: Annotated[bool, Parameter(negative=())] = False


def run(
    name: str,
    options: Options | None,
    queue: str = "",
    asks: bool = False,
    detached: Callable[[str], dict[str, str]] = lambda run: {},
    beside_output: bool = False,
    **parameters: Any,
) -> Any:
    """Run the flow of that name, print its report, and return it. With ``detach``, the worker runs
    it, and None is returned. ``queue``: the work queue that it then waits in, if it is not the
    deployment's own; ``detached``: what is said of the run with this id. ``asks``: the flow may ask
    whoever is at the terminal. ``beside_output``: standard output is that of a command on a
    machine, so that people read the report on standard error.
    """
    chosen = options or Options()
    with ExitStack() as open_until_the_end:
        ui = open_until_the_end.enter_context(connected())
        with Waiting("loading the flow"):  # takes a second or two
            import flows

            flow = getattr(flows, name)
        if chosen.detach:
            started = _submit(f"{flow.name}/{flow.name}", parameters, queue)
            address = f"{ui}/runs/flow-run/{started.id}"
            more = detached(str(started.id))
            if chosen.json:
                print_report({"run": str(started.id), "address": address, **more}, as_json=True)
                return None
            print(f"run {started.name} begins: {address}")
            for what, value in more.items():
                print(f"{what:<7} {value}")
            return None
        with quiet(chosen.json, asks=asks):
            report = flow(**parameters)
        aside = redirect_stdout(sys.stderr) if beside_output and not chosen.json else nullcontext()
        with aside:
            print_report(report, as_json=chosen.json, wide=chosen.wide)
        return report


def _submit(deployment: str, parameters: dict[str, Any], queue: str) -> Any:
    from prefect.deployments import run_deployment
    from prefect.exceptions import PrefectHTTPStatusError

    from tasks.own_deployments import check_own
    from torpor.control.own_server import how_to_start

    check_own(deployment)
    try:
        return run_deployment(
            deployment,
            parameters=parameters,
            timeout=0,
            as_subflow=False,
            work_queue_name=queue or None,
        )
    except PrefectHTTPStatusError as error:  # wrong parameters, or its work pool was deleted
        answer = error.response
        raise TorporError(
            f"the Prefect server at {answer.url.host}:{answer.url.port} refuses a run of "
            f"{deployment} ({answer.status_code}): {answer.text.strip()}. {how_to_start()} "
            "gives torpor's deployments their work pools and queues back"
        ) from None
