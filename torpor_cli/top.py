"""The command that shows all machines on one screen, and renews it."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter
from cyclopts.validators import Number

from deployments.terminal import TICK_S, Waiting, rewrites
from torpor.shared.plain_text import short
from torpor_cli.flow_runs import Format
from torpor_cli.output import console, print_report, rows_table
from torpor_cli.server import connected

if TYPE_CHECKING:
    from tasks.top import Top

Flag = Annotated[bool, Parameter(negative=())]


def top(
    *workspace: str,
    once: Flag = False,
    every: Annotated[float, Parameter(validator=Number(gte=2))] = 10.0,
    options: Format | None = None,
) -> None:
    """Show machines, what they do and cost, jobs and saves on one screen, until Ctrl-C.

    Args:
        workspace: Only these workspaces.
        once: Print one picture and end, as a pipe always gets it.
        every: Seconds between two looks, 2 or more. Each asks the markets.
    """
    chosen = options or Format()
    with connected():
        from blocks import Workspace
        from blocks.reference import saved_names
        from tasks.prefect_alerts import PrefectAlerts
        from tasks.top import look_at_top

        for name in {*workspace} - {*saved_names(Workspace)}:
            Workspace.of(name)  # a wrong name is an error here, a damaged block becomes a row

        def look(last: Top | None = None) -> Top:
            return look_at_top(workspace or saved_names(Workspace), PrefectAlerts(), last)

        if chosen.json or once or not rewrites(sys.stdout):
            with Waiting("looking at the machines"):
                seen = look()
            if chosen.json:
                print_report(seen, as_json=True)
            else:
                console(wide=chosen.wide).print(*_picture(seen, wide=chosen.wide), sep="\n")
            return
        _renew(look, every, wide=chosen.wide)


def _renew(look: Any, every_s: float, *, wide: bool) -> None:
    """Renew the screen until Ctrl-C, and leave the terminal as it was."""
    from rich.console import Console, Group
    from rich.live import Live
    from rich.text import Text

    with Waiting("looking at the machines"):
        seen = look(None)
    parts = _picture(seen, wide=wide)
    screen = Console(highlight=False, markup=False)  # this console heeds NO_COLOR
    stale = 0
    live = Live(Group(*parts), console=screen, screen=True, auto_refresh=False)
    try:
        live.start()
        while True:
            live.refresh()
            _pause(every_s)
            try:
                seen = look(seen)
            except Exception as error:  # noqa: BLE001 - the next look may find all well
                said = Text(short(f"The last look failed: {error}"))
                parts, stale = [said, *parts[stale:]], 1
            else:
                parts, stale = _picture(seen, wide=wide), 0
            live.update(Group(*parts))
    except KeyboardInterrupt:
        return
    finally:
        live.stop()  # also ends a screen that an interrupt has left half-started


def _pause(seconds: float) -> None:
    """Sleep, in steps of a second. Python handles a Ctrl-C that came just as a sleep began only
    after that sleep, which would be an hour with ``--every 3600``."""
    ends_s = time.monotonic() + seconds
    while (left_s := ends_s - time.monotonic()) > 0:
        time.sleep(min(left_s, TICK_S))


def _picture(seen: Top, *, wide: bool) -> list[Any]:
    """The tables of one look, one below the other."""
    from rich.text import Text

    parts: list[Any] = [Text(short(seen.title()))]
    for rows in seen.tables():
        table, _ = rows_table(rows, wide=wide)
        parts += [Text(""), table]
    return parts
