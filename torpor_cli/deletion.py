"""The command that deletes a workspace."""

from __future__ import annotations

import sys
from contextlib import suppress
from typing import TYPE_CHECKING, Annotated, Final, NamedTuple

from cyclopts import Parameter

from deployments.terminal import say
from torpor.shared.errors import (
    InvalidInput,
    RunCancelled,
    SnapshotKept,
    SnapshotMissing,
    WorkspaceAwake,
)
from torpor.shared.values import SnapshotId, WorkspaceName
from torpor_cli.asleep import (
    check_asleep,
    check_can_be_put_back,
    check_unchanged,
    name_of,
    put_back,
)
from torpor_cli.output import print_rows
from torpor_cli.question import answer, check_attended, confirm
from torpor_cli.server import connected

if TYPE_CHECKING:
    from blocks import Workspace
    from tasks.runs_of_block import RunsOfBlock
    from tasks.workspace import OpenWorkspace

Flag = Annotated[bool, Parameter(negative=())]
_KEPT: Final = "nothing was deleted"


class _Found(NamedTuple):
    """What names the workspace's block, and what the store holds of the workspace and of a home
    beside it: the snapshots by these names, and the prefixes that have packs."""

    uses: RunsOfBlock
    snapshots: dict[WorkspaceName, list[SnapshotId]]
    packs: list[str]


def delete(
    workspace: str, *, snapshots: Flag = False, yes: Flag = False, wide: Flag = False
) -> None:
    """Delete a workspace that is asleep: its block, its schedules and its logins on this host.

    Its snapshots stay unless you say otherwise, and so do the blocks that it names: its store with
    the encryption key, its market and its SSH identity. Refused while a machine of it is rented, a
    job or a run of it goes on, or that is not known.

    Args:
        workspace: The workspace, as the name of its block.
        snapshots: Delete all of its snapshots, too, for good.
        yes: Do not ask.
        wide: Show the whole table, however narrow the terminal is.
    """
    with connected():
        from blocks import Workspace
        from tasks.ownership import check_still_owner
        from tasks.runs_of_block import delete_schedule

        block = Workspace.of(workspace)
        workspace = name_of(block)
        check_can_be_put_back(block, "deleted")
        opened, found = _look(block)
        _check_not_listed(workspace, found.uses)
        if snapshots:
            check_still_owner(opened)
            _check_only_block(block)
            _check_not_pinned(opened, found)
        becomes = _becomes(block, found, snapshots=snapshots)
        print_rows([{"what": what, "becomes": then} for what, then in becomes.items()], wide=wide)
        if not yes:
            _ask(workspace, snapshots=snapshots)
            if _look(block)[1] != found:  # if the answer took long, things may have changed
                raise _changed(workspace)
            _check_not_listed(workspace, found.uses)
            if snapshots:
                _check_only_block(block)
                _check_not_pinned(opened, found)
        check_unchanged(block, "deleted")
        with put_back(block, lost=_lost(found, snapshots=snapshots)):
            for schedule in found.uses.schedules:
                delete_schedule(schedule)
            _delete_block(block)  # first, so that no wake begins with a snapshot that is deleted
            if _look(block)[1].snapshots != found.snapshots:
                raise _changed(workspace)
            if snapshots:
                check_still_owner(opened)  # the answer took its time
                _delete_snapshots(opened, found)
        _forget_logins(workspace)
        say(f"workspace {workspace} is deleted{_next_step(block, opened, found, snapshots)}")


def _delete_block(block: Workspace) -> None:
    """Delete the block by its id, so that a block which somebody has saved under its name since
    stays."""
    from prefect.client.orchestration import get_client
    from prefect.exceptions import ObjectNotFound

    if block._block_document_id is None:
        raise InvalidInput(f"workspace {block.name} is no saved block")
    # the block is deleted already
    with get_client(sync_client=True) as client, suppress(ObjectNotFound):
        client.delete_block_document(block._block_document_id)


def _lost(found: _Found, *, snapshots: bool) -> str:
    """What does not come back with a block that is saved again."""
    lost = ". Its schedules may be deleted" if found.uses.schedules else ""
    lost += ". Some of its snapshots may be deleted" if snapshots else ""
    if found.uses.deployments:
        lost += (
            f". Where deployment {', '.join(found.uses.deployments)} chose it in a form, choose it "
            "again"
        )
    return lost


def _look(block: Workspace) -> tuple[OpenWorkspace, _Found]:
    from torpor.control.store.manifests import snapshot_ids
    from torpor.shared.format.names import packs_prefix

    opened, uses = check_asleep(block, "deleted")
    store, home = opened.store, opened.home
    names = [opened.spec.name, *([home.spec.name] if home else [])]
    snapshots = {name: snapshot_ids(store, name) for name in names}
    prefixes = [packs_prefix(name) for name in names]
    return opened, _Found(uses, snapshots, [one for one in prefixes if any(store.list(one))])


