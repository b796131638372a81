"""Diff: what differs between two snapshots of a workspace."""

from __future__ import annotations

from blocks import Workspace
from flows.procedures.listing import PREVIOUS, list_differences
from tasks.flow import flow
from tasks.restore import NEWEST
from torpor.control.upkeep.reports import Table


@flow("diff")
def diff(workspace: Workspace | str, before: str = PREVIOUS, after: str = NEWEST) -> Table:
    """Show what differs between two snapshots of a workspace: added, removed, changed, metadata.

    Args:
        workspace: The Workspace block whose snapshots are compared, or its name.
        before: The earlier snapshot's id, or previous for the one right before the later.
        after: The later snapshot's id, or newest.

    Returns:
        A table with one row for each path that differs.

    Raises:
        SnapshotMissing: There is no such snapshot, or none before it.
        WrongKey: A snapshot was sealed with another key than the store block has.

    Example:
        What the newest snapshot changed:
        ```python
        from flows import diff

        print(diff("mywork").rows())
        ```
    """
    found = list_differences(workspace, before, after)
    return Table.of(found.workspace, found.title(), found.changes)
