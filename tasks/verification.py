"""The steps of a verify as tasks."""

from __future__ import annotations

from collections.abc import Sequence

from tasks.progress import Progress
from tasks.restore import NEWEST
from tasks.runner import runner
from tasks.step import step
from tasks.workspace import OpenWorkspace
from torpor.control.remote.examination import Examination, ExaminedPack
from torpor.control.safety import verify_snapshot
from torpor.control.store.catalog import Catalog
from torpor.control.store.manifests import find_snapshot, newest_snapshot
from torpor.control.store.receipts import withdraw_receipt
from torpor.control.upkeep.verification import SnapshotVerdict, Verification, quick_look, to_verify
from torpor.shared.errors import SnapshotError
from torpor.shared.values import SnapshotId, snapshot_id
from torpor.shared.wire.request import Event

ALL = "all"


@step("pick snapshots", phase="prepare")
def pick_snapshots(opened: OpenWorkspace, wanted: str) -> list[SnapshotId]:
    """One snapshot by its id, the newest, or all (also missing pinned ones), newest first."""
    if wanted == ALL:
        return to_verify(opened.store, opened.spec.name)
    if wanted not in ("", NEWEST):
        return [snapshot_id(wanted)]
    newest = newest_snapshot(opened.store, opened.spec.name)
    if newest is None:  # raises an error that says what to do
        return [find_snapshot(opened.store, opened.spec.name, None).snapshot]
    return [newest]


@step("look at objects", phase="look", says="comparing manifests with the objects in the store")
def look_at_objects(opened: OpenWorkspace, wanted: Sequence[SnapshotId]) -> Verification:
    """The quick check: read the manifests and compare every pack with the store's listing."""
    spec = opened.spec
    return quick_look(opened.store, spec.name, opened.seal, wanted, spec.restorable)


@step("examine packs", run_name="examine packs {part}")
def examine_packs(examination: Examination, part: int, progress: Progress) -> list[ExaminedPack]:
    """Have the machine read some packs and check every hash; a retry reads only the packs that are
    left.
    """
    return examination.run(lambda read: progress.event(part, Event(read)))


@step("record what was verified", phase="judge")
def record_verified(
    opened: OpenWorkspace, found: Verification, verdicts: Sequence[SnapshotVerdict]
) -> None:
    """Record the result: each verified snapshot counts from now on, and each damaged one no longer.
    A snapshot whose manifest cannot be read is left as it is, because the key may be wrong."""
    known = Catalog(opened.store, opened.spec.name).receipts()
    for one in verdicts:
        if not one.whole and found.root_of(one.snapshot):
            withdraw_receipt(opened.store, opened.spec.name, one.snapshot)
        if not one.whole or one.snapshot in known:
            continue
        if found.unread(one.snapshot):
            runner().log.warning(
                "snapshot %s does not count yet: the store shows no MD5 of its packs; run a full "
                "verify",
                one.snapshot,
            )
            continue
        try:
            stored = find_snapshot(opened.store, opened.spec.name, one.snapshot)
            verify_snapshot(opened.store, stored, opened.seal, found.wrong)
        except SnapshotError as error:
            runner().log.warning("snapshot %s does not count: %s", one.snapshot, error)


judge_verified = step("judge what was found", phase="judge")(Verification.verdicts)
