"""A workspace must be asleep while its block changes or goes: a look before, and one after."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import TYPE_CHECKING

from deployments.terminal import say
from torpor.shared.errors import InvalidInput, TorporError, WorkspaceAwake

if TYPE_CHECKING:
    from blocks import Workspace
    from tasks.runs_of_block import RunsOfBlock
    from tasks.workspace import OpenWorkspace


def name_of(block: Workspace) -> str:
    """The name of the saved block, however a person wrote it: mywork for workspace/mywork, too."""
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
        # first, because a run that has ended since then has left its records
        uses = runs_of_block(block)
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


def check_unchanged(block: Workspace, done: str) -> None:
    """InvalidInput or WorkspaceAwake where somebody has deleted or changed the block since it was
    read."""
    from blocks import Workspace
    from blocks.reference import saved_names

    workspace = name_of(block)
    if workspace not in saved_names(Workspace):
        raise InvalidInput(
            f"workspace {workspace} was not {done}: somebody has deleted it meanwhile"
        )
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
    with _ended_by_signals():
        try:
            yield
        except BaseException:
            said = _saved_again(block, overwrite, lost)
            say(f"torpor: block workspace/{name_of(block)} {said}", sys.stderr)
            raise


def _saved_again(block: Workspace, overwrite: bool, lost: str) -> str:
    """Save the block; returns in words what happened to it."""
    from blocks import Workspace
    from blocks.reference import saved_names

    workspace = name_of(block)
    try:
        if overwrite or workspace not in saved_names(Workspace):
            block.save(workspace, overwrite=overwrite)
        elif Workspace.of(workspace)._block_document_id != block._block_document_id:
            return "was saved anew by somebody meanwhile, and stays so"
    except BaseException as error:  # noqa: BLE001 - the first error is raised
        return (
            f"could not be saved again as it was ({error!r}). It had the name {block.name}, the "
            f"store {block.store} and the identity {block.identity}: save it on the UI's page "
            "Blocks"
        )
    return f"is there as it was{lost}"


@contextmanager
def _ended_by_signals() -> Iterator[None]:
    """SystemExit where a terminal is closed or somebody ends this process, as Ctrl-C raises. What
    comes after the first of them, as a second SIGHUP of a terminal does, ends nothing more."""
    numbers = [
        number
        for number in (signal.SIGHUP, signal.SIGTERM)
        # ignored signals stay ignored, as under nohup
        if signal.getsignal(number) is not signal.SIG_IGN
    ]

    def end(first: int, _: FrameType | None) -> None:
        for number in numbers:
            signal.signal(number, signal.SIG_IGN)
        raise SystemExit(128 + first)

    before = {number: signal.signal(number, end) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
