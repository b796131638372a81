"""Unpin a snapshot, so that it may be deleted again."""

from __future__ import annotations

from blocks import Workspace
from tasks.flow import flow
from tasks.opening import open_workspace
from tasks.retention import unpin_one
from torpor.control.upkeep.reports import Table, pinning
from torpor.shared.values import snapshot_id


@flow("unpin")
def unpin(workspace: Workspace | str, snapshot: str) -> Table:
    """Unpin a snapshot, so that retention and people can delete it again. Deletes nothing itself.

    Args:
        workspace: The Workspace block that the snapshot is of, or its name.
        snapshot: The snapshot's id.
    """
    opened = open_workspace(workspace)
    wanted = snapshot_id(snapshot.strip())
    unpin_one(opened, wanted)
    return pinning(opened.spec.name, wanted, "not pinned")
