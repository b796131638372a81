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
from torpor.shared.errors import InvalidInput, TorporError
from torpor.shared.format.names import packs_prefix
from torpor.shared.values import HOME, Capabilities


def open_workspace(workspace: Workspace | str) -> OpenWorkspace:
    """Load the blocks a workspace refers to; errors name the block and what to do."""
    with phase("prepare"):
        return runner().open(workspace)


def open_stored(workspace: Workspace | str) -> OpenWorkspace:
    """Load the blocks that actions on the store alone need. ``home--NAME`` is what a hibernate has
    stored of a home beside workspace NAME, unless a block is saved under that name. InvalidInput
    where a block is saved under NAME too."""
    owner = block_of(workspace)
    return open_workspace(workspace) if owner == workspace else open_workspace(owner).at_home


def block_of(workspace: Workspace | str) -> Workspace | str:
    """The block whose machines had the files that ``open_stored`` opens."""
    if not isinstance(workspace, str) or not workspace.startswith(HOME):
        return workspace
    owner, blocks = workspace.removeprefix(HOME), runner().workspaces()
    if workspace in blocks and owner in blocks:
        raise InvalidInput(
            f"{workspace} may be the Workspace block of that name, or what was stored of a home "
            f"beside workspace {owner}: save that block under a name that does not begin with "
            f"{HOME}, and delete it under this one"
        )
    return workspace if workspace in blocks else owner


def kept_of_home(opened: OpenWorkspace) -> OpenWorkspace | None:
    """The stored home files beside the workspace, if there are any."""
    home = None if opened.spec.name.startswith(HOME) else opened.home
    if home is None or not any(True for _ in home.store.list(packs_prefix(home.spec.name))):
        return None
    return opened.at_home


def say_of_home(opened: OpenWorkspace, how: str) -> None:
    """Log that files of homes are stored beside the workspace, and ``how`` to act on them."""
    if kept_of_home(opened) is not None:
        name = f"{HOME}{opened.spec.name}"
        runner().log.warning(
            "of a home beside workspace %s, more is stored as %s: %s",
            opened.spec.name,
            name,
            how.format(name),
        )


def open_all(names: Iterable[str]) -> tuple[dict[str, OpenWorkspace], dict[str, TorporError]]:
    """The opened workspaces by the names of their blocks, and the errors of those that cannot be
    opened."""
    opened, closed = {}, {}
    wanted = [*names]
    with loading_once(*([Workspace] if len(wanted) > 1 else [])):
        for name in wanted:
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
