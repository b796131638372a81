"""The steps of retention and of deleting as tasks."""

from __future__ import annotations

import time
from collections.abc import Sequence
from datetime import datetime, timezone
from typing import Final

from tasks.events import SnapshotDeleted, emit
from tasks.prune import named_by_records
from tasks.retries import ONCE
from tasks.runner import runner
from tasks.step import step
from tasks.workspace import OpenWorkspace, StoredWorkspace
from torpor.control.safety import Verified
from torpor.control.upkeep.deletion import delete_snapshot, record_missing
from torpor.control.upkeep.history import newest_that_counts, taken_snapshots
from torpor.control.upkeep.lineage import SnapshotLines
from torpor.control.upkeep.pins import pin, pinned, unpin
from torpor.control.upkeep.retention import Judged, Retention, Taken, judge
from torpor.control.upkeep.superseded import Succession
from torpor.shared.errors import SnapshotMissing, SnapshotOverdue, TorporError
from torpor.shared.format.lineage import Lineage
from torpor.shared.values import SnapshotId, made_at, new_snapshot_id

_CLOCK_HOURS: Final = 1.0
"""Hours by which a snapshot may seem to come from the future, because the clocks of two control
sides differ."""


@step("judge snapshots")
def judge_snapshots(
    opened: OpenWorkspace, retention: Retention, and_a_new_one: bool, machine: str = ""
) -> list[Judged]:
    """The verdict on each snapshot; with ``and_a_new_one``, as if a new one were taken now, of
    ``machine`` or of the workspace's only one. Saves of an open job do not count: the job deletes
    them itself, and goes on from the newest."""
    saves = {
        save: job.id
        for job in opened.jobs.open()
        for save in (*job.kept_saves, job.newest)
        if save is not None
    }
    taken = list(taken_snapshots(opened.store, opened.spec.name, opened.seal, opened.spec.paths))
    ahead_s = opened.store.clock_ahead_s()
    rented = {
        str(rental.machine): rental.created_unix + ahead_s
        for rental in opened.rentals.open()
        if rental.machine is not None
    }
    if and_a_new_one:
        of = machine or (next(iter(rented)) if len(rented) == 1 else "")
        taken.append(_a_new_one(taken, of, time.time() + ahead_s))
    verdicts = judge(taken, retention, pinned(opened.store, opened.spec.name), saves, rented)
    if not and_a_new_one or all(verdict.kept for verdict in verdicts):
        return verdicts
    succession = Succession(opened.store, opened.spec.name, opened.seal)
    return [
        verdict
        if verdict.kept
        or (stays := succession.why_stays(verdict.snapshot)) is None
        or stays.missed_in is None
        else Judged(verdict.snapshot, [stays.why])
        for verdict in verdicts
    ]


def _a_new_one(taken: Sequence[Taken], machine: str, now_unix: float) -> Taken:
    of_machine = [entry for entry in taken if machine and entry.machine == machine]
    newest = max((entry.snapshot for entry in taken), default=None)
    snapshot = new_snapshot_id(datetime.now(timezone.utc), newest)
    agent, lineage = "a new machine", None
    if of_machine:
        last = [entry for entry in taken if entry.agent == of_machine[-1].agent][-1]
        agent, before = last.agent, last.lineage or Lineage.unknown(last.snapshot)
        lineage = Lineage.after(before, snapshot, equal=False)
    return Taken(snapshot, now_unix, True, agent, machine, lineage)


@step("apply retention", says="applying the retention rules")
def apply_retention(
    opened: OpenWorkspace, verified: Verified, verdicts: Sequence[Judged]
) -> tuple[list[Judged], list[SnapshotId]]:
    """Delete what no rule keeps and is superseded; needs the proof that a newer snapshot was
    verified. Returns the verdicts, corrected for snapshots that stay after all, and the deleted
    ones."""
    wanted = [verdict.snapshot for verdict in verdicts if not verdict.kept]
    if not wanted:
        return [*verdicts], []
    succession = Succession.of(opened.store, verified, opened.seal)
    why = f"no rule keeps it since snapshot {verified.snapshot} was verified"
    deleted, held, _ = succession.end(wanted, why)
    for snapshot in deleted:
        tell_of_deletion(opened, snapshot, "retention")
    stays = dict(held)
    left = [
        Judged(verdict.snapshot, [stays[verdict.snapshot]])
        if verdict.snapshot in stays
        else verdict
        for verdict in verdicts
    ]
    return left, deleted


