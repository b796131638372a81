"""Backup: a snapshot on a schedule that keeps the machine, then retention; of one workspace, or of
all. `watch` alerts of a backup that does not come."""

from __future__ import annotations

from typing import Annotated, Any, TypeAlias

from pydantic import Field

from blocks import Workspace
from flows.procedures.each_workspace import act_on_each
from flows.procedures.save import back_up
from tasks.events import BackupFailed, BackupFinished, emit
from tasks.flow import flow
from tasks.machines import chosen_machine, open_session
from tasks.ownership import why_only_adds, why_only_reported
from tasks.retention import apply_retention, judge_snapshots
from tasks.runner import runner
from tasks.sleep import asleep
from tasks.workspace import OpenWorkspace
from tasks.workspace_blocks import open_workspace, probe_store
from torpor.control.rental.records import Rental
from torpor.control.reports import ALL, AsleepReport
from torpor.control.upkeep.reports import BackupReport, EachReport
from torpor.control.upkeep.retention import MOST_KEPT, Retention
from torpor.shared.errors import InvalidInput, WorkspaceAsleep
from torpor.shared.values import SnapshotId

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
) -> BackupReport | EachReport | AsleepReport:
    """Take a snapshot, keep the machine, and then delete old snapshots that no rule keeps.

    A snapshot stays if any rule keeps it. The rules look at the workspace, and at each line of
    snapshots that go on from one another alone. The newest and all pinned snapshots stay. With all
    numbers at 0, nothing is deleted. Nothing is deleted before the new snapshot is verified.
    For all workspaces, a run of its own backs up each rented machine.

    Args:
        workspace: The Workspace block to back up, its name, or `all workspaces`.
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

    Returns:
        The new snapshot and what retention decided. With `dry_run`, `snapshot` is None and
        `verdicts` say what the next backup would delete. For all workspaces: what became of each.
        Of a workspace that sleeps: its newest snapshot; nothing is stored, and nothing deleted.

    Raises:
        StillChanging: Files changed in every pass, and no pattern accepts that.
        WorkspaceInvalid: A directory of the workspace is missing, empty or unreadable.
        HookFailed: The quiesce command or the resume command ended with an error.
        WorkspaceBusy: Another run holds this workspace on this machine.
        InvalidInput: The workspace is on several machines and `machine` names none.

    Example:
        Back up, and keep 7 daily and 5 weekly snapshots:
        ```python
        from flows import backup

        report = backup("mywork", keep_daily=7, keep_weekly=5)
        print(report.snapshot, report.deleted)
        ```
    """
    retention = Retention(
        keep_last, keep_hourly, keep_daily, keep_weekly, keep_monthly, keep_yearly, timezone
    )
    if workspace == ALL:
        if machine:
            raise InvalidInput(
                f"machine {machine} holds one workspace, and all are to be backed up: leave the "
                f"machine out, or name its workspace: `torpor backup WORKSPACE --machine {machine}`"
            )
        return _back_up_each(
            keep_last=keep_last,
            keep_hourly=keep_hourly,
            keep_daily=keep_daily,
            keep_weekly=keep_weekly,
            keep_monthly=keep_monthly,
            keep_yearly=keep_yearly,
            timezone=timezone,
            dry_run=dry_run,
            accept_changed=accept_changed,
        )
    opened = open_workspace(workspace)
    if dry_run:
        verdicts = judge_snapshots(opened, retention, and_a_new_one=True, machine=machine)
        return BackupReport(opened.spec.name, None, None, verdicts, [])
    try:
        return _take_and_expire(opened, retention, machine, accept_changed)
    except WorkspaceAsleep as error:
        return asleep(opened, error)
    except Exception as error:
        emit(
            BackupFailed(workspace=opened.spec.name, error=type(error).__name__, message=str(error))
        )
        raise


def _back_up_each(**options: Any) -> EachReport:
    """Start a run of ``backup`` for each rented machine."""

    def start(block: str, opened: OpenWorkspace, rented: list[Rental]) -> str:
        runs = [
            runner().start(
                backup,
                f"{runner().run}-{block}-{rental.machine}",
                workspace=block,
                machine=str(rental.machine),
                **options,
            )
            or "this run"
            for rental in rented
        ]
        return f"{' and '.join(runs)} for its backup"

    return act_on_each("Backups of all workspaces", start)


def _take_and_expire(
    opened: OpenWorkspace,
    retention: Retention,
    machine: str,
    accept_changed: list[str],
) -> BackupReport:
    opened = opened.accepting_losses(accept_changed, [])
    probe_store(opened)
    why = why_only_adds(opened)
    live = chosen_machine(opened, machine, to_store=True, sweeps=not why)
    with open_session(opened, live, sleeps=True) as session:
        hibernated, verified = back_up(opened, session, live, only_adds=bool(why))
    verdicts = judge_snapshots(opened, retention, and_a_new_one=False)
    deleted: list[SnapshotId] = []
    if not all(one.kept for one in verdicts):
        why = why or why_only_reported(opened)  # the save has taken hours
    if why:
        runner().log.warning("no older snapshot is deleted: %s", why)
    elif hibernated.missed:
        runner().log.warning("no older snapshot is deleted: they may hold what this one lacks")
    else:
        verdicts, deleted = apply_retention(opened, verified, verdicts)
    emit(BackupFinished(workspace=opened.spec.name, snapshot=verified.snapshot, deleted=deleted))
    return BackupReport(opened.spec.name, verified.snapshot, hibernated, verdicts, deleted)
