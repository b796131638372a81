"""Find: a file in all snapshots of a workspace."""

from __future__ import annotations

from blocks import Workspace
from flows.procedures.listing import find_files
from tasks.flow import flow
from torpor.control.upkeep.reports import Table


@flow("find")
def find(workspace: Workspace | str, pattern: str) -> Table:
    """Find a file in all snapshots of a workspace, and list its versions.

    Args:
        workspace: The Workspace block whose snapshots are searched, or its name.
        pattern: A name such as *.safetensors, or the end of a path such as notes/*.txt.
    """
    found = find_files(workspace, pattern)
    return Table.of(found.workspace, found.title(pattern), found.versions)
