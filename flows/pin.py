"""Pin a snapshot, so that nobody deletes it."""

from __future__ import annotations

from blocks import Workspace
from tasks.flow import flow
from tasks.opening import open_workspace
from tasks.retention import pin_one
from torpor.control.upkeep.reports import Table, pinning
from torpor.shared.values import snapshot_id


@flow("pin")
def pin(workspace: Workspace | str, snapshot: str, reason: str) -> Table:
    """Pin a snapshot: neither retention nor a person can delete it until you unpin it.

    Args:
        workspace: The Workspace block that the snapshot is of, or its name.
        snapshot: The snapshot's id.
        reason: Why to keep it, for later readers.
    """
    opened = open_workspace(workspace)
    wanted = snapshot_id(snapshot.strip())
    pin_one(opened, wanted, reason)
    return pinning(opened.spec.name, wanted, f"pinned: {reason}")
