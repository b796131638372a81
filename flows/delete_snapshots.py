"""Delete snapshots of a workspace for good."""

from __future__ import annotations

from blocks import Workspace
from tasks.flow import flow
from tasks.ownership import check_owner
from tasks.retention import delete_one, with_their_lines
from tasks.workspace_blocks import open_stored
from torpor.control.upkeep.deletion import check_not_kept
from torpor.control.upkeep.reports import Table
from torpor.shared.errors import InvalidInput
from torpor.shared.values import snapshot_id


@flow("delete-snapshots")
def delete_snapshots(
    workspace: Workspace | str,
    snapshots: list[str],
    even_newest: str = "",
    whole_line: bool = False,
) -> Table:
    """Delete snapshots of a workspace for good. Prune frees what only they refer to.

    A snapshot that you have pinned is never deleted. One that torpor pinned is: its pin says which
    files go with it. It works while the workspace sleeps, too, and rents nothing.

    Args:
        workspace: The Workspace block whose snapshots are deleted, or its name; home--NAME for what
            was stored of a home beside it.
        snapshots: The ids of the snapshots to delete.
        even_newest: The id of the newest snapshot, once more, to delete that one too. A wake
            restores the newest.
        whole_line: Delete also what only these snapshots go on from: their line, back to where
            another one began or to a pinned snapshot.

    Returns:
        A table with one row for each snapshot that was deleted.

    Raises:
        SnapshotKept: One is pinned, or is the newest and not named in `even_newest`. None was
            deleted.
        SnapshotMissing: There is no snapshot of that id. None was deleted.
        InvalidInput: No snapshot was named, or an id is none.
        Recovered: Another control side has recovered the workspace, and owns it.

    Example:
        Delete one snapshot, and mark what only it needed. The same prune, a day later, frees that;
        of packs that were stored in the last three days, a prune in three days marks them:
        ```python
        from flows import delete_snapshots, prune

        delete_snapshots("mywork", ["20261119T230000Z-0a1b2c3d"])
        prune("mywork", dry_run=False)
        ```
    """
    ids = sorted({snapshot_id(text.strip()) for text in snapshots})
    if not ids:
        raise InvalidInput("no snapshot was named: write the ids of the snapshots to delete")
    newest = snapshot_id(even_newest.strip()) if even_newest.strip() else None
    opened = open_stored(workspace)
    check_owner(opened)
    if whole_line:
        ids = with_their_lines(opened, ids)
    # Check all of them before the first is deleted.
    check_not_kept(opened.store, opened.spec.name, ids, newest, named=True)
    for snapshot in ids:  # newest last: otherwise an earlier snapshot would become the newest
        delete_one(opened, snapshot, newest)
    return Table(
        opened.spec.name,
        f"{len(ids)} snapshots of workspace {opened.spec.name} deleted",
        len(ids),
        [{"snapshot": snapshot, "now": "deleted"} for snapshot in ids],
    )
