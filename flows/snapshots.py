"""Snapshots: list those of a workspace, or the files of one, or find a file in them.

Listing has no steps to retry: the store's adapter repeats its own requests.
"""

from __future__ import annotations

from blocks import Workspace
from flows.procedures.listing import list_entries, list_kept, list_versions
from tasks.flow import flow
from tasks.workspace_blocks import open_stored, say_of_home
from torpor.control.upkeep.reports import Table


@flow("snapshots")
def snapshots(workspace: Workspace | str, snapshot: str = "", find: str = "") -> Table:
    """List the snapshots of a workspace, or the files of one, or find a file in them.

    Args:
        workspace: The Workspace block whose snapshots are listed, or its name; home--NAME for what
            was stored of a home beside it.
        snapshot: The id of a snapshot, or newest, to list its files. Empty: list the snapshots.
        find: A name such as *.safetensors, or the end of a path such as notes/*.txt, to list its
            versions in all snapshots, or in the one that `snapshot` names.

    Returns:
        A table: one row for each snapshot, file or version.

    Raises:
        SnapshotMissing: There is no snapshot of that id.
        WrongKey: The snapshot was sealed with another key than the store block has.
        InvalidInput: The pattern in `find` is empty.

    Example:
        Every version of the weights:
        ```python
        from flows import snapshots

        print(snapshots("mywork", find="*.safetensors").rows())
        ```
    """
    opened = open_stored(workspace)
    name = opened.spec.name
    say_of_home(opened, "`torpor snapshots {}` lists that")
    if find:
        found = list_versions(workspace, find, snapshot)
        return Table.of(name, found.title(find), found.versions)
    if not snapshot:
        return Table.of(name, f"Snapshots of workspace {name}", list_kept(workspace))
    entries = list_entries(workspace, snapshot)
    total = sum(entry.bytes for entry in entries)
    return Table.of(name, f"{snapshot}: {len(entries):,} names, {total:,} bytes", entries)
