"""A workspace must be asleep while its block changes or goes: a look before, and one after."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType
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


class BlockGone(InvalidInput):
    """Somebody has deleted the block meanwhile: it is not put back."""


def check_unchanged(block: Workspace, done: str) -> None:
    """BlockGone or WorkspaceAwake where somebody has deleted or changed the block since it was
    read."""
    from blocks import Workspace
    from blocks.reference import saved_names

    workspace = name_of(block)
    if workspace not in saved_names(Workspace):
        raise BlockGone(f"workspace {workspace} was not {done}: somebody has deleted it meanwhile")
    now = Workspace.of(workspace)
    if (now._block_document_id, now.model_dump()) != (
        block._block_document_id,
        block.model_dump(),
    ):
        raise WorkspaceAwake(
            f"workspace {workspace} was not {done}: somebody has changed its settings meanwhile. "
            "Give the command again to see them"
        )


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
    words. A terminal that is closed and a SIGTERM count as a failure, too."""
    workspace = name_of(block)
    try:
        with _ended_by_signals():
            yield
    except BlockGone:
        raise
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


@contextmanager
def _ended_by_signals() -> Iterator[None]:
    """SystemExit where a terminal is closed or somebody ends this process, as Ctrl-C raises."""

    def end(number: int, _: FrameType | None) -> None:
        raise SystemExit(128 + number)

    heard = {
        number: before
        for number in (signal.SIGHUP, signal.SIGTERM)
        if (before := signal.getsignal(number)) is not signal.SIG_IGN  # as nohup has it
    }
    try:
        for number in heard:
            signal.signal(number, end)
        yield
    finally:
        for number, before in heard.items():
            signal.signal(number, before)
