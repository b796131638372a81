"""Commands that start and end everything on this host."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from contextlib import redirect_stdout
from io import StringIO
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from deployments.terminal import Waiting, say
from torpor.shared.errors import InvalidInput, RunCancelled
from torpor.shared.values import IdleChoice

if TYPE_CHECKING:
    from deployments.installation import Installation

Several = Annotated[list[str] | None, Parameter(negative=())]


def demo(*, verbose: Annotated[bool, Parameter(negative=())] = False) -> int:
    """Hibernate and wake a workspace on this host, compare, and clean up. Rents nothing.

    Args:
        verbose: Show the logs of the flows too.
    """
    with Waiting("loading torpor"):
        from deployments.demo import main

    return main(["--verbose"] if verbose else [])


def up(
    *,
    port: int | None = None,
    database: str | None = None,
    idle: IdleChoice | None = None,
    notify: Several = None,
    believe_records: Annotated[bool, Parameter(negative=())] = False,
) -> None:
    """Start a Prefect server, a store, workers and their supervisor on this host.

    Running it again registers again, and changes nothing that runs.

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
    with Waiting("loading torpor"):
        from deployments.installation import Installation
        from deployments.server import see_that_none_is_connected
        from deployments.up import up as start
        from torpor_cli import logins
        from torpor_cli.server import connected

    installation = Installation.here()
    see_that_none_is_connected(installation)
    start(installation, port, database, believe_records)
    with connected():  # before Prefect is imported, because that makes a folder in the home
        _choose(installation, idle)
        _say_who_is_told(notify)
        logins.keep_current()


def _choose(installation: Installation, idle: IdleChoice | None) -> None:
    """Set what becomes of idle machines: as the option says, or as the person at the terminal
    answers."""
    from deployments import idle as choice

    chosen = choice.is_chosen(installation)
    if idle is None and not chosen and sys.stdin.isatty():
        idle = choice.ask()
    if idle is not None:
        choice.choose(installation, idle)
        say(f"  idle      {choice.SAYS[idle]}")
    elif not chosen:
        say(f"  idle      {choice.SAYS['off']}")
        say("            torpor up --idle hibernate, or report, changes that")


def _say_who_is_told(notify: Sequence[str] | None) -> None:
    from deployments.automations import install
    from tasks.prefect_alerts import PrefectAlerts

    if notify:
        install(notify)
    if names := PrefectAlerts().notifiers():
        say(f"  alerts    {', '.join(names)} tells of them")
    else:
        say("  alerts    make a notification block on the UI's page Blocks, and name it:")
        say("            torpor up --notify slack-webhook/NAME")


def down(
    *,
    machines: Annotated[bool, Parameter(negative=())] = False,
    yes: Annotated[bool, Parameter(negative=())] = False,
) -> None:
    """End everything that `up` started, after a question where machines are rented: they run on.
    Files, blocks and snapshots stay.

    Args:
        machines: Also end the processes of local machines; their files stay.
        yes: Do not ask, and do not look whether machines are rented.
    """
    from deployments.down import down as end
    from deployments.down import runs, served
    from deployments.installation import Installation

    installation = Installation.here()
    if not yes and runs(installation):
        _ask_to_leave_rented(served(installation))
    said = StringIO()
    try:
        with Waiting("ending workers, store and Prefect server"), redirect_stdout(said):
            end(installation, machines=machines)
    finally:
        if words := said.getvalue().rstrip():
            say(words)


def _ask_to_leave_rented(served: str | None) -> None:
    """Ask before the processes end that look after rented machines. ``served``: the server that
    these processes serve, if known. InvalidInput if nobody can answer, RunCancelled after a no."""
    from torpor.control.own_server import API_URL, LOGIN_VARIABLE, choose_server, own_server
    from torpor_cli.output import print_rows
    from torpor_cli.question import agrees
    from torpor_cli.server import connected

    try:
        if (own := own_server()) and own.api_url == served:  # whatever else this shell names
            os.environ[API_URL], os.environ[LOGIN_VARIABLE] = own
        elif choice := choose_server():
            taken = choice.taken
            # The login that is known here belongs to the other server, and goes to no other one.
            if taken.api_url != served if served else taken.source == "connection":
                raise InvalidInput(  # noqa: TRY301 - as any other reason
                    f"the workers of this host serve {served or 'a server that is not known'}, and "
                    f"{taken.api_url} ({taken.named_by}), which commands use, knows nothing of them"
                )
        with connected():
            from tasks.rented import rented_now

            with Waiting("asking which machines are rented"):
                rented = rented_now()
    except Exception as error:  # noqa: BLE001 - a server that fails must not keep torpor from ending
        said = f"Nobody can say which machines are rented: {error}"
    else:
        if not rented.rows():
            return
        print_rows(rented.rows(), wide=True)
        said = f"{rented.title()}."
    said += (
        " They cost money while torpor is down, and watch, schedules and budgets stop: nothing "
        "hibernates them. `torpor hibernate WORKSPACE` stores and ends one first."
    )
    if not sys.stdin.isatty():
        raise InvalidInput(
            f"{said} Nobody is at the terminal to answer, and nothing was ended: add --yes "
            "(`make down YES=1`) to leave them running"
        )
    say(said)
    if not agrees("End torpor all the same?"):
        raise RunCancelled("torpor runs on: nothing was ended")


def boot() -> None:
    """Write a unit of systemd that starts everything with the host, or say what to add to cron."""
    from deployments.boot import set_up

    set_up()
