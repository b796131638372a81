"""The command that shows and changes the settings of a workspace."""

from __future__ import annotations

from collections.abc import Sequence
from difflib import get_close_matches
from typing import TYPE_CHECKING, Annotated, Any, Final

from cyclopts import Parameter

from deployments.terminal import say
from torpor.shared.errors import InvalidInput
from torpor_cli.asleep import (
    check_asleep,
    check_can_be_put_back,
    check_unchanged,
    name_of,
    put_back,
)
from torpor_cli.output import print_rows
from torpor_cli.server import connected
from torpor_cli.sleeping import say_where_it_stays_awake

if TYPE_CHECKING:
    from blocks import Workspace

Flag = Annotated[bool, Parameter(negative=())]
_FINDS: Final = {"store", "identity"}
"""Settings by which torpor finds what is awake: the store with the records of rentals, and the
login."""


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
        workspace = name_of(old)
        if not setting:
            rows = [{"setting": name, "value": _shown(value)} for name, value in _of(old)]
            print_rows(rows, wide=wide)
            return
        # settings of a newer version, which save() refuses
        kept = dict(_of(old)) | (old.model_extra or {})
        new = setup.made(lambda: Workspace(**(kept | _wanted(old, setting))))
        rows = [
            {"setting": name, "was": _shown(was), "now": _shown(now)}
            for (name, was), (_, now) in zip(_of(old), _of(new), strict=True)
            if was != now
        ]
        if not rows:
            say(f"workspace {workspace} is as it was: it has these settings already")
            return
        changed = {row["setting"] for row in rows}
        new.spec()  # checks that the blocks of its tuning and idleness exist
        finds = changed & _FINDS or new.open_tuning().owner != old.open_tuning().owner
        if finds:
            check_can_be_put_back(old, "changed")
            check_asleep(old, "changed")
        if "store" in changed:
            setup.try_store(new.store)
        if "identity" in changed:
            new.open_identity()
        for provider in {new.provider, *new.more_providers} - {old.provider, *old.more_providers}:
            setup.try_market(provider)
        check_unchanged(old, "changed")
        if not finds:
            new.save(workspace, overwrite=True)
        else:
            with put_back(old, overwrite=True):
                new.save(workspace, overwrite=True)
                check_asleep(old, "changed")  # a run may have read the old settings
        setup.keep_on_record(workspace)
        print_rows(rows, f"workspace {workspace} is changed", wide=wide)
        if changed & {"sleep_minutes", "when_idle"} and new.when_idle == "hibernate":
            say_where_it_stays_awake(workspace)
        setup.say_of_this_home(new.paths if "paths" in changed else [])
        if "store" in changed:
            say(f"Its snapshots in {old.store} stay there: a wake looks in {new.store} alone.")


def _of(block: Workspace) -> list[tuple[str, Any]]:
    return [(name, getattr(block, name)) for name in type(block).model_fields]


def _wanted(old: Workspace, settings: Sequence[str]) -> dict[str, Any]:
    """The new values by setting; InvalidInput for an unknown setting."""
    known = dict(_of(old))
    wanted: dict[str, Any] = {}
    for one in settings:
        name, equals, value = one.partition("=")
        name = name.strip()
        if not equals:
            raise InvalidInput(f"{one!r} has no value: write NAME=VALUE, such as gpu=L40S")
        if name == "name":
            raise InvalidInput(
                "the name of a workspace is that of its snapshots and cannot be changed: "
                "`torpor init` makes another workspace"
            )
        if name not in known:
            near = get_close_matches(name, known, 3, 0.4)
            meant = f"do you mean {' or '.join(near)}? " if near else ""
            raise InvalidInput(
                f"a workspace has no setting {name!r}: {meant}`torpor edit {name_of(old)}` shows "
                "all settings"
            )
        listed = isinstance(known[name], list)
        if name in wanted and not (listed and value and wanted[name]):
            raise InvalidInput(f"{name} is given twice and takes one value: give {name}=VALUE once")
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
