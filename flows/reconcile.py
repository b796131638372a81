"""Reconcile: the provider's list against the leases, so that nothing costs unseen."""

from __future__ import annotations

from prefect import flow
from prefect.artifacts import create_table_artifact
from prefect.logging import get_run_logger

from blocks import Workspace
from flows.run_name import run_name
from tasks.place import open_place, probe_store
from tasks.reconciliation import (
    compare_with_leases,
    end_unfinished,
    see_that_it_does_not_answer,
)
from torpor.control.reconciliation import Reconciliation, choose
from torpor.shared.errors import TorporError
from torpor.shared.values import RESERVED, MachineId


@flow(name="reconcile", flow_run_name=run_name, persist_result=False)
def reconcile(
    workspace: Workspace | str,
    end: list[str] = [],  # noqa: B006 - a form shows the default; it is never changed
) -> Reconciliation:
    """Say what each machine at the provider is, and end those that a killed run left, if named.

    Without names nothing is changed. A machine that was handed over is never ended here, nor one
    that still answers, unless a benchmark or a drill left it.

    Args:
        workspace: The Workspace block whose provider and leases are compared, or its name.
        end: Machines to end, by their ids in this flow's table: unfinished ones that do not answer
            any more, and any that benchmarks and drills left.
    """
    place = open_place(workspace)
    probe_store(place)
    findings = compare_with_leases(place)
    chosen = choose(findings, end)
    doubtful = [m for m, lease in chosen if not lease.label.workspace.startswith(RESERVED)]
    for machine in doubtful:
        see_that_it_does_not_answer(place, machine)
    ended: list[MachineId] = []
    faults: list[TorporError] = []
    for machine, lease in chosen:
        try:
            if machine in doubtful:  # the one before may have taken minutes to go
                see_that_it_does_not_answer(place, machine)
            end_unfinished(place, machine, lease)
        except TorporError as error:  # and the others are ended all the same
            get_run_logger().error("machine %s was not ended: %s", machine.id, error)
            faults.append(error)
        else:
            ended.append(machine.id)
    if chosen:
        findings = compare_with_leases(place)
    report = Reconciliation(place.spec.name, place.provider.identity, findings, ended)
    get_run_logger().info(report.message())
    create_table_artifact(
        key=f"reconcile-{place.spec.name}", table=report.rows(), description=report.message()
    )
    if faults:
        raise type(faults[0])("; ".join(map(str, faults)))
    return report
