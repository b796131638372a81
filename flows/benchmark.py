"""Benchmark: measures stores, encodings and numbers of parts, or deploys of stacks, and advises
which to use."""

from __future__ import annotations

from typing import Annotated, Final

from pydantic import Field

from blocks import Workspace
from flows.procedures.deploy.measurement import measure_deploys
from flows.procedures.measurement import measure_stores
from tasks.flow import flow
from tasks.measure import Sizes
from tasks.restore import NEWEST
from torpor.control.deploy.stack import StrategyName
from torpor.control.reports import BenchmarkReport
from torpor.shared.errors import InvalidInput

STRATEGIES: Final[list[StrategyName]] = ["stored"]
PARTS: Final = [1, 4, 8, 16, 32, 64]
CONTENT_MIB: Final = 256
OBJECT_MIB: Final = [1, 8, 64]
MACHINES: Final = [1, 2]

Parts = Annotated[int, Field(ge=1, le=64)]
ObjectMib = Annotated[int, Field(ge=1, le=256)]
Machines = Annotated[int, Field(ge=1, le=64)]


@flow("benchmark")
def benchmark(
    workspace: Workspace | str,
    stacks: list[str] = [],  # noqa: B006 - a form shows the default; it is never changed
    strategies: list[StrategyName] = STRATEGIES,
    providers: list[str] = [],  # noqa: B006
    snapshot: str = NEWEST,
    parts: list[Parts] = PARTS,
    content_mib: Annotated[int, Field(ge=8, le=65536)] = CONTENT_MIB,
    machines: list[Machines] = MACHINES,
    object_mib: list[ObjectMib] = OBJECT_MIB,
    stores: list[str] = [],  # noqa: B006
    other_tools: bool = True,
    machine: str = "",
    rounds: Annotated[int, Field(ge=0, le=50)] = 0,
    minutes: Annotated[float, Field(ge=0, le=1440)] = 0,
    folder: str = "",
) -> BenchmarkReport:
    """Measure stores, encodings, hibernate, wake and replicate, or deploys of stacks, and advise
    what to use.

    The flow rents machines and destroys them, and deletes everything that it stores. Your own
    machines, snapshots and stored environments are not touched.

    Args:
        workspace: The Workspace block whose store, provider and identity are measured, or its name.
        stacks: Names of Stack blocks, to measure their deploys on new machines. Empty: measure
            stores, encodings, hibernate, wake and replicate.
        strategies: Deploys only: the strategies to compare. `stored` is measured cold and warm.
        providers: Deploys only: names of provider blocks to compare. Empty: those of the workspace.
        snapshot: Deploys only: the snapshot to deploy, its id, or newest.
        parts: Numbers of parts to compare, 1 to 64. Not with stacks.
        content_mib: The size of the generated content to hibernate and wake, in MiB. 64 parts need
            256 MiB. Not with stacks.
        machines: Numbers of machines to replicate to at once. The highest number is rented. Not
            with stacks.
        object_mib: Sizes of raw objects to store and fetch, in MiB. Not with stacks.
        stores: Names of further Object Store blocks to measure; * for every one. Not with stacks.
        other_tools: Also measure restic and tar+lz4+s5cmd, if they are installed. Not with stacks.
        machine: user@host:port of a machine of your own to measure on. Empty: rent. Not with
            stacks.
        rounds: The highest number of measurements. A spread needs 3 or more. 0: 3, and 5 of
            deploys.
        minutes: After this time no new round begins. The first rounds always run. 0: 4, and 60 for
            deploys.
        folder: The folder for table, JSON and pictures. Empty: ~/.local/state/torpor/benchmarks.
    """
    if stacks:
        _refuse(
            "belong to the benchmark of stores: leave them as they are, or name no `stacks`",
            parts=parts != PARTS,
            content_mib=content_mib != CONTENT_MIB,
            machines=machines != MACHINES,
            object_mib=object_mib != OBJECT_MIB,
            stores=bool(stores),
            other_tools=not other_tools,
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
    sizes = Sizes(
        parts=tuple(sorted(set(parts))) or (1,),
        object_mib=tuple(sorted(set(object_mib))) or (1,),
        machines=tuple(sorted(set(machines))),
        content_mib=content_mib,
        rounds=rounds or 3,
    )
    return measure_stores(
        workspace, sizes, stores, machine, minutes or 4, folder, other_tools=other_tools
    )


def _refuse(why: str, **given: bool) -> None:
    if names := [f"`{name}`" for name, changed in given.items() if changed]:
        raise InvalidInput(f"{', '.join(names)} {why}")
