"""Reconcile: compare the providers' machines with the rentals, to find forgotten ones."""

from __future__ import annotations

from blocks import Workspace
from flows.flow import flow
from tasks.opening import open_workspace, probe_store
from tasks.reconciliation import (
    compare_with_rentals,
    end_abandoned,
    end_unfinished,
    see_that_it_does_not_answer,
)
from tasks.runner import runner
from torpor.control.reconciliation import Reconciliation, choose
from torpor.shared.errors import TorporError
from torpor.shared.values import RESERVED, MachineId


@flow("reconcile")
def reconcile(
    workspace: Workspace | str,
    end: list[str] = [],  # noqa: B006 - a form shows the default; it is never changed
    abandoned: bool = False,
) -> Reconciliation:
    """List the machines at all provider blocks, what each one is and costs; end the named ones that
    a killed run left.

    Without names and without `abandoned`, nothing is changed. This flow never ends a machine that
    was handed over, nor an unfinished one that still answers, unless a benchmark or a drill left
    it.

    Args:
        workspace: The Workspace block whose rentals are compared, or its name.
        end: Ids of machines to end, from this flow's table: unfinished ones that no longer answer,
            and any that benchmarks and drills left.
        abandoned: Also end the attempts that failed or whose answer was lost, if a machine of
            theirs shows.
    """
    opened = open_workspace(workspace)
    probe_store(opened)
    findings = compare_with_rentals(opened)
    chosen = choose(findings, end)
    doubtful = [
        machine
        for machine, rental in chosen
        if rental.unfinished and not rental.label.workspace.startswith(RESERVED)
    ]
    for machine in doubtful:
        see_that_it_does_not_answer(opened, machine)
    ended: list[MachineId] = []
    faults: list[TorporError] = []
    for machine, rental in chosen:
        try:
            if machine in doubtful:  # the one before may have taken minutes to go
                see_that_it_does_not_answer(opened, machine)
            end_unfinished(opened, machine, rental)
        except TorporError as error:  # and the others are ended all the same
            runner().log.error("machine %s was not ended: %s", machine.id, error)
            faults.append(error)
        else:
            ended.append(machine.id)
    if abandoned:
        ended += end_abandoned(opened)
    if chosen or abandoned:
        findings = compare_with_rentals(opened)
    at = ", ".join(provider.identity for provider in opened.markets.every())
    report = Reconciliation(opened.spec.name, at, findings, ended)
    runner().log.info(report.message())
    runner().table(
        key=f"reconcile-{opened.spec.name}", rows=report.rows(), description=report.message()
    )
    if faults:
        raise type(faults[0])("; ".join(map(str, faults)))
    return report
