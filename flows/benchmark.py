"""Benchmark: measures stores and encodings, or deploys of stacks, and advises which to use."""

from __future__ import annotations

from typing import Annotated, Final

from pydantic import Field

from blocks import Workspace
from flows.procedures.deploy.measurement import measure_deploys
from flows.procedures.measurement import measure_stores
from tasks.flow import flow
from tasks.restore import NEWEST
from torpor.control.deploy.stack import StrategyName
from torpor.control.reports import BenchmarkReport
from torpor.shared.errors import InvalidInput

STRATEGIES: Final[list[StrategyName]] = ["stored"]


@flow("benchmark")
def benchmark(
    workspace: Workspace | str,
    stacks: list[str] = [],  # noqa: B006 - a form shows the default; it is never changed
    strategies: list[StrategyName] = STRATEGIES,
    providers: list[str] = [],  # noqa: B006
    snapshot: str = NEWEST,
    stores: list[str] = [],  # noqa: B006
    machine: str = "",
    rounds: Annotated[int, Field(ge=0, le=50)] = 0,
    minutes: Annotated[float, Field(ge=0, le=1440)] = 0,
    folder: str = "",
) -> BenchmarkReport:
    """Measure stores and encodings, or deploys of stacks, and advise what to use.

    The flow rents a machine, for deploys one for each start, and destroys it, and deletes
    everything that it stores. Your own machines, snapshots and stored environments are not
    touched.

    Args:
        workspace: The Workspace block whose store, provider and identity are measured, or its name.
        stacks: Names of Stack blocks, to measure their deploys on new machines. Empty: measure
            stores and encodings.
        strategies: Deploys only: the strategies to compare. `stored` is measured cold and warm.
        providers: Deploys only: names of provider blocks to compare. Empty: those of the workspace.
        snapshot: Deploys only: the snapshot to deploy, its id, or newest.
        stores: Names of further Object Store blocks to measure; * for every one. Not with stacks.
        machine: user@host:port of a machine of your own to measure on. Empty: rent. Not with
            stacks.
        rounds: The highest number of measurements. A spread needs 3 or more. 0: 3, and 5 of
            deploys.
        minutes: After this time no new round begins. The first rounds always run. 0: 4, and 60 for
            deploys.
        folder: The folder for table and JSON. Empty: ~/.local/state/torpor/benchmarks.

    Returns:
        The folder of the figures, and in `advice` what they advise. `notes` says what could not be
        measured.

    Raises:
        InvalidInput: Parameters of stores and of deploys were mixed, or no start of a deploy went
            well.
        NoOffer: Nothing on sale fits the workspace.
        BudgetExceeded: A budget cannot pay for the machine.

    Example:
        Measure every Object Store block:
        ```python
        from flows import benchmark

        report = benchmark("mywork", stores=["*"])
        print(report.advice, report.folder)
        ```
    """
    if stacks:
        _refuse(
            "belong to the benchmark of stores: leave them as they are, or name no `stacks`",
            stores=bool(stores),
            machine=bool(machine),
        )
        return measure_deploys(
            workspace, stacks, strategies, providers, snapshot, rounds or 5, minutes or 60, folder
        )
    _refuse(
        "belong to the benchmark of deploys: name `stacks`, or leave them as they are",
        strategies=strategies != STRATEGIES,
        providers=bool(providers),
        snapshot=snapshot != NEWEST,
    )
    return measure_stores(workspace, stores, machine, rounds or 3, minutes or 4, folder)


def _refuse(why: str, **given: bool) -> None:
    if names := [f"`{name}`" for name, changed in given.items() if changed]:
        raise InvalidInput(f"{', '.join(names)} {why}")
