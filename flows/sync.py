"""Sync: bring a machine that holds an earlier state of a workspace to another one."""

from __future__ import annotations

from msgspec.structs import replace

from blocks import Workspace
from flows.procedures.save import back_up
from flows.procedures.sync import Synchronisation
from tasks.autosave import start_autosave
from tasks.flow import flow
from tasks.jobs import check_not_frozen
from tasks.lineage import lacks, look_for_work_elsewhere
from tasks.machines import chosen_machine, open_session
from tasks.ownership import check_owner
from tasks.phases import measured_phases, phase
from tasks.restore import NEWEST, pick_snapshot_to_sync
from tasks.workspace_blocks import open_workspace, probe_store
from torpor.control.reports import SyncReport
from torpor.shared.values import SnapshotId


@flow("sync")
def sync(
    workspace: Workspace | str,
    snapshot: str = NEWEST,
    machine: str = "",
    save_first: bool = False,
    discard_local: bool = False,
    full_check: bool = False,
    accept_paths: list[str] = [],  # noqa: B006 - a form shows the default; it is never changed
) -> SyncReport:
    """Bring a machine that holds an earlier state of a workspace to another snapshot.

    Only what differs is fetched. If files on the machine are in no snapshot, nothing is changed and
    the error names them, unless you save them first or accept their loss. Nothing is changed either
    if the newest snapshot lacks the work of another one: name the one to sync to.

    Args:
        workspace: The Workspace block to sync, or its name.
        snapshot: The snapshot's id, or newest.
        machine: The machine, if the workspace is on several: its id, or user@host:port for a
            machine of your own. Empty: the workspace's only machine.
        save_first: Take a snapshot of the machine before anything is changed. The machine then gets
            the snapshot that was the newest before, or the named one.
        discard_local: Accept the loss of changes on the machine that no snapshot has.
        full_check: Read and hash every file at the end, not only the written ones.
        accept_paths: Directories of the snapshot that are not among the workspace's paths, to
            change all the same. Without them such a snapshot is refused.

    Returns:
        What was `written`, `removed` and `kept`, and in `saved` the snapshot that `save_first`
        took.

    Raises:
        UnsavedWork: Files on the machine are in no snapshot. Nothing was changed.
        LacksWork: The newest snapshot lacks the work of another one. Name the one to sync to.
        WorkspaceInvalid: A file that would change has the flag +i or +a, or a directory is missing.
        WorkspaceAsleep: The workspace was hibernated: wake it instead.
        WorkspaceBusy: Another run holds this workspace on this machine.
        Recovered: Another control side has recovered the workspace, and owns it.

    Example:
        Bring your second machine up to date:
        ```python
        from flows import sync

        print(sync("mywork", machine="ubuntu@203.0.113.8").written)
        ```
    """
    opened = open_workspace(workspace).accepting(accept_paths)
    probe_store(opened)
    check_owner(opened)
    wanted, line = pick_snapshot_to_sync(opened, snapshot)
    live = chosen_machine(opened, machine)
    check_not_frozen(opened, live)
    saved: SnapshotId | None = None
    with open_session(opened, live) as session:
        if save_first:
            with phase("save"), measured_phases():
                saved = back_up(opened, session, live)[0].snapshot
        lacking = lacks(opened.spec.name, wanted.snapshot, look_for_work_elsewhere(opened, line))
        report = Synchronisation(opened, session, live.id, wanted).run(
            saved=saved, discard_local=discard_local, full_check=full_check
        )
        start_autosave(opened, session, live)
    return replace(report, warnings=[*lacking, *report.warnings])
