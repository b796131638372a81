"""The steps of retention and of deleting as tasks."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime, timezone
from typing import Final

from tasks.events import SnapshotDeleted, emit
from tasks.step import step
from tasks.workspace import OpenWorkspace
from torpor.control.safety import Verified
from torpor.control.store.snapshots import newest_snapshot, snapshot_ids
from torpor.control.upkeep.deletion import delete_snapshot, expire
from torpor.control.upkeep.pins import pin, pinned, unpin
from torpor.control.upkeep.reports import FreshnessReport
from torpor.control.upkeep.retention import Retention, Verdict, judge, made_at
from torpor.shared.errors import SnapshotMissing, SnapshotOverdue
from torpor.shared.values import SnapshotId, new_snapshot_id

_CLOCK_HOURS: Final = 1.0
"""A snapshot may seem to come from the future by so much; clocks of two control sides differ."""


@step("judge snapshots")
def judge_snapshots(
    opened: OpenWorkspace, retention: Retention, and_a_new_one: bool
) -> list[Verdict]:
    """Which snapshots would stay and why; with ``and_a_new_one``, as if one were taken now."""
    taken = snapshot_ids(opened.store, opened.spec.name)
    if and_a_new_one:
        taken = [*taken, new_snapshot_id(datetime.now(timezone.utc), max(taken, default=None))]
    return judge(taken, retention, pinned(opened.store, opened.spec.name))


@step("apply retention")
def apply_retention(
    opened: OpenWorkspace, verified: Verified, verdicts: Sequence[Verdict]
) -> list[SnapshotId]:
    """Delete what no rule keeps; the proof of a newer snapshot comes first."""
    deleted = expire(opened.store, verified, verdicts)
    for snapshot in deleted:
        _tell(opened, snapshot, "retention")
    return deleted


@step("delete snapshot", run_name="delete {snapshot}")
def delete_one(opened: OpenWorkspace, snapshot: SnapshotId, even_newest: SnapshotId | None) -> None:
    """Delete a snapshot's manifest; a pinned one never, the newest only when it is named."""
    delete_snapshot(opened.store, opened.spec.name, snapshot, even_newest=even_newest)
    _tell(opened, snapshot, "asked for")


@step("pin snapshot")
def pin_one(opened: OpenWorkspace, snapshot: SnapshotId, reason: str) -> None:
    """Keep a snapshot whatever retention says."""
    pin(opened.store, opened.spec.name, snapshot, reason)


@step("unpin snapshot")
def unpin_one(opened: OpenWorkspace, snapshot: SnapshotId) -> None:
    """Let a snapshot go the way of the others."""
    unpin(opened.store, opened.spec.name, snapshot)


@step("look at the newest snapshot")
def look_at_newest(opened: OpenWorkspace, most_hours: float) -> FreshnessReport:
    """How old the newest snapshot is; SnapshotOverdue or SnapshotMissing when it is no backup."""
    newest = newest_snapshot(opened.store, opened.spec.name)
    where = f"workspace {opened.spec.name} in {opened.store.address}"
    if newest is None:
        raise SnapshotMissing(
            f"{where} has no snapshot at all: run backup, and see that its schedule is on"
        )
    age_hours = (datetime.now(timezone.utc) - made_at(newest)).total_seconds() / 3600
    if age_hours > most_hours:
        raise SnapshotOverdue(
            f"the newest snapshot of {where}, {newest}, is {age_hours:.1f} hours old and should be "
            f"at most {most_hours:g}: see that a worker runs, that backup's schedule is on, and "
            "why its last run failed"
        )
    if age_hours < -_CLOCK_HOURS:
        raise SnapshotOverdue(
            f"the newest snapshot of {where}, {newest}, is {-age_hours:.1f} hours in the future: "
            "its age cannot be told; set the clocks of the hosts where flows run"
        )
    return FreshnessReport(opened.spec.name, newest, max(0.0, age_hours), most_hours)


def _tell(opened: OpenWorkspace, snapshot: SnapshotId, reason: str) -> None:
    emit(SnapshotDeleted(workspace=opened.spec.name, snapshot=snapshot, reason=reason))
