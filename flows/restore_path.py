"""Restore path: one file or directory of a snapshot, onto a machine, without overwriting."""

from __future__ import annotations

import os

from blocks import Workspace
from flows.procedures.restore import restore_all, restore_run
from tasks.flow import flow
from tasks.flow_host import HERE, session_here
from tasks.machines import chosen_machine, open_session
from tasks.phases import seconds_by_phase
from tasks.restore import NEWEST, choose_path, pick_snapshot
from tasks.runner import runner
from tasks.workspace_blocks import block_of, open_stored, open_workspace, probe_store
from torpor.control.remote.paths import RemotePath
from torpor.control.upkeep.reports import PathReport


@flow("restore-path")
def restore_path(
    workspace: Workspace | str,
    path: str,
    into: str,
    snapshot: str = NEWEST,
    machine: str = "",
    move_aside: bool = False,
    leave_git: bool = False,
    accept_paths: list[str] = [],  # noqa: B006 - a form shows the default; it is never changed
) -> PathReport:
    """Restore one file or directory of a snapshot into a directory on a machine.

    Nothing on the machine is overwritten or deleted. The file appears in the directory after every
    byte was compared.

    Args:
        workspace: The Workspace block that the snapshot is of, or its name; home--NAME for what was
            stored of a home beside it.
        path: The path, as `snapshots` shows it, such as ~/workspace/notes/a.txt; or below the
            workspace's directory, such as notes/a.txt.
        into: The target directory on the machine. It is created if it is missing.
        snapshot: The snapshot's id, or newest.
        machine: The machine, if the workspace is on several: its id, or user@host:port for a
            machine of your own; "here" for the host on which the flow runs. Empty: the workspace's
            only machine.
        move_aside: If the directory already has that name, rename the old one to
            NAME.before-SNAPSHOT. Off: refuse.
        leave_git: Leave out each .git below the path, and name it in the report: git would run here
            what a machine wrote there.
        accept_paths: Directories of the snapshot that are not among the workspace's paths, to
            restore from all the same. Without them such a snapshot is refused.

    Returns:
        In `restored_to`, where the file or directory is now, with its `files` and `bytes`.

    Raises:
        InvalidInput: The snapshot has no such path, or the target has that name already.
        WorkspaceAsleep: `machine` is empty, and the workspace was hibernated.
        SnapshotMissing: There is no snapshot of that id.
        SnapshotDamaged: A restored byte differs from the snapshot, or the store lacks a pack.
        DiskFull: The target has no room.

    Example:
        Bring one file to this host:
        ```python
        from flows import restore_path

        print(restore_path("mywork", "notes/a.txt", "~/recovered", machine="here").restored_to)
        ```
    """
    opened = open_stored(workspace).accepting(accept_paths)
    probe_store(opened)
    wanted = pick_snapshot(opened, snapshot)
    chosen = choose_path(opened, wanted, path)
    here = machine.strip() == HERE
    awake = opened if here else open_workspace(block_of(workspace))
    live = None if here else chosen_machine(awake, machine)
    with session_here(opened) if live is None else open_session(awake, live) as session:
        restore = RemotePath(
            session,
            opened.store,
            wanted,
            opened.key,
            runner().run,
            chosen,
            into=os.path.expanduser(into) if here else into,
            aside=move_aside,
            leave_git=leave_git,
            spec=opened.spec,
        )
        with restore_run(restore):
            restore_all(restore, "restore-path")
    return PathReport(
        workspace=opened.spec.name,
        snapshot=wanted.snapshot,
        path=path,
        machine=HERE if live is None else live.id,
        restored_to=restore.plan.roots[0],
        moved_aside=restore.moved_aside,
        files=restore.finished.files,
        bytes=restore.finished.bytes,
        stored_bytes=restore.plan.stored_bytes,
        warnings=restore.finished.warnings,
        seconds=seconds_by_phase(),
    )
