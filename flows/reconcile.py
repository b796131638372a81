"""Reconcile: compare the provider's machines with the leases, to find forgotten ones."""

from __future__ import annotations

from blocks import Workspace
from flows.flow import flow
from tasks.opening import open_workspace, probe_store
from tasks.reconciliation import (
    compare_with_leases,
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
) -> Reconciliation:
    """List the provider's machines and what each one is; end the named ones that a killed run left.

    Without names, nothing is changed. This flow never ends a machine that was handed over, nor one
    that still answers, unless a benchmark or a drill left it.

    Args:
        workspace: The Workspace block whose provider and leases are compared, or its name.
        end: Ids of machines to end, from this flow's table: unfinished ones that no longer answer,
            and any that benchmarks and drills left.
    """
    opened = open_workspace(workspace)
    probe_store(opened)
    findings = compare_with_leases(opened)
    chosen = choose(findings, end)
    doubtful = [m for m, lease in chosen if not lease.label.workspace.startswith(RESERVED)]
    for machine in doubtful:
        see_that_it_does_not_answer(opened, machine)
    ended: list[MachineId] = []
    faults: list[TorporError] = []
    for machine, lease in chosen:
        try:
            if machine in doubtful:  # the one before may have taken minutes to go
                see_that_it_does_not_answer(opened, machine)
            end_unfinished(opened, machine, lease)
        except TorporError as error:  # and the others are ended all the same
            runner().log.error("machine %s was not ended: %s", machine.id, error)
            faults.append(error)
        else:
            ended.append(machine.id)
    if chosen:
        findings = compare_with_leases(opened)
    report = Reconciliation(opened.spec.name, opened.provider.identity, findings, ended)
    runner().log.info(report.message())
    runner().table(
        key=f"reconcile-{opened.spec.name}", rows=report.rows(), description=report.message()
    )
    if faults:
        raise type(faults[0])("; ".join(map(str, faults)))
    return report
