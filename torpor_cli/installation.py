"""Commands that start and end everything on this host."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Literal

from cyclopts import Parameter

if TYPE_CHECKING:
    from deployments.installation import Installation

Idle = Literal["hibernate", "report", "off"]
Several = Annotated[list[str] | None, Parameter(negative=())]


def demo(*, verbose: Annotated[bool, Parameter(negative=())] = False) -> int:
    """Hibernate and wake a workspace on this host, compare, and clean up. Rents nothing.

    Args:
        verbose: Show the logs of the flows too.
    """
    from deployments.demo import main

    return main(["--verbose"] if verbose else [])


def up(
    *,
    port: int | None = None,
    database: str | None = None,
    idle: Idle | None = None,
    notify: Several = None,
    believe_records: Annotated[bool, Parameter(negative=())] = False,
) -> None:
    """Start a Prefect server, a store, workers and their supervisor on this host.

    Running it again starts only what is missing.

    Args:
        port: The port of the Prefect server, 4200 if it is free.
        database: The PostgreSQL of the Prefect server, as postgresql://USER@HOST/DATABASE, with the
            password in ~/.pgpass. Without it, SQLite.
        idle: What becomes of idle machines. Without it, the first `up` at a terminal asks.
        notify: A notification block that tells of alerts, as slack-webhook/mine. May be repeated.
        believe_records: Sign every record of every store as it is, whoever wrote it: what torpor
            knows of machines, jobs and host keys. For after a key was lost. Look at
            `torpor reconcile` first.
    """
    from deployments.installation import Installation
    from deployments.up import up as start
    from torpor_cli import logins
    from torpor_cli.server import connected

    installation = Installation.here()
    start(installation, port, database, believe_records)
    with connected():  # before Prefect is imported, which makes a folder in the home
        _choose(installation, idle)
        _say_who_is_told(notify)
        logins.keep_current()


def _choose(installation: Installation, idle: Idle | None) -> None:
    """What becomes of idle machines: as said, or as the answer at the terminal."""
    from deployments import idle as choice

    chosen = choice.is_chosen(installation)
    if idle is None and not chosen and sys.stdin.isatty():
        idle = choice.ask()
    if idle is not None:
        choice.choose(installation, idle)
        print(f"  idle      {choice.SAYS[idle]}")
    elif not chosen:
        print(f"  idle      {choice.SAYS['off']}")
        print("            torpor up --idle hibernate, or report, changes that")


def _say_who_is_told(notify: Sequence[str] | None) -> None:
    from deployments.automations import install
    from tasks.prefect_alerts import PrefectAlerts

    if notify:
        install(notify)
    if names := PrefectAlerts().notifiers():
        print(f"  alerts    {', '.join(names)} tells of them")
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
