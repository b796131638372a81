"""When a machine sleeps by itself: a setting of its workspace, and the schedule of watch."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Annotated, Any, Final

from cyclopts import CoercionError, Parameter, Token, convert

from deployments.terminal import say
from torpor.control.own_server import how_to_hibernate
from torpor.shared.errors import InvalidInput, TorporError
from torpor_cli.asleep import check_unchanged, name_of
from torpor_cli.question import agrees

if TYPE_CHECKING:
    from blocks import Workspace

_TIMES: Final = "whole minutes, 1m to 4h, such as 30m or 2h"


def _time(type_: Any, tokens: Sequence[Token]) -> Any:
    try:
        return convert(type_, tokens)
    except CoercionError:
        raise ValueError(f"{tokens[0].value!r} is no time: write {_TIMES}.") from None


After = Annotated[timedelta | None, Parameter(converter=_time)]


def sleep_after(workspace: str, after: timedelta | None, *, asks: bool) -> Callable[[], None]:
    """Check that a machine of the workspace will be hibernated after so long without work; returns
    what saves this in its block. With ``asks``, whoever is at the terminal may switch the schedule
    of `watch` on, or go on without; else InvalidInput where it does not act."""
    if after is None:
        return lambda: None
    minutes = _minutes(after)

    from blocks import Workspace
    from torpor_cli import setup

    old = Workspace.of(workspace)
    name = name_of(old)
    kept = {field: getattr(old, field) for field in Workspace.model_fields}
    kept |= {**(old.model_extra or {}), "sleep_minutes": minutes, "when_idle": "hibernate"}
    new = setup.made(lambda: Workspace(**kept))
    new.check_settings()
    _check_alike(name, new)
    _see_that_watch_acts(name, asks=asks and sys.stdin.isatty())

    def save() -> None:
        if new.model_dump() != old.model_dump():
            check_unchanged(old, "changed")
            new.save(name, overwrite=True)
        say(
            f"{name} sleeps after {minutes} min without work, now and after each wake: "
            f"`torpor edit {name} sleep_minutes=` gives the idle rules of its block back",
            sys.stderr,
        )

    return save


def say_where_it_stays_awake(name: str) -> None:
    """Warn where nothing hibernates an idle machine of the workspace of this block."""
    if why := _never(name):
        say(
            f"torpor: warning: {why}: an idle machine of {name} stays and costs money. "
            f"{how_to_hibernate()} switches that on",
            sys.stderr,
        )


def _minutes(after: timedelta) -> int:
    minutes, rest_s = divmod(after.total_seconds(), 60)
    if rest_s or not 1 <= minutes <= 240:
        raise InvalidInput(f"--sleep-after: write {_TIMES}")
    return int(minutes)


def _check_alike(name: str, new: Workspace) -> None:
    """InvalidInput where another block for this workspace has other idle rules: watch would choose
    neither of the two."""
    from blocks import Workspace
    from blocks.reference import saved_names

    for other in saved_names(Workspace):
        if other == name:
            continue
        try:
            block = Workspace.of(other)
            differs = block.name == new.name and block.spec().idle != new.spec().idle
        except TorporError:  # a damaged block is reported where it is used
            continue
        if differs:
            raise InvalidInput(
                f"the blocks {name} and {other} are both for workspace {new.name}: with other idle "
                "rules in each, nothing hibernates its machine. Give the other one the same first: "
                f"`torpor edit {other} sleep_minutes={new.sleep_minutes} when_idle=hibernate "
                f"idle={new.idle}`, then this command again"
            )


def _never(name: str) -> str:
    from tasks.prefect_alerts import PrefectAlerts

    return PrefectAlerts().sleeping().never(name)


def _see_that_watch_acts(name: str, *, asks: bool) -> None:
    why = _never(name)
    if not why:
        return
    if not asks:
        raise InvalidInput(
            f"--sleep-after would do nothing, and nothing was rented: {why}. "
            f"{how_to_hibernate()} switches that on; without --sleep-after the machine stays until "
            "you hibernate it"
        )
    say(f"--sleep-after does nothing by itself: {why}.", sys.stderr)
    if agrees(
        "Switch the schedule of watch on? It hibernates every idle machine of this installation "
        "whose workspace does not say report"
    ):
        from deployments import idle
        from deployments.installation import Installation

        idle.choose(Installation.here(), "hibernate")
    say_where_it_stays_awake(name)
