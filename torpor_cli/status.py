"""The command that shows all workspaces."""

from __future__ import annotations

from deployments.terminal import Waiting
from torpor_cli.flow_runs import Format
from torpor_cli.output import print_report
from torpor_cli.server import connected


def status(*workspace: str, options: Format | None = None) -> None:
    """Show all workspaces: asleep or awake, machine, cost, newest snapshot, jobs.

    Args:
        workspace: Only these workspaces.
    """
    with connected():
        from blocks import Workspace
        from blocks.reference import saved_names
        from tasks.overview import look_at_all
        from tasks.prefect_alerts import PrefectAlerts

        there = saved_names(Workspace)
        for name in {*workspace} - {*there}:
            Workspace.of(name)  # a wrong name is an error here, a damaged block becomes a row
        with Waiting("looking at the workspaces"):
            report = look_at_all(workspace or there, PrefectAlerts())
        chosen = options or Format()
        print_report(report, as_json=chosen.json, wide=chosen.wide)
