"""The steps of a sync as tasks."""

from __future__ import annotations

from tasks.progress import Progress
from tasks.retrying import WHILE_BUSY
from tasks.step import step
from torpor.control.remote.sync import RemoteSync
from torpor.shared.errors import StillChanging
from torpor.shared.wire.restore import Checked, RestorePart
from torpor.shared.wire.sync import Changed, Intent, SyncPlan


@step("begin sync", retries=WHILE_BUSY)
def begin_sync(sync: RemoteSync) -> Intent:
    """Inspect the machine: what would change, and what would be lost."""
    return sync.begin()


@step("stage")
def stage(sync: RemoteSync) -> SyncPlan:
    """Make the new files beside the tree, from what is on the machine already."""
    return sync.stage()


@step("sync part", run_name="sync part {plan.part}")
def sync_part(sync: RemoteSync, plan: RestorePart, progress: Progress) -> None:
    """Fetch and check one part; what is already on the machine is not fetched again."""
    sync.sync_part(plan, lambda event: progress.event(plan.part, event))


@step("finish sync")
def finish_sync(sync: RemoteSync) -> Changed:
    """Check every staged file, then change the tree name by name."""
    return sync.finish()


@step("check sync")
def check_sync(sync: RemoteSync, full: bool) -> Checked:
    """Compare the machine's disk with the snapshot; StillChanging names what differs."""
    checked = sync.check(full=full)
    if checked.difference_count:
        raise StillChanging(
            f"after the sync, {checked.difference_count} names differ from snapshot "
            f"{sync.wanted.snapshot}: {'; '.join(checked.differences[:5])}. Sync again; changes "
            "made on the machine meanwhile are kept"
        )
    return checked
