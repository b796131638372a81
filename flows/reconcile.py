"""Reconcile: compare the providers' machines with the rentals, to find forgotten ones."""

from __future__ import annotations

from blocks import Workspace
from flows.hibernate import hibernate
from flows.procedures.unfinished import became_of, settle
from tasks.flow import flow
from tasks.machines import end_abandoned, renting
from tasks.ownership import check_owner
from tasks.reconciliation import (
    check_all_answer,
    check_silent,
    close_rental,
    compare_with_rentals,
    end_unfinished,
)
from tasks.run_table import shown
from tasks.runner import runner
from tasks.trouble import trouble
from tasks.workspace import OpenWorkspace
from tasks.workspace_blocks import open_workspace, probe_store
from torpor.control.reconciliation import Reconciliation, choose_findings, choose_gone
from torpor.control.rental.records import Rental
from torpor.shared.errors import InvalidInput, TorporError
from torpor.shared.values import RESERVED, Machine, MachineId, names_of


@flow("reconcile")
def reconcile(
    workspace: Workspace | str,
    end: list[str] = [],  # noqa: B006 - a form shows the default; it is never changed
    abandoned: bool = False,
    left: list[str] = [],  # noqa: B006
    gone: list[str] = [],  # noqa: B006
) -> Reconciliation:
    """List the machines at all provider blocks, what each one is and costs; end the named ones that
    a killed run left.

    Without names and without `abandoned`, nothing is changed. This flow never ends a machine that
    was handed over, nor an unfinished one that still answers, unless a benchmark, a drill or a job
    on several nodes left it, or `left` names it and its restore is not whole.

    Args:
        workspace: The Workspace block whose rentals are compared, or its name.
        end: Ids of machines to end, from this flow's table: unfinished ones that no longer answer,
            and any that benchmarks, drills and jobs on several nodes left.
        abandoned: Also end the attempts that failed or whose answer was lost, if a machine of
            theirs shows.
        left: Ids of unfinished machines that answer, which a killed run left. One with an
            unfinished restore is ended. One with a whole restore is handed over and hibernated, and
            so is one of a workspace that has no snapshot yet; they are only handed over where they
            are in use, or nobody can say so. One on which a run or a job works, or may work, stays
            as it is, and so does one that is in use and whose restore is not whole.
        gone: Ids of rentals, from this flow's table, whose machines are gone for certain, although
            their provider cannot prove it or no block is for it. The rentals are closed, and wake
            restores the newest snapshot. A machine that still runs costs money until you end it in
            the provider's console.

    Returns:
        In `findings`, each machine or disk at a provider, what it is and what it costs; in `ended`
        and `closed`, what this run did.

    Raises:
        InvalidInput: An id is not in the table, or a provider did not answer. Nothing was closed.
        UnsafeDestroy: A machine in `end` answers, is starting or was handed over. None was ended.
        NotOurs: A machine in `end` or `left` is none that a killed run left.
        MachineInUse: Somebody uses a machine in `left`, or nobody can say so.
        WorkspaceBusy: A run or a job works on a machine in `left`.
        EndUnproven: A machine was told to end, and its market has not proven that it has.
        Recovered: Another control side has recovered the workspace, and owns it.

    Example:
        See every machine that costs money:
        ```python
        from flows import reconcile

        print(reconcile("mywork").rows())
        ```
    """
    opened = open_workspace(workspace)
    probe_store(opened)
    if end or abandoned or left or gone:
        check_owner(opened)
    findings, unread = compare_with_rentals(opened)
    chosen = choose_findings(findings, end)
    settled = _settled_by_runs(choose_findings(findings, left))
    everywhere = [provider.identity for provider in opened.markets.every()]
    if gone:
        check_all_answer(opened)
    closed = choose_gone(findings, gone, everywhere)
    doubtful = [
        machine
        for machine, rental in chosen
        if rental.unfinished and not rental.label.workspace.startswith(RESERVED)
    ]
    for machine in doubtful:
        check_silent(opened, machine)
    ended: list[MachineId] = []
    faults: list[TorporError] = []
    for machine, rental in chosen:
        try:
            if machine in doubtful:  # the machine before may have taken minutes to end
                check_silent(opened, machine)
            end_unfinished(opened, machine, rental)
        except TorporError as error:  # the others are ended all the same
            runner().log.error("machine %s was not ended by this run: %s", machine.id, error)
            faults.append(error)
        else:
            ended.append(machine.id)
    for machine, rental in settled:
        try:
            became, why = settle(opened, machine, rental)
            if became == "handed over":
                _hibernate(workspace, opened, machine.id)
        except Exception as error:  # noqa: BLE001 - what else was named is seen to all the same
            faults.append(trouble(error))
            runner().log.error(
                "machine %s %s: %s", machine.id, became_of(opened, rental.label), faults[-1]
            )
            continue
        if became == "ended":
            ended.append(machine.id)
        elif became == "in use":
            runner().log.info(
                "machine %s was handed over and not hibernated: %s. `torpor hibernate %s --machine "
                "%s` stores and ends it",
                machine.id, why, opened.spec.name, machine.id,
            )  # fmt: skip
    for rental in closed:
        close_rental(opened, rental)
    if abandoned:
        for name in names_of(opened.spec.name):
            over = end_abandoned(renting(opened.under(name)))
            ended += [rental.machine for rental in over if rental.machine is not None]
    if chosen or settled or closed or abandoned:
        findings, unread = compare_with_rentals(opened)
    report = Reconciliation(
        opened.spec.name,
        ", ".join(everywhere),
        findings,
        ended,
        [rental.label.rental for rental in closed],
        {str(key): str(why) for key, why in unread.items()},
    )
    runner().log.info(report.title())
    if faults:
        raise shown(report, type(faults[0])("; ".join(map(str, faults))))
    return report


def _settled_by_runs(chosen: list[tuple[Machine, Rental]]) -> list[tuple[Machine, Rental]]:
    """InvalidInput for what no wake has left: it holds no restore."""
    for machine, rental in chosen:
        if rental.state == "abandoned":
            raise InvalidInput(
                f"machine {machine.id} in `left` is of an attempt that failed and holds nothing: "
                "nothing was ended. Name it in `end`, or switch `abandoned` on"
            )
        if not rental.unfinished or rental.label.workspace.startswith(RESERVED):
            raise InvalidInput(
                f"machine {machine.id} in `left` is of no wake or replicate: nothing was ended. "
                "Name it in `end`"
            )
    return chosen


def _hibernate(workspace: Workspace | str, opened: OpenWorkspace, machine: MachineId) -> None:
    """Start the hibernation of a machine that was handed over without telling anybody. A user who
    begins to use the machine meanwhile keeps it."""
    name = workspace if isinstance(workspace, str) else workspace._block_document_name
    runs = runner().start(
        hibernate,
        f"left-{machine}",
        workspace=name or opened.spec.name,
        machine=machine,
        only_if_unused=True,
    )
    done = f"{runs} hibernates it unless somebody uses it" if runs else "it was hibernated"
    runner().log.info("machine %s was handed over: %s", machine, done)
