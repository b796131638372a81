"""Benchmark: measures stores, encodings and numbers of parts, and advises which to use."""

from __future__ import annotations

import time
from typing import Annotated, Final

from pydantic import Field

from blocks import Workspace
from flows.procedures.measurement import Measurement, measured_block
from flows.procedures.scratch_machine import held_and_cleared, scratch_machines
from tasks.flow import flow
from tasks.measure import Sizes, open_stores
from tasks.opening import open_workspace, probe_store
from tasks.runner import runner
from torpor.control.reports import BenchmarkReport
from torpor.shared.values import WorkspaceName

PARTS: Final = [1, 4, 8, 16, 32, 64]
OBJECT_MIB: Final = [1, 8, 64]
MACHINES: Final = [1, 2]

Parts = Annotated[int, Field(ge=1, le=64)]
ObjectMib = Annotated[int, Field(ge=1, le=256)]
Machines = Annotated[int, Field(ge=1, le=64)]


@flow("benchmark")
def benchmark(
    workspace: Workspace | str,
    parts: list[Parts] = PARTS,
    content_mib: Annotated[int, Field(ge=8, le=65536)] = 256,
    rounds: Annotated[int, Field(ge=1, le=20)] = 3,
    minutes: Annotated[float, Field(ge=0.1, le=1440)] = 4.0,
    machines: list[Machines] = MACHINES,
    object_mib: list[ObjectMib] = OBJECT_MIB,
    stores: list[str] = [],  # noqa: B006 - a form shows the default; it is never changed
    other_tools: bool = True,
    machine: str = "",
    folder: str = "",
) -> BenchmarkReport:
    """Measure stores, encodings, hibernate, wake and replicate, and advise what to use.

    The flow rents machines and destroys them, and deletes everything that it stores. Your own
    machines and snapshots are not touched.

    Args:
        workspace: The Workspace block whose store, provider and identity are measured, or its name.
        parts: Numbers of parts to compare, 1 to 64.
        content_mib: The size of the generated content to hibernate and wake, in MiB. 64 parts need
            256 MiB.
        rounds: The highest number of measurements. A spread needs 3 or more.
        minutes: After this time no new round begins. The first rounds always run.
        machines: Numbers of machines to replicate to at once. The highest number is rented.
        object_mib: Sizes of raw objects to store and fetch, in MiB.
        stores: Names of further Object Store blocks to measure; * for every one.
        other_tools: Also measure restic and tar+lz4+s5cmd, if they are installed.
        machine: user@host:port of a machine of your own to measure on. Empty: rent.
        folder: The folder for table, JSON and pictures. Empty: ~/.local/state/torpor/benchmarks.
    """
    began = time.monotonic()
    block = Workspace.of(workspace)
    sizes = Sizes(
        parts=tuple(sorted(set(parts))) or (1,),
        object_mib=tuple(sorted(set(object_mib))) or (1,),
        machines=tuple(sorted(set(machines))),
        content_mib=content_mib,
        rounds=rounds,
    )
    measured = open_stores(block, stores)
    opened = open_workspace(measured_block(block, sizes, 1))
    probe_store(opened)
    work = Measurement(block, opened, measured, sizes, began, 60 * minutes)
    with (
        held_and_cleared(opened, WorkspaceName(block.name), runner().run),
        scratch_machines(
            opened, WorkspaceName(block.name), machine, max(sizes.machines, default=1)
        ) as scratch,
    ):
        work.stores(scratch[0])
        work.flows(scratch[0])
        work.replicas(scratch)
        if other_tools:
            work.others(scratch[0])
    work.codecs()
    return work.judge(folder)
