"""Pin a snapshot, so that nobody deletes it, or remove its pin."""

from __future__ import annotations

from blocks import Workspace
from tasks.flow import flow
from tasks.retention import pin_one, unpin_one
from tasks.workspace_blocks import open_stored
from torpor.control.upkeep.reports import Table, pinning
from torpor.shared.errors import InvalidInput
from torpor.shared.values import snapshot_id


@flow("pin")
def pin(workspace: Workspace | str, snapshot: str, reason: str = "", remove: bool = False) -> Table:
    """Pin a snapshot: neither retention nor a person can delete it until its pin is removed.

    Args:
        workspace: The Workspace block that the snapshot is of, or its name.
        snapshot: The snapshot's id.
        reason: Why to keep it, for later readers. A pin needs one.
        remove: Remove the pin instead. Deletes no snapshot itself.

    Returns:
        A table with the snapshot and whether it is pinned now.

    Raises:
        SnapshotMissing: There is no snapshot of that id.
        SnapshotKept: torpor itself pinned the snapshot; only its deletion by name ends that pin.
        InvalidInput: The reason is missing or too long, or is given with `remove`.

    Example:
        Keep the weights of a paper:
        ```python
        from flows import pin

        pin("mywork", "20261120T234913Z-1f0c9ab2", reason="the weights of the paper")
        ```
    """
    if remove and reason.strip():
        raise InvalidInput(
            f"a pin is removed without a reason, this one was given: {reason!r}. Leave `reason` "
            "empty to remove the pin, or switch `remove` off to pin the snapshot"
        )
    opened = open_stored(workspace)
    wanted = snapshot_id(snapshot.strip())
    if remove:
        unpin_one(opened, wanted)
        return pinning(opened.spec.name, wanted, "not pinned")
    pin_one(opened, wanted, reason)
    return pinning(opened.spec.name, wanted, f"pinned: {reason}")
