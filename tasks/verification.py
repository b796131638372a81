"""The steps of a verify as tasks."""

from __future__ import annotations

from collections.abc import Sequence

from prefect import task

from tasks.place import Place
from tasks.progress import Progress
from tasks.retrying import STEP
from torpor.control.remote.examination import Examination, ExaminedPack
from torpor.control.store.snapshots import find_snapshot, newest_snapshot
from torpor.control.upkeep.verification import SnapshotVerdict, Survey, survey, to_verify
from torpor.shared.values import SnapshotId, snapshot_id

NEWEST = "newest"
ALL = "all"


@task(name="pick snapshots", **STEP)
def pick_snapshots(place: Place, wanted: str) -> list[SnapshotId]:
    """One snapshot by its id, the newest, or all there should be, newest first."""
    if wanted == ALL:
        return to_verify(place.store, place.spec.name)
    if wanted not in ("", NEWEST):
        return [snapshot_id(wanted)]
    newest = newest_snapshot(place.store, place.spec.name)
    if newest is None:  # says what to do
        return [find_snapshot(place.store, place.spec.name, None).snapshot]
    return [newest]


@task(name="look at objects", **STEP)
def look_at_objects(place: Place, wanted: Sequence[SnapshotId]) -> Survey:
    """The quick look: manifests read, every pack compared with the store's listing."""
    return survey(place.store, place.spec.name, place.seal, wanted)


@task(name="examine packs", task_run_name="examine packs {part}", **STEP)
def examine_packs(examination: Examination, part: int, progress: Progress) -> list[ExaminedPack]:
    """Have the machine read some packs and check every hash; a retry reads none of them twice."""
    return examination.run(lambda read: progress.event(part, {"bytes": read}))


@task(name="judge what was found", **STEP)
def judge_verified(found: Survey) -> list[SnapshotVerdict]:
    """Which snapshots and files the faults concern."""
    return found.verdicts()
