"""Commands that change and delete the block of a workspace."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from difflib import get_close_matches
from typing import TYPE_CHECKING, Annotated, Any, Final

from cyclopts import Parameter

from torpor.shared.errors import (
    InvalidInput,
    RunCancelled,
    SnapshotKept,
    TorporError,
    WorkspaceAwake,
)
from torpor.shared.values import HOME
from torpor_cli.output import print_rows
from torpor_cli.question import agrees, answer
from torpor_cli.server import connected

if TYPE_CHECKING:
    from blocks import Workspace
    from tasks.runs_of_block import RunsOfBlock

Flag = Annotated[bool, Parameter(negative=())]
_FINDS: Final = ("store", "identity")
"""Settings by which torpor finds what is awake: the records of rentals, and the login."""


def edit(workspace: str, *setting: str, wide: Flag = False) -> None:
    """Show the settings of a workspace, or change some of them.

    torpor edit mywork gpu="RTX 4090, L40S" max_price_usd_h=0.60 'paths=~/workspace' paths=/data

    A list takes its setting once for each item. Nothing after "=" gives the default back. The new
    settings are checked as `init` checks them before they are saved.

    Args:
        workspace: The workspace, as the name of its block.
        setting: What to change, as NAME=VALUE.
        wide: Show the whole table, however narrow the terminal is.
    """
    with connected():
        from blocks import Workspace
        from torpor_cli import setup

        old = Workspace.of(workspace)
        workspace = _name_of(old)
        if not setting:
            rows = [{"setting": name, "value": _shown(value)} for name, value in _of(old)]
            print_rows(rows, wide=wide)
            return
        kept = dict(_of(old)) | (old.model_extra or {})  # of a newer version: save() refuses it
        new = setup.made(lambda: Workspace(**(kept | _wanted(old, setting))))
        rows = [
            {"setting": name, "was": _shown(was), "now": _shown(now)}
            for (name, was), (_, now) in zip(_of(old), _of(new), strict=True)
            if was != now
        ]
        if not rows:
            print(f"workspace {workspace} is as it was: it has these settings already")
            return
        changed = {row["setting"] for row in rows}
        new.spec()  # the blocks of its tuning and idleness are there
        if changed & {*_FINDS} or new.open_tuning().owner != old.open_tuning().owner:
            _check_not_in_use(workspace, "changed")
        if "store" in changed:
            setup.try_store(new.store)
        if "identity" in changed:
            new.open_identity()
        for provider in {new.provider, *new.more_providers} - {old.provider, *old.more_providers}:
            setup.try_market(provider)
        new.save(workspace, overwrite=True)
        print_rows(rows, f"workspace {workspace} is changed", wide=wide)
        setup.say_of_this_home(new.paths if "paths" in changed else [])
        if "store" in changed:
            print(f"Its snapshots in {old.store} stay there: a wake looks in {new.store} alone.")


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
        from tasks.runs_of_block import delete_schedule

        block = Workspace.of(workspace)
        workspace = _name_of(block)
        uses = _check_not_in_use(workspace, "deleted")
        _check_not_budgeted(workspace)
        ended = _snapshots_to_delete(workspace, block) if snapshots else {}
        rows = [{"what": f"block workspace/{workspace}", "becomes": "deleted"}]
        rows += [{"what": one.words, "becomes": "deleted"} for one in uses.schedules]
        rows += [
            {"what": f"{len(ids)} snapshots of {name}", "becomes": "deleted for good"}
            for name, ids in ended.items()
        ]
        stays = [f"block {one}" for one in _named_by(block)]
        if not snapshots:
            stays.insert(0, f"snapshots of {block.name}, and what it cost")
        stays += [f"deployment {one}, which names it" for one in uses.deployments]
        print_rows([*rows, *({"what": one, "becomes": "kept"} for one in stays)], wide=wide)
        if not yes:
            _ask(workspace, snapshots=snapshots)
            _check_not_in_use(workspace, "deleted")  # the answer took its time
        for name, ids in ended.items():
            _delete_snapshots(name, ids)
        _delete_block(workspace, block)
        for one in uses.schedules:
            delete_schedule(one)
        _forget_logins(workspace)
        print(f"workspace {workspace} is deleted. {_what_next(block, snapshots=snapshots)}")


def _name_of(block: Workspace) -> str:
    """The name of the saved block, however it was written: workspace/mywork is mywork, too."""
    return str(block._block_document_name)


def _of(block: Workspace) -> list[tuple[str, Any]]:
    return [(name, getattr(block, name)) for name in type(block).model_fields]


def _wanted(old: Workspace, settings: Sequence[str]) -> dict[str, Any]:
    """The new values by their settings; InvalidInput for a setting that there is not."""
    known = dict(_of(old))
    wanted: dict[str, Any] = {}
    for one in settings:
        name, equals, value = one.partition("=")
        name = name.strip()
        if not equals:
            raise InvalidInput(f"{one!r} is no NAME=VALUE, such as gpu=L40S")
        if name == "name":
            raise InvalidInput(
                "the name of a workspace is that of its snapshots and cannot be changed: "
                "`torpor init` makes another workspace"
            )
        if name not in known:
            near = get_close_matches(name, known, 3, 0.4) or [*known]
            raise InvalidInput(f"a workspace has no setting {name!r}: is it {', '.join(near)}?")
        listed = isinstance(known[name], list)
        if name in wanted and not (listed and value and wanted[name]):
            raise InvalidInput(f"{name} is there twice, and is one value")
        if not value:
            field = type(old).model_fields[name]
            wanted[name] = field.get_default(call_default_factory=True)
        else:
            wanted[name] = [*wanted.get(name, []), value] if listed else value
    return wanted


def _shown(value: object) -> str:
    if isinstance(value, list):
        return ", ".join(map(str, value))
    return "" if value is None else str(value)


def _check_not_in_use(workspace: str, done: str) -> RunsOfBlock:
    """What names the workspace; WorkspaceAwake where something works on it, or may."""
    from tasks.in_use import in_use
    from tasks.runs_of_block import runs_of_block
    from tasks.workspace_blocks import open_workspace

    try:
        opened = open_workspace(workspace)
        found = in_use(opened)
        uses = runs_of_block(workspace, opened.spec.name)
    except TorporError as error:
        raise WorkspaceAwake(
            f"workspace {workspace} was not {done}: nobody can say whether machines are rented or "
            f"jobs run for it: {error}. Try again; where its store is gone for good, look at your "
            "markets' consoles, and use the UI's page Blocks"
        ) from None
    found += uses.runs
    if found:
        raise WorkspaceAwake(
            f"workspace {workspace} was not {done}, as it has {'; '.join(found)}. `torpor "
            f"hibernate {workspace}` stores and ends a machine, `torpor job cancel` a job, and "
            f"`torpor reconcile {workspace}` names what failed attempts left. A run that is gone "
            "is ended on its page in the UI"
        )
    return uses


def _check_not_budgeted(workspace: str) -> None:
    from blocks import Budget
    from blocks.reference import load_all

    for budget in load_all(Budget):
        if workspace in {one.rpartition("/")[2] for one in budget.workspaces}:
            raise InvalidInput(
                f"workspace {workspace} was not deleted: budget/{budget._block_document_name} "
                "names it, and would let nothing be rented without it. Take the name out of that "
                "budget on the UI's page Blocks"
            )


def _snapshots_to_delete(workspace: str, block: Workspace) -> dict[str, list[Any]]:
    """All snapshots of the workspace, and of what was stored of a home beside it, the newest first.
    InvalidInput where another block is the same workspace, SnapshotKept where its user has pinned
    one."""
    from blocks import Workspace
    from blocks.reference import load_all
    from flows.procedures.listing import list_kept
    from tasks.workspace_blocks import open_stored, open_workspace
    from torpor.control.upkeep.pins import is_pinned

    for other in load_all(Workspace):
        if other.name == block.name and other._block_document_name != workspace:
            raise InvalidInput(
                f"the block workspace/{other._block_document_name} is workspace {block.name}, too: "
                "the snapshots are also its own. Nothing was deleted"
            )
    found = {}
    homes = [f"{HOME}{workspace}"] if open_workspace(workspace).home else []
    for name in (*homes, workspace):
        opened = open_stored(name)
        kept = list_kept(name)
        for one in kept:
            if is_pinned(opened.store, opened.spec.name, one.snapshot, by_user=True):
                raise SnapshotKept(
                    f"snapshot {one.snapshot} of {name} is pinned ({one.pinned}): nothing was "
                    "deleted. Remove its pin first, by `pin` with `remove`"
                )
        if kept:
            found[name] = kept
    return found


def _delete_snapshots(name: str, kept: list[Any]) -> None:
    """Delete these, the newest first. A newest one that was never verified goes on its own: the
    newest verified one would else be kept."""
    from flows import delete_snapshots

    while kept and not kept[0].verified and any(one.verified for one in kept):
        delete_snapshots(name, [kept[0].snapshot], even_newest=kept[0].snapshot)
        kept = kept[1:]
    delete_snapshots(name, [one.snapshot for one in kept], even_newest=kept[0].snapshot)


def _named_by(block: Workspace) -> list[str]:
    kinds = {
        "object-store": [block.store],
        "ssh-identity": [block.identity],
        "local-provider": [block.provider, *block.more_providers],
        "idleness": [block.idle],
        "tuning": [block.tuning],
    }
    return [
        name if "/" in name else f"{kind}/{name}"
        for kind, names in kinds.items()
        for name in names
        if name
    ]


def _ask(workspace: str, *, snapshots: bool) -> None:
    """InvalidInput if nobody can answer, RunCancelled after a no."""
    said = f"Delete workspace {workspace}"
    if not sys.stdin.isatty():
        raise InvalidInput(f"{said}? Nobody is at the terminal to answer: add --yes")
    if snapshots:
        asked = f"{said} with all of its snapshots, for good? Write its name: "
        agreed = answer(asked) == workspace
    else:
        agreed = agrees(f"{said}?")
    if not agreed:
        raise RunCancelled("nothing was deleted")


def _delete_block(workspace: str, block: Workspace) -> None:
    """Delete the block. It is saved again where a run began meanwhile; later ones find none."""
    from blocks import Workspace
    from tasks.in_use import in_use
    from tasks.runs_of_block import runs_of_block
    from tasks.workspace_blocks import open_workspace

    opened = open_workspace(workspace)
    Workspace.delete(workspace)
    try:
        found = [*in_use(opened), *runs_of_block(workspace, opened.spec.name).runs]
    except BaseException:
        block.save(workspace)  # not known is not unused
        raise
    if found:
        block.save(workspace)
        raise WorkspaceAwake(
            f"workspace {workspace} was not deleted, as something began meanwhile: "
            f"{'; '.join(found)}. Its block was saved again"
        )


def _forget_logins(workspace: str) -> None:
    from torpor_cli import logins

    try:
        logins.forget(workspace)
    except OSError as error:
        print(f"torpor: warning: the logins of {workspace} stay: {error}", file=sys.stderr)


def _what_next(block: Workspace, *, snapshots: bool) -> str:
    if not snapshots:
        return f"`torpor init {block.name} --store {block.store}` brings it back with its snapshots"
    from blocks import Workspace
    from blocks.reference import load_all

    for other in load_all(Workspace):
        if other.store == block.store:
            return (
                f"`torpor prune {other._block_document_name} --no-dry-run` frees what only its "
                "snapshots used, at the second run, after the grace time"
            )
    return f"No other workspace uses {block.store}: empty its bucket to free what they used"
