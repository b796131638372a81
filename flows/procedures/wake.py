"""One wake: the snapshot, the machine, and the restore there."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import msgspec

from flows.procedures.phases import Phases
from flows.procedures.restore import Arrival
from flows.procedures.tenancy import only_machine
from tasks.budgets import what_is_left
from tasks.machines import open_session, own_machine
from tasks.restore import NEWEST, pick_snapshot_to_wake
from tasks.runner import runner
from tasks.workspace import OpenWorkspace
from torpor.control.rental.renting import Tenancy
from torpor.control.reports import WakeReport
from torpor.shared.errors import RestoreUnfinished
from torpor.shared.values import StoredSnapshot


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
        report = restore_machine(opened, wanted, machine, full_check, phases)
    except RestoreUnfinished as left:  # of another snapshot: a rented machine goes for that
        if machine:
            raise
        runner().log.warning("%s; another machine is rented instead", left)
        report = restore_machine(opened, wanted, machine, full_check, phases)
    if not machine:
        report = msgspec.structs.replace(report, budgets=what_is_left(opened))
    return msgspec.structs.replace(report, warnings=[*report.warnings, *opened.left])


def restore_machine(
    opened: OpenWorkspace, wanted: StoredSnapshot, own: str, full_check: bool, phases: Phases
) -> WakeReport:
    with machine_to_wake(opened, own, phases) as tenancy:
        with phases.phase("connect"):
            session = open_session(opened, tenancy.machine)
        with session:
            work = Arrival(opened, session, tenancy, wanted, runner().run, phases)
            with work.begun() as plan:
                finished = work.restore(plan, full_check=full_check)
                return work.hand_over(plan, finished, full_check=full_check, alone=True)


@contextmanager
def machine_to_wake(opened: OpenWorkspace, own: str, phases: Phases) -> Iterator[Tenancy]:
    """The user's own machine, or a rented one, destroyed after a failure if that is safe."""
    if own:
        yield Tenancy(own_machine(own), None, None, fresh=True)
        return
    with only_machine(opened, phases) as tenancy:
        yield tenancy
