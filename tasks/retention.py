"""The steps of retention and of deleting as tasks."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime, timezone
from typing import Final

from tasks.events import SnapshotDeleted, emit
from tasks.step import step
from tasks.workspace import OpenWorkspace, StoredWorkspace
from torpor.control.safety import Verified
from torpor.control.store.snapshots import newest_snapshot, snapshot_ids
from torpor.control.upkeep.deletion import delete_snapshot, expire
from torpor.control.upkeep.pins import pin, pinned, unpin
from torpor.control.upkeep.reports import FreshnessReport
from torpor.control.upkeep.retention import Retention, Verdict, judge
from torpor.shared.errors import SnapshotMissing, SnapshotOverdue
from torpor.shared.values import SnapshotId, made_at, new_snapshot_id

_CLOCK_HOURS: Final = 1.0
"""A snapshot may seem to come from the future by so much; clocks of two control sides differ."""


@step("judge snapshots")
def judge_snapshots(
    opened: OpenWorkspace, retention: Retention, and_a_new_one: bool
) -> list[Verdict]:
    """The verdict on each snapshot; with ``and_a_new_one``, as if a new one were taken now. An open
    job deletes its saves itself, so no rule counts on them."""
    saves = {save: job.id for job in opened.jobs.open() for save in job.kept_saves}
    taken = snapshot_ids(opened.store, opened.spec.name)
    if and_a_new_one:
        taken = [*taken, new_snapshot_id(datetime.now(timezone.utc), max(taken, default=None))]
    return judge(taken, retention, pinned(opened.store, opened.spec.name), saves)


@step("apply retention")
def apply_retention(
    opened: OpenWorkspace, verified: Verified, verdicts: Sequence[Verdict]
) -> list[SnapshotId]:
    """Delete what no rule keeps; this needs the proof of a newer snapshot."""
    deleted = expire(opened.store, verified, verdicts)
    for snapshot in deleted:
        tell_of_deletion(opened, snapshot, "retention")
    return deleted


@step("delete snapshot", run_name="delete {snapshot}")
def delete_one(opened: OpenWorkspace, snapshot: SnapshotId, even_newest: SnapshotId | None) -> None:
    """Delete a snapshot's manifest; never a pinned one, and the newest only if ``even_newest``
    names it.
    """
    delete_snapshot(opened.store, opened.spec.name, snapshot, even_newest=even_newest)
    tell_of_deletion(opened, snapshot, "asked for")


@step("pin snapshot")
def pin_one(opened: OpenWorkspace, snapshot: SnapshotId, reason: str) -> None:
    """Pin a snapshot, so that retention keeps it."""
    pin(opened.store, opened.spec.name, snapshot, reason)


@step("unpin snapshot")
def unpin_one(opened: OpenWorkspace, snapshot: SnapshotId) -> None:
    """Unpin a snapshot."""
    unpin(opened.store, opened.spec.name, snapshot)


@step("look at the newest snapshot")
def look_at_newest(opened: OpenWorkspace, most_hours: float) -> FreshnessReport:
    """The age of the newest snapshot; SnapshotOverdue or SnapshotMissing if it is no recent
    backup.
    """
    newest = newest_snapshot(opened.store, opened.spec.name)
    where = f"workspace {opened.spec.name} in {opened.store.address}"
    if newest is None:
        raise SnapshotMissing(
            f"{where} has no snapshot at all: run backup, and check that its schedule is on"
        )
    age_hours = (datetime.now(timezone.utc) - made_at(newest)).total_seconds() / 3600
    if age_hours > most_hours:
        raise SnapshotOverdue(
            f"the newest snapshot of {where}, {newest}, is {age_hours:.1f} hours old, but the "
            f"limit is {most_hours:g}: check that a worker runs, that backup's schedule is on, "
            "and why its last run failed"
        )
    if age_hours < -_CLOCK_HOURS:
        raise SnapshotOverdue(
            f"the newest snapshot of {where}, {newest}, is {-age_hours:.1f} hours in the future, "
            "so its age is unknown: set the clocks of the hosts where flows run"
        )
    return FreshnessReport(opened.spec.name, newest, max(0.0, age_hours), most_hours)


def tell_of_deletion(opened: StoredWorkspace, snapshot: SnapshotId, reason: str) -> None:
    """Send the event of a snapshot that is deleted."""
    emit(SnapshotDeleted(workspace=opened.spec.name, snapshot=snapshot, reason=reason))
