"""Commands that start and end everything on this host."""

from __future__ import annotations

import sys
from typing import Annotated, Literal

from cyclopts import Parameter

Several = Annotated[list[str] | None, Parameter(negative=())]


def up(
    *,
    port: int | None = None,
    idle: Literal["hibernate", "report", "off"] | None = None,
    notify: Several = None,
) -> None:
    """Start a Prefect server, a store, workers and their supervisor on this host.

    Running it again starts only what is missing.

    Args:
        port: The port of the Prefect server, 4200 if it is free.
        idle: What becomes of idle machines. Without it, the first `up` at a terminal asks.
        notify: A notification block that tells of alerts, as slack-webhook/mine. May be repeated.
    """
    from deployments import idle as choice
    from deployments.automations import install
    from deployments.installation import Installation
    from deployments.server import asking
    from deployments.up import up as start

    installation = Installation.here()
    with asking(start(installation, port)):
        chosen = choice.is_chosen(installation)
        if idle is None and not chosen and sys.stdin.isatty():
            idle = choice.ask()
        if idle is not None:
            choice.choose(installation, idle)
            print(f"  idle      {choice.SAYS[idle]}")
        elif not chosen:
            print(f"  idle      {choice.SAYS['off']}")
            print("            torpor up --idle hibernate, or report, changes that")
        if notify:
            install(notify)
            print(f"  alerts    {', '.join(notify)} tells of them")
        else:
            print("  alerts    make a notification block on the UI's page Blocks, and name it:")
            print("            torpor up --notify slack-webhook/NAME")


def down(*, machines: Annotated[bool, Parameter(negative=())] = False) -> None:
    """End everything that `up` started. Files, blocks and snapshots stay.

    Args:
        machines: Also end the processes of local machines; their files stay.
    """
    from deployments.down import down as end
    from deployments.installation import Installation

    end(Installation.here(), machines=machines)


def boot() -> None:
    """Write a unit of systemd that starts everything with the host, or say what to add to cron."""
    from deployments.boot import set_up

    set_up()
