"""Autosaves: which of them are superfluous, and their deletion.

Rules 11 and 13 of docs/contributing/safety.md.
"""

from __future__ import annotations

from collections.abc import Iterator, Set
from contextlib import suppress
from typing import Final, NamedTuple

from torpor.control.safety import Verified, check_whole
from torpor.control.store.receipts import agent_of, is_autosave, verified_snapshots
from torpor.control.store.seam import ObjectStore
from torpor.control.store.snapshots import find_snapshot, open_manifest, snapshot_times
from torpor.control.upkeep.deletion import delete_snapshot
from torpor.shared.errors import SnapshotError, SnapshotKept, SnapshotMissing
from torpor.shared.format.keys import Seal
from torpor.shared.format.lineage import lineage_of
from torpor.shared.format.manifest import Manifest
from torpor.shared.values import SnapshotId, WorkspaceName

KEPT: Final = 3
"""Each machine keeps so many: a wake uses an older one where the newest is not whole."""


class _Autosave(NamedTuple):
    snapshot: SnapshotId
    agent: str
    names: Set[SnapshotId]


def delete_superseded(store: ObjectStore, verified: Verified, seal: Seal) -> list[SnapshotId]:
    """Delete the autosaves whose work the ``verified`` snapshot has and that appeared before it,
    by the store's clock. Returns what was deleted."""
    times = snapshot_times(store, verified.workspace)
    made, names = times.get(verified.snapshot, 0.0), _names(verified.manifest)
    named = [snapshot for snapshot in times if snapshot in names and times[snapshot] < made]
    return _delete(store, verified.workspace, _autosaves(store, verified.workspace, seal, named))


def thin(store: ObjectStore, workspace: WorkspaceName, seal: Seal) -> list[SnapshotId]:
    """Delete the autosaves of each machine whose work its newest one has, but for the newest KEPT.
    Where the newest is not whole, all stay. Returns what was deleted."""
    times = snapshot_times(store, workspace)
    of: dict[str, list[_Autosave]] = {}
    for save in _autosaves(store, workspace, seal, sorted(times, key=times.__getitem__)):
        of.setdefault(save.agent, []).append(save)
    deleted = []
    for saves in of.values():
        newest = saves[-1]
        if len(saves) > KEPT and _is_whole(store, workspace, seal, newest.snapshot):
            old = [save for save in saves[:-KEPT] if save.snapshot in newest.names]
            deleted += _delete(store, workspace, iter(old))
    return deleted


def _autosaves(
    store: ObjectStore, workspace: WorkspaceName, seal: Seal, among: list[SnapshotId]
) -> Iterator[_Autosave]:
    """Those of the snapshots that are autosaves. Reads the manifest of each that may be one: a
    machine's word alone makes no user's snapshot one."""
    receipts = verified_snapshots(store, workspace)
    others = {snapshot for snapshot, receipt in receipts if not receipt.autosave}
    for snapshot in among:
        if snapshot in others:
            continue
        with suppress(SnapshotError):  # it is not known to be one
            manifest, _ = open_manifest(store, workspace, snapshot, seal)
            if is_autosave(manifest):
                yield _Autosave(snapshot, agent_of(manifest), _names(manifest))


def _names(manifest: Manifest) -> Set[SnapshotId]:
    """What a snapshot goes on from, each by its name: a machine writes that, and could say in one
    word that it has the work of all that is older, also another machine's."""
    line = lineage_of(manifest)
    return {*line.ancestors, *line.saves}


def _is_whole(
    store: ObjectStore, workspace: WorkspaceName, seal: Seal, snapshot: SnapshotId
) -> bool:
    try:
        check_whole(store, find_snapshot(store, workspace, snapshot), seal)
    except SnapshotError:
        return False
    return True


def _delete(
    store: ObjectStore, workspace: WorkspaceName, saves: Iterator[_Autosave]
) -> list[SnapshotId]:
    """Delete them, but for what is pinned, or the newest of all."""
    deleted = []
    for save in saves:
        with suppress(SnapshotKept, SnapshotMissing):
            delete_snapshot(store, workspace, save.snapshot, why="a newer save has its work")
            deleted.append(save.snapshot)
    return deleted
