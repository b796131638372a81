"""The steps of a sync as tasks."""

from __future__ import annotations

from tasks.progress import Progress
from tasks.retries import WHILE_BUSY
from tasks.step import step
from torpor.control.remote.sync import RemoteSync
from torpor.shared.errors import StillChanging
from torpor.shared.wire.restore import Checked, RestorePart

begin_sync = step(
    "begin sync", retries=WHILE_BUSY, phase="look", says="comparing the machine with the snapshot"
)(RemoteSync.begin)
stage = step("stage", phase="stage", says="copying what is on the machine already")(
    RemoteSync.stage
)


@step("sync part", run_name="sync part {plan.part}")
def sync_part(sync: RemoteSync, plan: RestorePart, progress: Progress) -> None:
    """Fetch and check one part; data that is on the machine already is not fetched again."""
    sync.sync_part(plan, lambda event: progress.event(plan.part, event))


finish_sync = step("finish sync", phase="change", says="changing the files")(RemoteSync.finish)


@step("check sync", phase="check", says="checking what was changed")
def check_sync(sync: RemoteSync, full: bool) -> Checked:
    """Compare the machine's disk with the snapshot; StillChanging names the differences."""
    checked = sync.check(full=full)
    if checked.difference_count:
        raise StillChanging(
            f"after the sync, {checked.difference_count} names differ from snapshot "
            f"{sync.wanted.snapshot}: {'; '.join(checked.differences[:5])}. Sync again; changes "
            "made on the machine meanwhile are kept"
        )
    return checked
