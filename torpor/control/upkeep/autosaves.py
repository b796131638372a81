"""Autosaves: which of them a newer snapshot makes superfluous. superseded.py decides whether these
may be deleted. Rules 11 and 13 of docs/contributing/safety.md."""

from __future__ import annotations

from typing import Final

from torpor.control.safety import Verified
from torpor.control.store.object_store import ObjectStore
from torpor.control.upkeep.lineage import SnapshotLines
from torpor.control.upkeep.superseded import Ended, Succession
from torpor.shared.format.keys import Seal
from torpor.shared.values import SnapshotId, WorkspaceName

KEPT: Final = 3
"""Autosaves that each machine keeps: a wake uses an older one where the newest is not whole."""


def delete_superseded(store: ObjectStore, verified: Verified, seal: Seal) -> Ended:
    """Delete the autosaves that the ``verified`` snapshot goes on from, and end the pins of torpor
    that it makes needless."""
    succession = Succession.of(store, verified, seal)
    succession.release(verified.snapshot)
    wanted = _autosaves(succession.lines, verified.snapshot)
    return succession.end(wanted, f"snapshot {verified.snapshot} has its work")


def thin(store: ObjectStore, workspace: WorkspaceName, seal: Seal) -> list[SnapshotId]:
    """Delete the autosaves whose work a newer one has, except the newest KEPT of each line. If the
    newest of a line is not whole, the whole line stays. Returns what was deleted."""
    succession = Succession(store, workspace, seal)
    wanted: set[SnapshotId] = set()
    for newest in succession.lines.newest_autosaves():
        if len(line := [newest, *_autosaves(succession.lines, newest)]) > KEPT:
            wanted.update(line[KEPT:] if succession.prove(newest) else ())
    return succession.end(wanted, "a newer save has its work").deleted


def _autosaves(lines: SnapshotLines, newest: SnapshotId) -> list[SnapshotId]:
    """The autosaves that a snapshot goes on from, newest first."""
    return [one.snapshot for one in lines.going_back(newest) if one.autosave]
