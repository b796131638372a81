"""Runs an action for each workspace of the installation that has a rented machine."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Final

from tasks.run_table import shown
from tasks.runner import runner
from tasks.workspace import OpenWorkspace
from tasks.workspace_blocks import open_all
from torpor.control.rental.records import Rental
from torpor.control.upkeep.reports import EachReport
from torpor.shared.errors import InvalidInput

NOT_RENTED: Final = "nothing: it has no rented machine. Name a machine of your own in a run for it"


def act_on_each(heading: str, act: Callable[[str, OpenWorkspace, list[Rental]], str]) -> EachReport:
    """Call ``act`` for each Workspace block that has rented machines, also after a failure; raises
    the first failure."""
    opened, closed = open_all(runner().workspaces())
    blocks = Counter(workspace.spec.name for workspace in opened.values())
    failures: dict[str, Exception] = {**closed}
    results: dict[str, str] = {}
    for block, workspace in opened.items():
        try:
            name, rentals = workspace.spec.name, workspace.rentals.open()
            rented = [rental for rental in rentals if rental.state == "handed over"]
            if rented and blocks[name] > 1:
                failures[block] = InvalidInput(
                    f"{blocks[name]} blocks are for workspace {name}, and may keep "
                    "different folders: delete all but one, or run this flow for one by name"
                )
            else:
                results[block] = act(block, workspace, rented) if rented else NOT_RENTED
        except Exception as fault:  # noqa: BLE001 - the other workspaces come all the same
            failures[block] = fault
    for block, failure in failures.items():
        runner().log.error("workspace block %s: %s", block, failure)
        results[block] = f"failed: {failure}"
    report = EachReport(heading, results)
    for failure in failures.values():
        raise shown(report, failure)
    return report
