"""Whether a workspace sleeps, and in which snapshot. Only records decide: a rental that ended with
a verified snapshot. A machine that merely cannot be reached still has an open rental."""

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
    InvalidInput if a machine of the workspace may still exist. The caller has looked for machines
    before."""
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
    with suppress(StoreError):  # without the store, nothing is known
        ended = opened.rentals.ended(machine.label.rental)
        snapshot = None if ended is None else _slept_as(opened, ended)
        if snapshot is not None:
            raise _asleep(
                snapshot, f"another run hibernated machine {machine.id} as snapshot {snapshot}"
            )


def asleep(opened: OpenWorkspace, error: WorkspaceAsleep) -> AsleepReport:
    """The report of a run that found the workspace asleep and did nothing."""
    return AsleepReport(opened.spec.name, SnapshotId(error.snapshot), str(error))


def _held_until(ended: Rental) -> tuple[int, float]:
    """Until when a rental's machine held work, in whole Unix seconds: until its end, or until the
    snapshot that holds its work, whose name has whole seconds. The snapshot counts because a market
    may take long to end a hibernated machine, while another machine comes and goes. Within one
    second, the machine that was asked for later counts as the later one."""
    end = ended.ended_unix or 0.0
    if ended.snapshot is not None:
        end = min(end, made_at(ended.snapshot).timestamp())
    return int(end), ended.created_unix


def _newest(opened: OpenWorkspace) -> str:
    return newest_verified(opened.store, opened.spec.name) or "none"


def _slept_as(opened: OpenWorkspace, ended: Rental) -> SnapshotId | None:
    """The verified snapshot that holds the work of an ended rental's machine; None where there is
    none."""
    wanted = ended.snapshot
    found = verified_snapshots(opened.store, opened.spec.name, lambda snapshot: snapshot == wanted)
    return next((snapshot for snapshot, _ in found), None)


def _asleep(snapshot: SnapshotId, words: str) -> WorkspaceAsleep:
    error = WorkspaceAsleep(words)
    error.snapshot = snapshot
    return error
