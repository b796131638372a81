"""Commands about snapshots."""

from __future__ import annotations

from typing import Annotated, Literal

from cyclopts import Parameter

from torpor_cli.flow_runs import Options, run

Flag = Annotated[bool, Parameter(negative=())]
Several = Annotated[list[str] | None, Parameter(negative=())]


def snapshots(
    workspace: str, snapshot: str = "", *, find: str = "", options: Options | None = None
) -> None:
    """List the snapshots of a workspace, or the files of one, or find a file in them.

    Args:
        workspace: The workspace.
        snapshot: A snapshot, or newest, to list its files.
        find: A name or the end of a path, such as *.txt, to list its versions.
    """
    run("snapshots", options, workspace=workspace, snapshot=snapshot, find=find)


def backup(
    workspace: str,
    *,
    machine: str = "",
    keep_daily: int = 0,
    keep_weekly: int = 0,
    keep_monthly: int = 0,
    dry_run: Flag = False,
    options: Options | None = None,
) -> None:
    """Take a snapshot, keep the machine, and thin old snapshots if a number says how many to keep.

    Args:
        workspace: The workspace, or "all workspaces".
        machine: The machine, as its id or user@host:port, where there are several.
        keep_daily: How many of the newest days keep a snapshot.
        keep_weekly: How many of the newest weeks keep one.
        keep_monthly: How many of the newest months keep one.
        dry_run: Show what would be deleted, and delete nothing.
    """
    run(
        "backup",
        options,
        workspace=workspace,
        machine=machine,
        keep_daily=keep_daily,
        keep_weekly=keep_weekly,
        keep_monthly=keep_monthly,
        dry_run=dry_run,
    )


def restore(
    workspace: str,
    path: str,
    into: str,
    *,
    snapshot: str = "newest",
    machine: str = "here",
    move_aside: Flag = False,
    leave_git: Annotated[bool | None, Parameter(negative="--with-git")] = None,
    options: Options | None = None,
) -> None:
    """Restore one file or directory of a snapshot, to this host unless a machine is named.

    Args:
        workspace: The workspace.
        path: The file or directory, as the snapshot names it.
        into: The directory to restore it into.
        snapshot: The snapshot.
        machine: here, the id of the workspace's machine, or user@host:port.
        move_aside: Rename what is in the way.
        leave_git: Leave out each .git below the path, and each file HEAD, and name them: git would
            run here what a machine wrote there. To this host they are left out unless --with-git
            is given.
    """
    if leave_git is None:
        leave_git = machine.strip() == "here"
    run(
        "restore_path",
        options,
        workspace=workspace,
        path=path,
        into=into,
        snapshot=snapshot,
        machine=machine,
        move_aside=move_aside,
        leave_git=leave_git,
    )


def verify(
    workspace: str,
    snapshot: str = "newest",
    *,
    depth: Literal["quick", "full", "drill"] = "quick",
    options: Options | None = None,
) -> None:
    """Check that a snapshot is whole in the store.

    Args:
        workspace: The workspace.
        snapshot: The snapshot, newest, or all.
        depth: quick compares sizes and checksums, full reads every byte, drill restores it.
    """
    run("verify", options, workspace=workspace, snapshot=snapshot, depth=depth)


def prune(workspace: str, *, dry_run: bool = True, options: Options | None = None) -> None:
    """Delete stored data that no snapshot uses, a day after an earlier prune marked it.

    Args:
        workspace: A workspace in the store.
        dry_run: Only show what would be freed. --no-dry-run frees it.
    """
    run("prune", options, workspace=workspace, dry_run=dry_run)
