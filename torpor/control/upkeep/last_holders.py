"""The saves that alone hold what a workspace had, and that newer snapshots miss: they stay until
their user deletes them by name. Rule 13 of docs/contributing/safety.md."""

from __future__ import annotations

from collections.abc import Collection, Sequence, Set
from contextlib import suppress
from typing import Final

from torpor.control.safety import check_whole
from torpor.control.store.seam import ObjectStore
from torpor.control.store.snapshots import find_snapshot, open_manifest, snapshot_ids
from torpor.control.upkeep.retention import Judged, Taken
from torpor.shared.errors import SnapshotError
from torpor.shared.format.keys import Seal
from torpor.shared.format.lineage import Lineage, Work, chain, lineage_of
from torpor.shared.format.manifest import Manifest
from torpor.shared.format.missed import Missed, Missing, Tree, missed
from torpor.shared.values import SnapshotId, WorkspaceName

MOST_COMPARED: Final = 64
"""Pairs of saves that stay, each of which reads a manifest again. A save beyond that stays."""
MOST_READ: Final = 16
"""Ancestors in which a wake looks for what a machine missed."""


def holders_of(
    store: ObjectStore, seal: Seal, newest: Manifest, lost: Collection[Missing]
) -> dict[Missing, SnapshotId]:
    """For each of the places that the machine of ``newest`` missed, the nearest snapshot that it
    goes on from, that exists and that holds most of what ``newest`` lacks there. None of a place
    where no such one is among the nearest MOST_READ."""
    there = set(snapshot_ids(store, newest.workspace))
    before = [name for name in lineage_of(newest).ancestors if name in there]
    now, found = Tree(newest), dict[Missing, SnapshotId]()
    for snapshot in before[:MOST_READ]:
        with suppress(SnapshotError):  # one that cannot be read brings nothing
            tree = Tree(open_manifest(store, newest.workspace, snapshot, seal)[0])
            for place in lost:
                root = tree.number(now.roots[place.root])
                gone = [] if root is None else tree.lacking(root, now)
                if place not in found and 2 * len(tree.below(gone, [place.path])) > place.files:
                    found[place] = snapshot
        if len(found) == len(lost):
            break
    return found


class Keepers:
    """The snapshots of a workspace that stay: at first the ``newest`` alone, which is whole. Older
    saves are compared with them one after the other, newest first."""

    def __init__(self, store: ObjectStore, seal: Seal, newest: Manifest) -> None:
        self._store = store
        self._seal = seal
        self._newest = newest
        self._compared = 0
        self._tree: Tree | None = None  # made where there is something to compare
        self._stay: dict[SnapshotId, Set[SnapshotId]] = {}  # what each goes on from
        self._read: tuple[SnapshotId, Tree] | None = None  # of these, one is held in memory

    def missed_with(self, save: Manifest) -> Missed | None:
        """What would be lost with a save that the newest snapshot goes on from; it stays then. None
        where a snapshot that stays has all of it, but for what its user deleted."""
        if self._tree is None:
            self._tree = Tree(self._newest)
        before = Tree(save)
        lost = missed(before, self._tree)
        if lost is None:
            return None
        for snapshot, names in self._stay.items():
            if save.snapshot in names and self._compared < MOST_COMPARED:
                self._compared += 1
                with suppress(SnapshotError):  # one that is not whole stands for no other
                    if missed(before, self._tree_of(snapshot)) is None:
                        return None
        self._stay[save.snapshot] = lineage_of(save).names
        return lost

    def _tree_of(self, snapshot: SnapshotId) -> Tree:
        if self._read is None or self._read[0] != snapshot:
            found = find_snapshot(self._store, self._newest.workspace, snapshot)
            self._read = (snapshot, Tree(check_whole(self._store, found, self._seal)))
        return self._read[1]


def hold_back(
    store: ObjectStore,
    workspace: WorkspaceName,
    seal: Seal,
    taken: Sequence[Taken],
    verdicts: Sequence[Judged],
) -> list[Judged]:
    """The verdicts, newest first; but what no rule keeps stays where it alone holds what is missed
    in the oldest snapshot that stays and has its work."""
    lines = {one.snapshot: one.lineage for one in taken if one.verified and one.lineage}
    stay = [one.snapshot for one in verdicts if one.kept and one.snapshot in lines][::-1]
    works = {snapshot: Work(chain(lines[snapshot], lines.get)) for snapshot in stay}
    keepers: dict[SnapshotId, Keepers] = {}

    def why_kept(snapshot: SnapshotId, line: Lineage) -> str:
        heir = next((one for one in stay if works[one].has(line)), None)
        if heir is None:
            return ""
        try:
            if heir not in keepers:
                keepers[heir] = Keepers(store, seal, open_manifest(store, workspace, heir, seal)[0])
        except SnapshotError:
            return f"what snapshot {heir} lacks of it is not known"
        with suppress(SnapshotError):  # what cannot be read holds nothing
            lost = keepers[heir].missed_with(open_manifest(store, workspace, snapshot, seal)[0])
            return f"it alone holds {lost.files:,} files that newer ones miss" if lost else ""
        return ""

    found = []
    for verdict in verdicts:
        line = None if verdict.kept else lines.get(verdict.snapshot)
        why = why_kept(verdict.snapshot, line) if line else ""
        found.append(Judged(verdict.snapshot, [why]) if why else verdict)
    return found
