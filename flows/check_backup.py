"""Check backup: whether the newest verified snapshot of one workspace, or of each, is young
enough."""

from __future__ import annotations

import time
from typing import Annotated, Final

from pydantic import Field

from blocks import Workspace
from flows.procedures.each import act_on_each
from tasks.events import BackupMissed, emit
from tasks.flow import flow
from tasks.opening import open_workspace
from tasks.publishing import show
from tasks.retention import look_at_newest
from tasks.workspace import OpenWorkspace
from torpor.control.rental.records import Rental
from torpor.control.reports import ALL
from torpor.control.upkeep.reports import EachReport, FreshnessReport
from torpor.shared.errors import TorporError

DAILY_HOURS: Final = 26.0
"""A day between backups, and two hours more."""


@flow("check-backup")
def check_backup(
    workspace: Workspace | str = ALL,
    most_hours: Annotated[float, Field(gt=0, le=24 * 366)] = DAILY_HOURS,
) -> FreshnessReport | EachReport:
    """Check that the newest verified snapshot is young enough; otherwise fail and send an event.

    The check also fails if the store does not answer. Of all workspaces, those are checked that
    have had a rented machine for that long.

    Args:
        workspace: The Workspace block whose backups are checked, its name, or `all workspaces`.
        most_hours: The highest age of the newest snapshot, in hours. 26 suits a daily backup.
    """
    if workspace == ALL:
        return _check_each(most_hours)
    return _check(open_workspace(workspace), most_hours)


def _check(opened: OpenWorkspace, most_hours: float) -> FreshnessReport:
    try:
        return look_at_newest(opened, most_hours)
    except TorporError as error:
        emit(
            BackupMissed(workspace=opened.spec.name, expected_hours=most_hours, message=str(error))
        )
        raise


def _check_each(most_hours: float) -> EachReport:
    def check(block: str, opened: OpenWorkspace, rented: list[Rental]) -> str:
        if time.time() - min(rental.created_unix for rental in rented) < most_hours * 3600:
            return f"nothing: its machine was rented less than {most_hours:g} hours ago"
        report = _check(opened, most_hours)
        show(report)
        return f"{report.newest} is young enough"

    return act_on_each("The newest snapshots of all workspaces", check)
