"""Open what a workspace block refers to."""

from __future__ import annotations

from collections.abc import Iterable

from blocks import Workspace
from blocks.reference import loading_once
from tasks.phases import phase
from tasks.retries import FIRST_OF_STORE
from tasks.runner import runner
from tasks.step import step
from tasks.trouble import trouble
from tasks.workspace import OpenWorkspace, StoredWorkspace
from torpor.shared.errors import TorporError
from torpor.shared.values import HOME, Capabilities


def open_workspace(workspace: Workspace | str) -> OpenWorkspace:
    """Load the blocks a workspace refers to; errors name the block and what to do."""
    with phase("prepare"):
        return runner().open(workspace)


def open_stored(workspace: Workspace | str) -> OpenWorkspace:
    """The same for what acts on the store alone. ``home--NAME`` is what a hibernate has stored of a
    home beside workspace NAME."""
    owner = block_of(workspace)
    return open_workspace(workspace) if owner == workspace else open_workspace(owner).at_home


def block_of(workspace: Workspace | str) -> Workspace | str:
    """The block on whose machines the files were that ``open_stored`` opens."""
    return workspace.removeprefix(HOME) if isinstance(workspace, str) else workspace


def open_all(names: Iterable[str]) -> tuple[dict[str, OpenWorkspace], dict[str, TorporError]]:
    """The workspaces by the names of their blocks, and the errors of those that cannot be
    opened."""
    opened, closed = {}, {}
    with loading_once():
        for name in names:
            try:
                opened[name] = open_workspace(name)
            except Exception as error:  # noqa: BLE001 - the others are looked at all the same
                closed[name] = trouble(error)
    return opened, closed


@step(
    "probe store",
    retries=FIRST_OF_STORE,
    phase="prepare",
    says="asking the store at {opened.store.address}",
)
def probe_store(opened: StoredWorkspace) -> Capabilities:
    """Check that the store answers and accepts our key, and probe what it can do."""
    return opened.store.probe()
