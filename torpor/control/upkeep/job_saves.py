"""Which saves of a job are superfluous, and their deletion.

Rules 11 and 13 of docs/contributing/safety.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from torpor.control.safety import Verified
from torpor.control.store.seam import ObjectStore
from torpor.control.store.snapshots import open_manifest, snapshot_times
from torpor.control.upkeep.deletion import expire
from torpor.control.upkeep.last_holders import Keepers
from torpor.control.upkeep.pins import pinned
from torpor.control.upkeep.retention import Judged
from torpor.shared.errors import SnapshotError, SnapshotMissing
from torpor.shared.format.keys import Seal
from torpor.shared.format.lineage import Work, lineage_of
from torpor.shared.format.names import manifest_key
from torpor.shared.values import SnapshotId


class Thinned(NamedTuple):
    """``left``: the saves that the job may still delete later."""

    deleted: list[SnapshotId]
    left: list[SnapshotId]


def delete_superfluous(
    store: ObjectStore, saves: Sequence[SnapshotId], verified: Verified, keep: int, seal: Seal
) -> Thinned:
    """Delete those of the job's ``saves`` that are older than the ``verified`` one, by their names
    and by the store's clock: a machine's own save may have a name from before it was made. The
    newest ``keep`` stay, with the verified one. One that is pinned stays, and is the job's no more;
    one with work that the verified one lacks stays too, and so does the last one with files that
    nobody has deleted. SnapshotMissing, and nothing is deleted, if the verified one is gone."""
    times = snapshot_times(store, verified.workspace)
    made = times.get(verified.snapshot, 0.0)
    has = Work([lineage_of(verified.manifest)]).names
    there = [save for save in saves if save in times]
    old = [save for save in there if save < verified.snapshot and times[save] < made and has(save)]
    pins = pinned(store, verified.workspace)
    unpinned = sorted((save for save in old if save not in pins), key=times.__getitem__)
    keepers = Keepers(store, seal, verified.manifest)
    goes = [
        save
        for save in unpinned[: max(0, len(unpinned) - (keep - 1))][::-1]
        if _holds_nothing_alone(store, verified, seal, keepers, save)
    ]
    deleted = expire(store, verified, [Judged(save, []) for save in goes])
    gone = {*goes, *pins}.intersection(old)
    hidden = {  # the listing lacks them, and may lack what is there
        save
        for save in saves
        if save not in times and store.head(manifest_key(verified.workspace, save)) is not None
    }
    return Thinned(
        deleted, [save for save in saves if save in hidden or (save in times and save not in gone)]
    )


def _holds_nothing_alone(
    store: ObjectStore, verified: Verified, seal: Seal, keepers: Keepers, save: SnapshotId
) -> bool:
    try:
        manifest, _ = open_manifest(store, verified.workspace, save, seal)
    except SnapshotMissing:
        return True  # deleted meanwhile
    except SnapshotError:
        return False  # what it holds is not known
    return keepers.missed_with(manifest) is None
