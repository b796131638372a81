"""What the killed wakes of a stopped job left: machines that were never handed over."""

from __future__ import annotations

from flows.phases import Phases
from flows.restoration import Arrival
from tasks.machines import open_session, renting
from tasks.restore import pick_snapshot_to_wake
from tasks.runner import runner
from tasks.workspace import OpenWorkspace
from torpor.control.rental.renting import Tenancy
from torpor.shared.errors import RestoreUnfinished, RunCancelled
from torpor.shared.values import MachineId, SnapshotId, StoredSnapshot


def end_unfinished(opened: OpenWorkspace, newest: SnapshotId | None) -> MachineId | None:
    """End the machines that were rented for the job of ``opened`` and hold an unfinished restore,
    and nothing else. One that holds a whole restore is handed over and returned: only a verified
    snapshot ends it. WorkspaceBusy while a run works on one; MachineUnreachable where one does not
    answer."""
    with renting(opened) as held:
        for machine, rental in held.machines():
            if rental is None or rental.job != opened.job or not rental.unfinished:
                continue
            wanted, _ = pick_snapshot_to_wake(opened, newest or "")
            tenancy = held.take_up(held.tenancy(machine, rental))
            try:
                _hand_over(opened, tenancy, wanted)
            except (RunCancelled, RestoreUnfinished) as ended:
                runner().log.info("machine %s was ended: %s", machine.id, ended)
            else:
                return machine.id
    return None


def _hand_over(opened: OpenWorkspace, tenancy: Tenancy, wanted: StoredSnapshot) -> None:
    """Hand over a whole workspace; what is not whole is ended with the error."""
    with tenancy, open_session(opened, tenancy.machine) as session:
        arrival = Arrival(opened, session, tenancy, wanted, runner().run, Phases())
        with arrival.begun() as plan:
            if not plan.complete:
                raise RunCancelled("the job was stopped before its workspace was restored")
            tenancy.hand_over()
