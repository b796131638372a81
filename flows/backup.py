"""Backup: a snapshot on a schedule that keeps the machine, then retention; and a check that it
ran.
"""

from __future__ import annotations

from typing import Annotated, TypeAlias

from pydantic import Field

from blocks import Workspace
from flows.flow import flow
from flows.hibernate import store_workspace
from flows.phases import Phases
from tasks.events import BackupFailed, BackupFinished, BackupMissed, emit
from tasks.opening import open_workspace
from tasks.retention import apply_retention, judge_snapshots, look_at_newest
from tasks.runner import runner
from tasks.workspace import OpenWorkspace
from torpor.control.upkeep.reports import BackupReport, FreshnessReport
from torpor.control.upkeep.retention import MOST_KEPT, Retention
from torpor.shared.errors import TorporError

Count: TypeAlias = Annotated[int, Field(ge=0, le=MOST_KEPT)]


@flow("backup")
def backup(
    workspace: Workspace | str,
    keep_last: Count = 0,
    keep_hourly: Count = 0,
    keep_daily: Count = 0,
    keep_weekly: Count = 0,
    keep_monthly: Count = 0,
    keep_yearly: Count = 0,
    timezone: str = "UTC",
    dry_run: bool = False,
    machine: str = "",
    accept_changed: list[str] = [],  # noqa: B006 - a form shows the default; it is never changed
) -> BackupReport:
    """Take a snapshot, keep the machine, and then delete old snapshots that no rule keeps.

    A snapshot stays if any rule keeps it. The newest and all pinned snapshots stay. With all
    numbers at 0, nothing is deleted. Nothing is deleted before the new snapshot is verified.

    Args:
        workspace: The Workspace block to back up, or its name.
        keep_last: Keep the newest N snapshots.
        keep_hourly: Keep the newest snapshot of each of the last N hours that have one.
        keep_daily: Keep the newest snapshot of each of the last N days that have one.
        keep_weekly: Keep the newest snapshot of each of the last N weeks that have one.
        keep_monthly: Keep the newest snapshot of each of the last N months that have one.
        keep_yearly: Keep the newest snapshot of each of the last N years that have one.
        timezone: The time zone of days, such as Europe/Berlin.
        dry_run: Take and delete nothing. Show what the next backup would delete, and why the rest
            stays.
        machine: The machine, if the workspace is on several: its id, or user@host:port for a
            machine of your own. Empty: the workspace's only machine.
        accept_changed: Patterns of files that may change while they are read, such as *.log.
    """
    retention = Retention(
        keep_last, keep_hourly, keep_daily, keep_weekly, keep_monthly, keep_yearly, timezone
    )
    opened = open_workspace(workspace)
    if dry_run:
        verdicts = judge_snapshots(opened, retention, and_a_new_one=True)
        report = BackupReport(opened.spec.name, None, None, verdicts, [])
    else:
        try:
            report = _take_and_expire(opened, retention, machine, accept_changed)
        except Exception as error:
            emit(
                BackupFailed(
                    workspace=opened.spec.name, error=type(error).__name__, message=str(error)
                )
            )
            raise
    runner().table(
        key=f"backup-{opened.spec.name}",
        rows=report.rows(),
        description=_described(report),
    )
    return report


@flow("check-backup")
def check_backup(
    workspace: Workspace | str, most_hours: Annotated[float, Field(gt=0, le=24 * 366)] = 26.0
) -> FreshnessReport:
    """Check that the newest snapshot is young enough; otherwise fail and send an event.

    The check also fails if the store does not answer.

    Args:
        workspace: The Workspace block whose backups are checked, or its name.
        most_hours: The highest age of the newest snapshot, in hours. 26 suits a daily backup.
    """
    opened = open_workspace(workspace)
    try:
        report = look_at_newest(opened, most_hours)
    except TorporError as error:
        emit(
            BackupMissed(workspace=opened.spec.name, expected_hours=most_hours, message=str(error))
        )
        raise
    runner().table(
        key=f"check-backup-{opened.spec.name}",
        rows=report.rows(),
        description=f"Workspace {opened.spec.name} has a backup that is young enough",
    )
    return report


def _take_and_expire(
    opened: OpenWorkspace,
    retention: Retention,
    machine: str,
    accept_changed: list[str],
) -> BackupReport:
    hibernated, verified = store_workspace(opened, Phases(), False, machine, accept_changed)
    verdicts = judge_snapshots(opened, retention, and_a_new_one=False)
    deleted = apply_retention(opened, verified, verdicts)
    emit(BackupFinished(workspace=opened.spec.name, snapshot=verified.snapshot, deleted=deleted))
    return BackupReport(opened.spec.name, verified.snapshot, hibernated, verdicts, deleted)


def _described(report: BackupReport) -> str:
    if report.dry_run:
        going = sum(not verdict.kept for verdict in report.verdicts)
        return (
            f"Workspace {report.workspace}: the next backup would keep "
            f"{len(report.verdicts) - going} snapshots, itself included, and delete {going}"
        )
    return (
        f"Workspace {report.workspace} backed up as {report.snapshot}; "
        f"{len(report.deleted)} old snapshots deleted"
    )
