"""The command that takes over a machine that the user rents already."""

from __future__ import annotations

import sys
from typing import Annotated

from cyclopts import Parameter

from torpor.shared.errors import InvalidInput, RunCancelled
from torpor_cli.flow_runs import Format
from torpor_cli.output import print_report, quiet
from torpor_cli.question import agrees
from torpor_cli.server import connected

Flag = Annotated[bool, Parameter(negative=())]


def adopt(
    workspace: str,
    machine: str = "",
    *,
    price: float = 0.0,
    host_key: str = "",
    yes: Flag = False,
    release: Flag = False,
    options: Format | None = None,
) -> None:
    """Take over a machine that you rent already. From then on torpor may DESTROY it, with proof.

    torpor adopt mywork vast:12345

    Args:
        workspace: The workspace that the machine holds.
        machine: The market or the provider block, and the machine's id there.
        price: What it costs, in dollars an hour; 0 where the market states it.
        host_key: The only host key that it may show. Otherwise you are shown the first one.
        yes: Do not ask.
        release: Give the adopted machine up. It runs on, and torpor never ends it.
    """
    chosen = options or Format()
    if not release and not machine:
        raise InvalidInput("name the machine: `torpor adopt mywork vast:12345`, or use --release")
    if not (release or yes or (sys.stdin.isatty() and not chosen.json)):
        raise InvalidInput(
            f"adopting {machine} lets torpor destroy it, with proof. Nobody is at the terminal to "
            "answer, or JSON was asked for: add --yes"
        )
    with connected(), quiet(chosen.json):
        import flows

        if not (release or yes):
            seen = flows.adopt(workspace, machine, price, host_key)
            print_report(seen, as_json=False, wide=chosen.wide)
            if not agrees("Let torpor store this machine, prove that, and then DESTROY it?"):
                raise RunCancelled("nothing was adopted")
            host_key = seen.host_key  # the key that the question has shown
        report = flows.adopt(workspace, machine, price, host_key, dry_run=False, release=release)
        print_report(report, as_json=chosen.json, wide=chosen.wide)