def _changed(workspace: str) -> WorkspaceAwake:
    return WorkspaceAwake(
        f"workspace {workspace} was not deleted: its schedules or its snapshots are others by now. "
        "Give the command again to see them"
    )


def _check_not_listed(workspace: str, uses: RunsOfBlock) -> None:
    """InvalidInput where a schedule lists the workspace among others, and would fail without it."""
    from blocks import Budget
    from blocks.reference import load_all

    for budget in load_all(Budget):
        if workspace in {one.rpartition("/")[2] for one in budget.workspaces}:
            raise InvalidInput(
                f"workspace {workspace} was not deleted: budget/{budget._block_document_name} "
                "names it, and would let nothing be rented without it. Take the name out of that "
                "budget on the UI's page Blocks"
            )
    if uses.shared:
        raise InvalidInput(
            f"workspace {workspace} was not deleted: {', '.join(uses.shared)} has it in "
            "`workspaces`. Take the name out there, on the UI's page Deployments"
        )


def _check_only_block(block: Workspace) -> None:
    """InvalidInput where another block names the same workspace."""
    from blocks import Workspace
    from blocks.reference import load_all

    for other in load_all(Workspace):
        if other.name == block.name and name_of(other) != name_of(block):
            raise InvalidInput(
                f"the block workspace/{name_of(other)} is workspace {block.name}, too: the "
                "snapshots may be its own. Nothing was deleted"
            )


def _check_not_pinned(opened: OpenWorkspace, found: _Found) -> None:
    """SnapshotKept where the user has pinned snapshots. Checked before the first one is deleted."""
    from torpor.control.upkeep.pins import pin_times

    for name in found.snapshots:
        if pins := pin_times(opened.store, name):
            raise SnapshotKept(
                f"you have pinned snapshots of {name}: nothing was deleted. Remove each pin first, "
                f"by `pin` with `remove`: {', '.join(sorted(pins))}"
            )


def _becomes(block: Workspace, found: _Found, *, snapshots: bool) -> dict[str, str]:
    """What is deleted and what is kept, as rows for the question."""
    kinds = {
        "object-store": [block.store],
        "ssh-identity": [block.identity],
        "local-provider": [block.provider, *block.more_providers],
        "idleness": [block.idle],
        "tuning": [block.tuning],
    }
    becomes = {f"block workspace/{name_of(block)}": "deleted"}
    becomes |= {one.words: "deleted" for one in found.uses.schedules}
    for name, ids in found.snapshots.items():
        if ids:
            then = "deleted for good" if snapshots else "kept"
            becomes[f"snapshots of {name}: {len(ids)}"] = then
    kept = [f"what {block.name} cost"]
    kept += [
        f"block {name if '/' in name else f'{kind}/{name}'}"
        for kind, names in kinds.items()
        for name in names
        if name
    ]
    kept += [f"packs in {one}" for one in found.packs if snapshots]
    kept += [f"deployment {one}, which names it" for one in found.uses.deployments]
    return becomes | dict.fromkeys(kept, "kept")


def _ask(workspace: str, *, snapshots: bool) -> None:
    """InvalidInput if nobody can answer, RunCancelled after a no."""
    said = f"Delete workspace {workspace}"
    if not snapshots:
        confirm(f"{said}?", _KEPT)
        return
    check_attended(f"{said}?")
    if answer(f"{said} with all of its snapshots, for good? Write its name: ") != workspace:
        raise RunCancelled(_KEPT)


def _delete_snapshots(opened: OpenWorkspace, found: _Found) -> None:
    """Delete the snapshots, the newest last: otherwise an earlier one would become the newest. Then
    delete the record of the workspace."""
    from tasks.retention import tell_of_deletion
    from torpor.control.store.workspace_records import WorkspaceRecords
    from torpor.control.upkeep.deletion import delete_snapshot

    for each in filter(None, (opened, opened.home)):
        for one in found.snapshots[each.spec.name]:
            with suppress(SnapshotMissing):  # somebody has deleted the snapshot meanwhile
                delete_snapshot(each.store, each.spec.name, one, even_newest=one, named=True)
                tell_of_deletion(each, one, "asked for")
    WorkspaceRecords(opened.store, opened.store_key).delete(opened.root)


def _forget_logins(workspace: str) -> None:
    from torpor_cli import logins

    try:
        logins.forget(workspace)
    except OSError as error:
        say(f"torpor: warning: the logins of {workspace} stay: {error}", sys.stderr)


def _next_step(block: Workspace, opened: OpenWorkspace, found: _Found, snapshots: bool) -> str:
    if not snapshots:
        brings = f". `torpor init {block.name} --store {block.store}` brings its snapshots back"
        return brings if any(found.snapshots.values()) else ""
    if not found.packs:
        return ""
    return (
        f". Its packs stay in {opened.store.address} below {' and '.join(found.packs)}: delete "
        "what lies there with the store's own tools, before you use the name again"
    )
