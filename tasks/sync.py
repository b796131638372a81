"""The steps of a sync as tasks."""

from __future__ import annotations

from prefect import task

from tasks.progress import Progress
from tasks.retrying import BUSY_TRIES, BUSY_WAIT_S, STEP, retry_if_busy
from torpor.control.remote.restore import Checked, RestoredPart, RestorePart
from torpor.control.remote.sync import Changed, Intent, RemoteSync, SyncPlan
from torpor.shared.errors import StillChanging


@task(
    name="begin sync",
    **(
        STEP
        | {
            "retries": BUSY_TRIES,
            "retry_delay_seconds": BUSY_WAIT_S,
            "retry_condition_fn": retry_if_busy,
        }
    ),
)
def begin_sync(sync: RemoteSync) -> Intent:
    """Look at the machine: what would change, and what would be lost."""
    return sync.begin()


@task(name="stage", **STEP)
def stage(sync: RemoteSync) -> SyncPlan:
    """Make the new files beside the tree, from what is on the machine already."""
    return sync.stage()


@task(name="sync part", task_run_name="sync part {plan.part}", **STEP)
def sync_part(sync: RemoteSync, plan: RestorePart, progress: Progress) -> RestoredPart:
    """Fetch and check one part; what is on the machine already is not fetched again."""
    return sync.sync_part(plan, lambda event: progress.event(plan.part, event))


@task(name="finish sync", **STEP)
def finish_sync(sync: RemoteSync) -> Changed:
    """Check every staged file, then change the tree name by name."""
    return sync.finish()


@task(name="check sync", **STEP)
def check_sync(sync: RemoteSync, full: bool) -> Checked:
    """Compare the machine's disk with the snapshot; StillChanging names what differs."""
    checked = sync.check(full=full)
    if checked.difference_count:
        raise StillChanging(
            f"after the sync, {checked.difference_count} names differ from snapshot "
            f"{sync.wanted.snapshot}: {'; '.join(checked.differences[:5])}. Sync again: what was "
            "changed on the machine meanwhile is kept"
        )
    return checked
