"""Which saves of a job are superfluous, and their deletion.

Rules 11 and 13 of docs/contributing/safety.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from torpor.control.safety import Verified
from torpor.control.store.object_store import ObjectStore
from torpor.control.upkeep.pins import pin_times
from torpor.control.upkeep.superseded import Succession
from torpor.shared.format.keys import Seal
from torpor.shared.format.names import manifest_key
from torpor.shared.values import SnapshotId


class Thinned(NamedTuple):
    """``left``: the saves that the job may still delete later."""

    deleted: list[SnapshotId]
    left: list[SnapshotId]


def delete_superfluous(
    store: ObjectStore, saves: Sequence[SnapshotId], verified: Verified, keep: int, seal: Seal
) -> Thinned:
    """Delete those of the job's ``saves`` that the ``verified`` one goes on from and that are
    superseded (superseded.py). The newest ``keep`` stay, with the verified one. A save that a user
    has pinned stays, and is not the job's any more. The autosaves that the machine made while
    nobody drove the job are deleted in the same way. SnapshotMissing, and nothing is deleted, if
    the verified one is gone."""
    succession = Succession.of(store, verified, seal)
    succession.hold(verified.snapshot)
    lines, workspace = succession.lines, verified.workspace
    own = {one.snapshot for one in lines.going_back(verified.snapshot) if one.autosave}
    old = [
        save
        for save in lines.oldest_first(set(saves) - own)
        if save != verified.snapshot and lines.goes_on_from(verified.snapshot, save)
    ]
    pinned = pin_times(store, workspace).keys()
    unpinned = [save for save in old if save not in pinned]
    wanted = unpinned[: max(0, len(unpinned) - (keep - 1))]
    why = f"snapshot {verified.snapshot} of its job is verified"
    deleted = succession.end({*wanted, *own} - pinned, why).deleted
    gone = {*deleted, *pinned & {*old, *own}}
    return Thinned(
        deleted,
        [
            save
            for save in saves
            if save not in gone
            # The listing may lack an existing snapshot.
            and (lines.exists(save) or store.head(manifest_key(workspace, save)) is not None)
        ],
    )
