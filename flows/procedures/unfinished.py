"""What killed wakes left: machines that were never handed over."""

from __future__ import annotations

from dataclasses import replace

from flows.procedures.restore import restore_run_before_handover
from tasks.autosave import line_held
from tasks.machines import hand_over, make_paths, open_session, renting
from tasks.programs import Freezer, prove_freezing, start_programs
from tasks.restore import NEWEST, new_restore, pick_snapshot
from tasks.runner import runner
from tasks.workspace import OpenWorkspace
from torpor.control.remote.agent import Session
from torpor.control.rental.records import Rental
from torpor.control.rental.renting import Tenancy
from torpor.control.store.manifests import snapshot_ids
from torpor.shared.errors import (
    CreateFailed,
    MachineError,
    RestoreUnfinished,
    RunCancelled,
    SnapshotMissing,
)
from torpor.shared.values import Machine, MachineId, SnapshotId, StoredSnapshot


def end_leftovers(opened: OpenWorkspace, newest: SnapshotId | None) -> MachineId | None:
    """End the machines that were rented for the job of ``opened`` and hold an unfinished restore,
    and nothing else. One that holds a whole restore is handed over and returned: only a verified
    snapshot ends it. One that another run takes up meanwhile is left to it. WorkspaceBusy while a
    run works on one, HandedOver if that ends or hands over one; after all were tried, MachineError
    or CreateFailed where one does not answer."""
    fault: MachineError | CreateFailed | None = None
    with renting(opened) as held:
        for machine, rental in held.machines():
            if rental is None or rental.job != opened.job or not rental.unfinished:
                continue
            wanted = pick_snapshot(opened, newest or "")
            try:
                tenancy = held.take_up(held.tenancy(machine, rental))
                if not _is_of_job(opened, rental):
                    continue
                _hand_over(opened, tenancy, wanted)
            except (RunCancelled, RestoreUnfinished) as ended:
                runner().log.info("machine %s was ended: %s", machine.id, ended)
            except (MachineError, CreateFailed) as error:
                fault = error
            else:
                if _is_of_job(opened, rental):
                    return machine.id
    if fault is not None:
        raise fault
    return None


def settle(opened: OpenWorkspace, machine: Machine, rental: Rental) -> bool:
    """End a machine that a killed run left, if it holds an unfinished restore and nothing else.
    Returns whether it holds a whole restore: then it was handed over, and only a verified snapshot
    ends it. WorkspaceBusy while a run works on it, HandedOver if another one has taken it up;
    MachineError or CreateFailed where it does not answer: then it is left. A machine that was
    rented for the first job of a workspace without snapshots was to stay empty: it is handed over,
    too, so that what somebody may have written there is stored."""
    opened = replace(opened, job=rental.job)
    never_stored = bool(rental.job) and not snapshot_ids(opened.store, opened.spec.name)
    wanted = None if never_stored else pick_snapshot(opened, NEWEST)
    with renting(opened) as held:
        tenancy = held.take_up(held.tenancy(machine, rental))
        try:
            _hand_over(opened, tenancy, wanted)
        except (RunCancelled, RestoreUnfinished) as ended:
            runner().log.info("machine %s was ended: %s", machine.id, ended)
            return False
    return True


def _is_of_job(opened: OpenWorkspace, rental: Rental) -> bool:
    now = opened.rentals.of(rental.label)
    return now is not None and now.job == opened.job


def _hand_over(opened: OpenWorkspace, tenancy: Tenancy, newest: StoredSnapshot | None) -> None:
    """Hand over a whole workspace; what is not whole is ended with the error. The killed run may
    have restored another snapshot than the ``newest``, by its name. None: it restored nothing."""
    if newest is None:
        with tenancy, open_session(opened, tenancy.machine) as session:
            make_paths(opened, session)
            hand_over(tenancy, alone=False)
        return
    with (
        tenancy,
        open_session(opened, tenancy.machine) as session,
        restore_run_before_handover(
            new_restore(opened, session, _held(opened, session, newest)), tenancy
        ) as restore,
    ):
        if not restore.plan.complete:
            raise RunCancelled("its run has gone, and its restore is not whole")
        freezer = Freezer()
        if opened.spec.freezes:
            freezer = prove_freezing(opened, session, tenancy.rental, strict=False)  # it is whole
        make_paths(opened, session)
        starting = bool(opened.spec.programs)
        hand_over(tenancy, alone=False, starting=starting)
        if starting:
            start_programs(opened, session, tenancy, freezer)


def _held(opened: OpenWorkspace, session: Session, newest: StoredSnapshot) -> StoredSnapshot:
    """The snapshot that the machine holds whole, as far as it and the store say."""
    held = line_held(opened, session)
    if held is None or held == newest.snapshot:
        return newest
    try:
        return pick_snapshot(opened, held)
    except SnapshotMissing:  # it was deleted since: the agent refuses to replace it
        return newest
