"""Wake: restore a snapshot on a machine."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import msgspec

from blocks import Workspace
from flows.procedures.phases import Phases
from flows.procedures.restore import Arrival
from flows.procedures.tenancy import only_machine
from tasks.budgets import what_is_left
from tasks.flow import flow
from tasks.machines import open_session, own_machine
from tasks.opening import open_workspace, probe_store
from tasks.restore import NEWEST, pick_snapshot_to_wake
from tasks.runner import runner
from tasks.workspace import OpenWorkspace
from torpor.control.rental.renting import Tenancy
from torpor.control.reports import WakeReport
from torpor.shared.errors import RestoreUnfinished
from torpor.shared.values import StoredSnapshot


@flow("wake")
def wake(
    workspace: Workspace | str,
    snapshot: str = NEWEST,
    machine: str = "",
    full_check: bool = True,
    accept_paths: list[str] = [],  # noqa: B006 - a form shows the default; it is never changed
) -> WakeReport:
    """Restore a workspace on a new machine, byte for byte.

    A wake that fails destroys the machine that it created. The snapshot is only read.

    Args:
        workspace: The Workspace block to wake, or its name.
        snapshot: The snapshot's id, or newest.
        machine: user@host:port of a machine of your own to wake on. Empty: rent one.
        full_check: Read and hash every restored byte at the end, not names and attributes only.
        accept_paths: Directories of the snapshot that are not among the workspace's paths, to
            restore all the same. Without them such a snapshot is refused.
    """
    phases = Phases()
    with phases.phase("prepare"):
        opened = open_workspace(workspace).accepting(accept_paths)
        probe_store(opened)
    report = wake_workspace(opened, phases, snapshot, machine, full_check)
    runner().table(
        key=f"wake-{opened.spec.name}",
        rows=report.rows(),
        description=f"Workspace {opened.spec.name} woken from {report.snapshot}",
    )
    return report


def wake_workspace(
    opened: OpenWorkspace,
    phases: Phases,
    snapshot: str = NEWEST,
    machine: str = "",
    full_check: bool = True,
) -> WakeReport:
    """Wake the workspace as part of any flow; a job continues on the machine."""
    with phases.phase("prepare"):
        wanted, opened = pick_snapshot_to_wake(opened, snapshot)
    try:
        report = _bring(opened, wanted, machine, full_check, phases)
    except RestoreUnfinished as left:  # of another snapshot: a rented machine goes for that
        if machine:
            raise
        runner().log.warning("%s; another machine is rented instead", left)
        report = _bring(opened, wanted, machine, full_check, phases)
    if not machine:
        report = msgspec.structs.replace(report, budgets=what_is_left(opened))
    return msgspec.structs.replace(report, warnings=[*report.warnings, *opened.left])


def _bring(
    opened: OpenWorkspace, wanted: StoredSnapshot, own: str, full_check: bool, phases: Phases
) -> WakeReport:
    with _tenancy(opened, own, phases) as tenancy:
        with phases.phase("connect"):
            session = open_session(opened, tenancy.machine)
        with session:
            work = Arrival(opened, session, tenancy, wanted, runner().run, phases)
            with work.begun() as plan:
                finished = work.restore(plan, full_check=full_check)
                return work.hand_over(plan, finished, full_check=full_check, alone=True)


@contextmanager
def _tenancy(opened: OpenWorkspace, own: str, phases: Phases) -> Iterator[Tenancy]:
    """The user's own machine, or a rented one, destroyed after a failure if that is safe."""
    if own:
        yield Tenancy(own_machine(own), None, None, fresh=True)
        return
    with only_machine(opened, phases) as tenancy:
        yield tenancy
