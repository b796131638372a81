"""Open what a workspace block refers to."""

from __future__ import annotations

from blocks import Workspace
from tasks.runner import runner
from tasks.step import step
from tasks.workspace import OpenWorkspace, StoredWorkspace
from torpor.shared.values import Capabilities


def open_workspace(workspace: Workspace | str) -> OpenWorkspace:
    """Load the blocks a workspace refers to; errors name the block and what to do."""
    return runner().open(workspace)


@step("probe store")
def probe_store(opened: StoredWorkspace) -> Capabilities:
    """Check that the store answers and accepts our key, and probe what it can do."""
    return opened.store.probe()
