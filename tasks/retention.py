"""The steps of retention and of deleting as tasks."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime, timezone
from typing import Final

from prefect import task

from tasks.events import SnapshotDeleted, emit
from tasks.place import Place
from tasks.retrying import STEP
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


@task(name="judge snapshots", **STEP)
def judge_snapshots(place: Place, retention: Retention, and_a_new_one: bool) -> list[Verdict]:
    """Which snapshots would stay and why; with ``and_a_new_one``, as if one were taken now."""
    taken = snapshot_ids(place.store, place.spec.name)
    if and_a_new_one:
        taken = [*taken, new_snapshot_id(datetime.now(timezone.utc), max(taken, default=None))]
    return judge(taken, retention, pinned(place.store, place.spec.name))


@task(name="apply retention", **STEP)
def apply_retention(
    place: Place, verified: Verified, verdicts: Sequence[Verdict]
) -> list[SnapshotId]:
    """Delete what no rule keeps; the proof of a newer snapshot comes first."""
    deleted = expire(place.store, verified, verdicts)
    for snapshot in deleted:
        _tell(place, snapshot, "retention")
    return deleted


@task(name="delete snapshot", task_run_name="delete {snapshot}", **STEP)
def delete_one(place: Place, snapshot: SnapshotId, even_newest: SnapshotId | None) -> None:
    """Delete a snapshot's manifest; a pinned one never, the newest only when it is named."""
    delete_snapshot(place.store, place.spec.name, snapshot, even_newest=even_newest)
    _tell(place, snapshot, "asked for")


@task(name="pin snapshot", **STEP)
def pin_one(place: Place, snapshot: SnapshotId, reason: str) -> None:
    """Keep a snapshot whatever retention says."""
    pin(place.store, place.spec.name, snapshot, reason)


@task(name="unpin snapshot", **STEP)
def unpin_one(place: Place, snapshot: SnapshotId) -> None:
    """Let a snapshot go the way of the others."""
    unpin(place.store, place.spec.name, snapshot)


@task(name="look at the newest snapshot", **STEP)
def look_at_newest(place: Place, most_hours: float) -> FreshnessReport:
    """How old the newest snapshot is; SnapshotOverdue or SnapshotMissing when it is no backup."""
    newest = newest_snapshot(place.store, place.spec.name)
    where = f"workspace {place.spec.name} in {place.store.address}"
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
    return FreshnessReport(place.spec.name, newest, max(0.0, age_hours), most_hours)


def _tell(place: Place, snapshot: SnapshotId, reason: str) -> None:
    emit(SnapshotDeleted(workspace=place.spec.name, snapshot=snapshot, reason=reason))