@step("look for the line")
def with_their_lines(opened: OpenWorkspace, snapshots: Sequence[SnapshotId]) -> list[SnapshotId]:
    """The snapshots, and those from which only these go on, except pinned ones."""
    lines = SnapshotLines.of(opened.store, opened.spec.name, opened.seal)
    return sorted({*snapshots, *lines.only_for(snapshots)})


@step("delete snapshot", run_name="delete {snapshot}")
def delete_one(opened: OpenWorkspace, snapshot: SnapshotId, even_newest: SnapshotId | None) -> None:
    """Delete a snapshot's manifest; never a pinned one, and the newest only if ``even_newest``
    names it. A snapshot that is lost, but still named by something, is given up. Snapshots that
    alone hold files which it lacks are pinned first.
    """
    succession = Succession(opened.store, opened.spec.name, opened.seal)
    for holder in succession.named(snapshot):
        runner().log.warning("snapshot %s stays: %s", holder.snapshot, holder.reason)
    try:
        delete_snapshot(
            opened.store, opened.spec.name, snapshot, even_newest=even_newest, named=True
        )
    except SnapshotMissing:
        record_missing(opened.store, opened.spec.name, snapshot, named_by_records(opened))
    tell_of_deletion(opened, snapshot, "asked for")


@step("delete earlier snapshots", retries=ONCE)
def delete_earlier(opened: StoredWorkspace, verified: Verified) -> None:
    """Delete the earlier snapshots of this line whose every file the verified snapshot has, except
    pinned ones. A snapshot of a home holds what a look has selected, so a file that a later one
    lacks was not deleted by its user. A failure is a warning."""
    try:
        succession = Succession.of(opened.store, verified, opened.seal)
        earlier = [one.snapshot for one in succession.lines.going_back(verified.snapshot)]
        held = [one for one in earlier if succession.holds_all(verified.snapshot, one)]
        ended = succession.end(held, f"snapshot {verified.snapshot} has its work")
    except TorporError as error:
        runner().log.warning("earlier snapshots of %s stay: %s", opened.spec.name, error)
    else:
        for snapshot in ended.deleted:
            tell_of_deletion(opened, snapshot, f"snapshot {verified.snapshot} has its work")


@step("pin snapshot")
def pin_one(opened: OpenWorkspace, snapshot: SnapshotId, reason: str) -> None:
    """Pin a snapshot, so that retention keeps it."""
    pin(opened.store, opened.spec.name, snapshot, reason)


@step("unpin snapshot")
def unpin_one(opened: OpenWorkspace, snapshot: SnapshotId) -> None:
    """Unpin a snapshot."""
    unpin(opened.store, opened.spec.name, snapshot)


@step("look at the newest snapshot")
def look_at_newest(opened: OpenWorkspace, most_hours: float) -> SnapshotId:
    """The newest verified snapshot; SnapshotOverdue or SnapshotMissing if it is no recent backup.
    Newer snapshots that are not verified are checked first."""
    newest, faults = newest_that_counts(
        opened.store, opened.spec.name, opened.seal, opened.spec.paths
    )
    where = f"workspace {opened.spec.name} in {opened.store.address}"
    for fault in faults:
        runner().log.warning("a newer snapshot does not count: %s", fault)
    unverified = f". {len(faults)} newer ones do not count, first: {faults[0]}" if faults else ""
    if newest is None:
        raise SnapshotMissing(
            f"{where} has no {'verified snapshot' if faults else 'snapshot at all'}: run backup, "
            f"and check that its schedule is on{unverified}"
        )
    age_hours = (datetime.now(timezone.utc) - made_at(newest)).total_seconds() / 3600
    if age_hours > most_hours:
        raise SnapshotOverdue(
            f"the newest verified snapshot of {where}, {newest}, is {age_hours:.1f} hours old, but "
            f"the limit is {most_hours:g}: check that a worker runs, that backup's schedule is on, "
            f"and why its last run failed{unverified}"
        )
    if age_hours < -_CLOCK_HOURS:
        raise SnapshotOverdue(
            f"the newest verified snapshot of {where}, {newest}, is {-age_hours:.1f} hours in the "
            "future, so its age is unknown: set the clocks of the hosts where flows run"
        )
    return newest


def tell_of_deletion(opened: StoredWorkspace, snapshot: SnapshotId, reason: str) -> None:
    """Send the event that a snapshot was deleted."""
    emit(SnapshotDeleted(workspace=opened.spec.name, snapshot=snapshot, reason=reason))
