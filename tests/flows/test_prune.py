"""The flow that frees space, where the store has lost a snapshot."""

from __future__ import annotations

import itertools

import pytest

from flows import delete_snapshots, prune
from tests.fixtures.errors import raises
from tests.fixtures.lab import DEMO, Lab
from tests.fixtures.plain_flows import hibernate_plainly, run_plainly
from torpor.control.jobs.records import Job
from torpor.control.store.deletion_records import Deletions
from torpor.control.store.receipts import withdraw_receipt
from torpor.shared.errors import SnapshotMissing
from torpor.shared.format.names import manifest_key
from torpor.shared.values import SnapshotId

_numbers = itertools.count(1)


def _lose(lab: Lab, snapshot: SnapshotId) -> None:
    """As a store that has lost its newest objects: the manifest, and the receipt too."""
    lab.store.delete([manifest_key(DEMO, snapshot)])
    withdraw_receipt(lab.store, DEMO, snapshot)


def _job(lab: Lab, newest: SnapshotId) -> Job:
    """An open job that goes on from that snapshot."""
    job = Job(
        id=f"3f2a9c81d{next(_numbers):03}", workspace=DEMO, block=DEMO, command=["true"],
        created_unix=1.0, newest=newest,
    )  # fmt: skip
    return lab.opened.jobs.take(job, "a run")


@pytest.mark.rule(13)
@pytest.mark.parametrize("by", ["job", "machine"])
def test_a_lost_snapshot_stops_a_prune_until_its_user_gives_it_up(by: str, lab: Lab) -> None:
    """A job goes on from it, or a machine was destroyed because it was stored."""
    place = lab.workspace(lab.rent().id)
    place.mkdir()
    (place / "notes").write_text("0")
    hibernate_plainly(lab.opened, destroy=False)
    (place / "notes").write_text("1")
    lost = hibernate_plainly(lab.opened, destroy=by == "machine").snapshot
    job = _job(lab, lost) if by == "job" else None
    _lose(lab, lost)
    for dry_run in (True, False):
        with raises(SnapshotMissing, f"{lost} .{by} .* names it", "was deleted", "give it up"):
            run_plainly(lab.opened, prune, dry_run=dry_run)
    run_plainly(lab.opened, delete_snapshots, [lost])
    assert run_plainly(lab.opened, prune, dry_run=False).snapshots == 1
    assert Deletions(lab.store, DEMO).of(lost) is not None
    if job is not None:
        lab.opened.jobs.end(job)


@pytest.mark.rule(13)
def test_what_ended_jobs_and_earlier_machines_name_stops_no_prune(lab: Lab) -> None:
    """Retention of versions before deletion records deleted such snapshots."""
    place = lab.workspace(lab.rent().id)
    place.mkdir()
    (place / "notes").write_text("0")
    of_job = hibernate_plainly(lab.opened, destroy=False).snapshot
    lab.opened.jobs.end(_job(lab, of_job))
    of_machine = hibernate_plainly(lab.opened).snapshot
    place = lab.workspace(lab.rent().id)
    place.mkdir()
    (place / "notes").write_text("1")
    hibernate_plainly(lab.opened)
    for snapshot in (of_job, of_machine):
        _lose(lab, snapshot)
    assert run_plainly(lab.opened, prune, dry_run=False).snapshots == 1
