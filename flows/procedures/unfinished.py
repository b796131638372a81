"""What killed wakes left: machines that were never handed over."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Final, Literal

from flows.procedures.restore import restore_run_before_handover
from tasks.autosave import line_held
from tasks.hold import workspace_held
from tasks.job_limits import for_job
from tasks.jobs import check_no_job
from tasks.machines import hand_over, make_paths, open_session, renting
from tasks.packages import put_packages_back
from tasks.programs import Freezer, prove_freezing, start_programs
from tasks.restore import NEWEST, new_restore, pick_snapshot
from tasks.runner import runner
from tasks.watch import LeftLook, look_at_left, who_uses
from tasks.workspace import OpenWorkspace
from torpor.control.remote.agent import Session
from torpor.control.rental.records import Rental
from torpor.control.rental.renting import Tenancy
from torpor.control.store.manifests import snapshot_ids
from torpor.shared.errors import (
    CreateFailed,
    MachineError,
    MachineInUse,
    RestoreUnfinished,
    SnapshotMissing,
    TorporError,
    WorkspaceBusy,
)
from torpor.shared.values import Label, Machine, MachineId, SnapshotId, StoredSnapshot


def end_leftovers(opened: OpenWorkspace, newest: SnapshotId | None) -> MachineId | None:
    """End the machines that were rented for the job of ``opened`` and hold an unfinished restore,
    and nothing else. A machine that holds a whole restore is handed over and returned, because only
    a verified snapshot may end it. A machine that another run uses meanwhile is left to that run.
    WorkspaceBusy while a run works on a machine, HandedOver if that run ends or hands over one;
    after all were tried, MachineError or CreateFailed where a machine does not answer."""
    fault: MachineError | CreateFailed | None = None
    with renting(opened) as held:
        for machine, rental in held.machines():
            if rental is None or rental.job != opened.job or not rental.unfinished:
                continue
            wanted = pick_snapshot(opened, newest or "")
            try:
                tenancy = held.take_up(held.tenancy(machine, rental))
                if tenancy.rental is None or tenancy.rental.job != opened.job:
                    continue
                _hand_over(opened, tenancy, wanted)
            except RestoreUnfinished as cause:
                if opened.rentals.of(rental.label) is None:
                    runner().log.info("machine %s was ended: %s", machine.id, cause)
                else:  # the next look of the job tries again
                    runner().log.warning("machine %s was not ended: %s", machine.id, cause)
            except (MachineError, CreateFailed) as error:
                fault = error
            else:
                return machine.id
    if fault is not None:
        raise fault
    return None


_NOT_WHOLE: Final = "its run has gone, and its restore is not whole"
ENDED: Final = "has ended"
ONLY_HANDED_OVER: Final = "was handed over, and not hibernated"
Settled = Literal["ended", "handed over", "in use"]


def settle(opened: OpenWorkspace, machine: Machine, rental: Rental) -> tuple[Settled, str]:
    """Decide what becomes of a machine that a killed run left, by what its agent says: what came of
    it, and why.

    ``ended``: nobody used it, and it held an unfinished restore and nothing else. ``handed over``:
    nobody uses it, and it holds a whole restore, which only a verified snapshot may end. So is one
    of a workspace without snapshots, on which nothing was to be restored: what somebody may have
    written there is stored. ``in use``: the same, and somebody uses it, or nobody can say so.

    All others are left as they are: WorkspaceBusy while a run works on it or a job goes on with it,
    MachineInUse where that is not known, or where somebody uses a machine whose restore is not
    whole; HandedOver if another run has taken it up; MachineError or CreateFailed where it does not
    answer; RestoreUnfinished where it was to be ended, and was not."""
    _check_no_job_goes_on(opened, machine, rental)
    opened = for_job(opened, rental.job, 0.0)
    with renting(opened) as held:
        tenancy = held.take_up(held.tenancy(machine, rental), untaken=True)
        look = look_at_left(opened, tenancy.machine, again=True)
        _check_nobody_works(opened, machine, look)
        never_stored = not snapshot_ids(opened.store, opened.spec.name)
        wanted = None if never_stored else pick_snapshot(opened, NEWEST)

        def check(session: Session, whole: bool) -> None:
            """Raise where an unfinished restore is in use. Unknown use does not count: it keeps no
            unfinished restore from being ended."""
            _check_no_job_goes_on(opened, machine, rental)
            if whole:
                return
            if used := look.used or who_uses(opened, tenancy.machine, session)[0]:
                raise MachineInUse(
                    f"machine {machine.id} holds an unfinished restore, and was left as it is: "
                    f"{used}. `torpor wake {opened.spec.name}` goes on with it"
                )

        try:
            _hand_over(opened, tenancy, wanted, check)
        except RestoreUnfinished as cause:
            if opened.rentals.of(rental.label) is not None:
                raise
            runner().log.info("machine %s was ended: %s", machine.id, cause)
            return "ended", str(cause)
    if look.used:
        return "in use", look.used
    if look.unsure:
        return "in use", f"whether somebody uses it is not known: {look.unsure}"
    return "handed over", "nobody uses it"


def became_of(opened: OpenWorkspace, label: Label) -> str:
    """What has happened to a machine that should be ended or handed over, by its record: text to
    follow its name."""
    try:
        now = opened.under(label.workspace).rentals.of(label)
    except TorporError as error:
        return f"may be in use or cost money: its record cannot be read ({error})"
    if now is None:
        return ENDED
    if now.state == "handed over":
        return ONLY_HANDED_OVER
    if now.state == "abandoned":
        return (
            "was not ended, and may cost money until `torpor reconcile "
            f"{opened.spec.name} --abandoned` ends it"
        )
    return "stays as it was left"


def _check_no_job_goes_on(opened: OpenWorkspace, machine: Machine, rental: Rental) -> None:
    """WorkspaceBusy where the job that the machine was rented for goes on with it, MachineInUse
    where another job works there."""
    check_no_job(opened, machine.id)
    job = opened.jobs.of(rental.job) if rental.job else None
    if job is not None and not job.ended:
        raise WorkspaceBusy(
            f"machine {machine.id} was rented for job {job.id}, which is {job.state} and goes on "
            f"with it: wait for the job, or cancel it with `torpor job cancel {job.id}`"
        )


def _check_nobody_works(opened: OpenWorkspace, machine: Machine, look: LeftLook) -> None:
    if look.works is None:
        raise MachineInUse(
            f"whether a run works on machine {machine.id} is not known ({look.error}), so it was "
            f"left alone: run `torpor reconcile {opened.spec.name}` again. If the machine never "
            f"answers: `torpor reconcile {opened.spec.name} --end {machine.id}`"
        )
    if look.works:
        raise WorkspaceBusy(
            f"a run works on machine {machine.id}: wait until it has ended. A run whose control "
            "side is gone ends by itself after a minute"
        )


def _hand_over(
    opened: OpenWorkspace,
    tenancy: Tenancy,
    newest: StoredSnapshot | None,
    check: Callable[[Session, bool], None] = lambda session, whole: None,
) -> None:
    """Hand over a whole workspace; what is not whole is ended with RestoreUnfinished. ``check`` may
    raise right before either, while no other run can work there; it gets whether all is whole.
    HandedOver where another run may have taken the machine up since. The killed run may have
    restored another snapshot than the ``newest``, by its name. None: there is no snapshot, so what
    the machine holds is all that there is of the workspace, unless that is a part of a deleted
    one."""
    with tenancy, open_session(opened, tenancy.machine) as session:
        if newest is None:
            with workspace_held(opened, session) as there:
                if there.half_restored:
                    raise RestoreUnfinished(
                        f"machine {tenancy.machine.id} holds a part of a snapshot that was deleted "
                        "since, so it was neither stored nor ended. End it in the market's "
                        f"console; then run `torpor reconcile {opened.spec.name}`"
                    )
                make_paths(opened, session)
                check(session, True)
                hand_over(tenancy, alone=False, untaken=True)
            return
        restore = new_restore(opened, session, _restored_there(opened, session, newest), wakes=True)
        give_up = partial(_give_up, opened, tenancy, session, partial(check, session, False))
        with restore_run_before_handover(restore, tenancy, give_up):
            if not restore.plan.complete:
                raise RestoreUnfinished(_NOT_WHOLE)
            freezer = Freezer()
            if opened.spec.freezes:  # the restore is whole
                freezer = prove_freezing(opened, session, tenancy.rental, strict=False)
            put_packages_back(opened, restore, rented=True)
            make_paths(opened, session)
            starting = bool(opened.spec.programs)
            check(session, True)
            hand_over(tenancy, alone=False, starting=starting, untaken=True)
            if starting:
                start_programs(opened, session, tenancy, freezer)


def _give_up(
    opened: OpenWorkspace, tenancy: Tenancy, session: Session, check: Callable[[], None]
) -> None:
    """Have the machine ended. WorkspaceBusy where another run works there by now."""
    with workspace_held(opened, session):
        check()
        tenancy.abandon(_NOT_WHOLE)


def _restored_there(
    opened: OpenWorkspace, session: Session, newest: StoredSnapshot
) -> StoredSnapshot:
    """The snapshot that the machine holds whole, as far as the machine and the store say."""
    held = line_held(opened, session)
    if held is None or held == newest.snapshot:
        return newest
    try:
        return pick_snapshot(opened, held)
    except SnapshotMissing:  # the snapshot was deleted since: the agent refuses to replace it
        return newest
