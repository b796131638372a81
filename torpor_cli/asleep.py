"""A workspace must be asleep while its block changes or goes: a look before, and one after."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

from torpor.shared.errors import InvalidInput, TorporError, WorkspaceAwake

if TYPE_CHECKING:
    from blocks import Workspace
    from tasks.runs_of_block import RunsOfBlock
    from tasks.workspace import OpenWorkspace


def name_of(block: Workspace) -> str:
    """The name of the saved block, however it was written: workspace/mywork is mywork, too."""
    return str(block._block_document_name)


def check_asleep(block: Workspace, done: str) -> tuple[OpenWorkspace, RunsOfBlock]:
    """The workspace of the block, also of one that was deleted or changed just now, and what names
    the block. WorkspaceAwake where something works on the workspace, or may."""
    from tasks.in_use import in_use
    from tasks.runs_of_block import runs_of_block
    from tasks.workspace_blocks import open_workspace

    workspace = name_of(block)
    try:
        opened = open_workspace(block)
        uses = runs_of_block(block)  # first: a run that has ended since has left its records
        found = [*in_use(opened), *uses.runs]
    except TorporError as error:
        raise WorkspaceAwake(
            f"workspace {workspace} was not {done}: nobody can say whether machines are rented or "
            f"jobs run for it: {error}. Try again; where its store is gone for good, look at your "
            "markets' consoles, and use the UI's page Blocks"
        ) from None
    if found:
        raise WorkspaceAwake(
            f"workspace {workspace} was not {done}, as it has {'; '.join(found)}. `torpor "
            f"hibernate {workspace}` stores and ends a machine, `torpor job cancel` a job, and "
            f"`torpor reconcile {workspace}` names what failed attempts left. A run that is gone "
            "is ended on its page in the UI"
        )
    return opened, uses


def check_can_be_put_back(block: Workspace, done: str) -> None:
    """InvalidInput for a block that ``put_back`` could not save."""
    try:
        block.check_settings()
    except InvalidInput as error:
        raise InvalidInput(
            f"workspace {name_of(block)} was not {done}, as its block could not be saved again if "
            f"something began meanwhile: {error}. Use the version of torpor that wrote it, or "
            "correct it on the UI's page Blocks"
        ) from None


@contextmanager
def put_back(block: Workspace, *, overwrite: bool = False, lost: str = "") -> Iterator[None]:
    """Save the block again as it was where this context fails, and say so. ``overwrite``: also over
    a block of its name that is there by then. ``lost``: what does not come back with it, in
    words."""
    workspace = name_of(block)
    try:
        yield
    except BaseException:
        said = f"is there as it was{lost}"
        try:
            with suppress(ValueError):  # a block of that name is there
                block.save(workspace, overwrite=overwrite)
        except BaseException as error:  # noqa: BLE001 - the first error is raised
            said = (
                f"could not be saved again as it was ({error!r}). It had the name {block.name}, "
                f"the store {block.store} and the identity {block.identity}: save it on the UI's "
                "page Blocks"
            )
        print(f"torpor: block workspace/{workspace} {said}", file=sys.stderr)
        raise
