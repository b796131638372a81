"""Whether a workspace sleeps, and in which snapshot. Only records say so: a rental that has ended
with a verified snapshot. A machine that merely cannot be reached has an open rental."""

from __future__ import annotations

from contextlib import suppress

from tasks.workspace import OpenWorkspace
from torpor.control.rental.records import Rental
from torpor.control.reports import AsleepReport, moment
from torpor.control.store.receipts import newest_verified, verified_snapshots
from torpor.shared.errors import InvalidInput, StoreError, WorkspaceAsleep
from torpor.shared.values import Machine, SnapshotId, made_at


def check_not_asleep(opened: OpenWorkspace, wanted: str = "") -> None:
    """WorkspaceAsleep if the workspace's last machine, or the ``wanted`` one, was hibernated.
    InvalidInput if a machine of it may still exist. Look for machines first."""
    name = opened.spec.name
    for rental in opened.rentals.open():
        if rental.state != "abandoned" and wanted in ("", rental.machine):
            raise InvalidInput(
                f"workspace {name} is on no machine that {rental.provider} shows, but rental "
                f"{rental.label.rental} of machine {rental.machine or 'not named yet'} is open "
                f"({rental.state}): the machine may still exist. The newest verified snapshot is "
                f"{_newest(opened)}. Try again in a minute; "
                f"`torpor reconcile {name}` shows such rentals and how to close them"
            )
    ended = [
        rental
        for rental in opened.rentals.history()
        if (rental.handed_unix or rental.snapshot) and wanted in ("", rental.machine)
    ]
    last = max(ended, key=_held_until, default=None)
    snapshot = None if last is None else _slept_as(opened, last)
    if last is not None and snapshot is not None:
        raise _asleep(
            snapshot,
            f"workspace {name} is already asleep in {snapshot}: machine {last.machine} was "
            f"destroyed at {moment(last.ended_unix or 0.0)}. Wake it to work on it",
        )
    if last is not None:
        raise InvalidInput(
            f"workspace {name} is on no machine: its last one, {last.machine} at {last.provider}, "
            f"ended at {moment(last.ended_unix or 0.0)} ({last.why}), and no record says that a "
            f"snapshot holds all of its work. The newest verified snapshot is {_newest(opened)}: "
            "wake it to work on it"
        )


def check_not_hibernated(opened: OpenWorkspace, machine: Machine) -> None:
    """WorkspaceAsleep if another run has hibernated this machine meanwhile."""
    if machine.label is None:
        return
    with suppress(StoreError):  # then nothing is known
        ended = opened.rentals.ended(machine.label.rental)
        snapshot = None if ended is None else _slept_as(opened, ended)
        if snapshot is not None:
            raise _asleep(
                snapshot, f"another run hibernated machine {machine.id} as snapshot {snapshot}"
            )


def asleep(opened: OpenWorkspace, error: WorkspaceAsleep) -> AsleepReport:
    """The report of a run that found nothing to do."""
    return AsleepReport(opened.spec.name, SnapshotId(error.snapshot), str(error))


def _held_until(ended: Rental) -> tuple[int, float]:
    """Until when, in whole Unix seconds, its machine held work: to its end, or to the snapshot that
    holds it, whose name has whole seconds. A market may be slow to end a hibernated machine, and
    another may come and go meanwhile. Within one second, the machine that was asked for later."""
    end = ended.ended_unix or 0.0
    if ended.snapshot is not None:
        end = min(end, made_at(ended.snapshot).timestamp())
    return int(end), ended.created_unix


def _newest(opened: OpenWorkspace) -> str:
    return newest_verified(opened.store, opened.spec.name) or "none"


def _slept_as(opened: OpenWorkspace, ended: Rental) -> SnapshotId | None:
    """The snapshot that holds what the machine of an ended rental held, where that is verified."""
    wanted = ended.snapshot
    found = verified_snapshots(opened.store, opened.spec.name, lambda snapshot: snapshot == wanted)
    return next((snapshot for snapshot, _ in found), None)


def _asleep(snapshot: SnapshotId, words: str) -> WorkspaceAsleep:
    error = WorkspaceAsleep(words)
    error.snapshot = snapshot
    return error
