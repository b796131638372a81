"""Restore path: one file or directory of a snapshot, onto a machine, beside what is there."""

from __future__ import annotations

from contextlib import suppress

from blocks import Workspace
from flows.flow import flow
from flows.phases import Phases
from tasks.machines import endpoint_of, find_machine, open_session, own_machine
from tasks.opening import open_workspace, probe_store
from tasks.progress import Progress
from tasks.restore import (
    NEWEST,
    begin_restore,
    check_restore,
    choose_path,
    finish_restore,
    pick_snapshot,
    restore_part,
)
from tasks.runner import runner
from tasks.workspace import OpenWorkspace
from torpor.control.remote.paths import RemotePath
from torpor.control.remote.restore import RestorePlan
from torpor.control.upkeep.reports import PathReport
from torpor.shared.errors import TorporError


@flow("restore-path")
def restore_path(
    workspace: Workspace | str,
    path: str,
    into: str,
    snapshot: str = NEWEST,
    machine: str = "",
    move_aside: bool = False,
) -> PathReport:
    """Bring one file or directory of a snapshot back, into a directory on a machine.

    Nothing on the machine is overwritten or deleted. It appears at its place once every byte has
    been compared.

    Args:
        workspace: The Workspace block that the snapshot is of, or its name.
        path: What to bring back, as `find` shows it, such as ~/workspace/notes/a.txt; or below the
            workspace's directory, such as notes/a.txt.
        into: The directory on the machine that it is put into. It is made where it is missing.
        snapshot: Which snapshot: its id, or newest.
        machine: Which machine, when the workspace is on several: its id, or user@host:port for a
            machine of your own. Empty: the workspace's only machine.
        move_aside: When the directory has something of that name already, rename that to
            NAME.before-SNAPSHOT. Off: refuse.
    """
    phases = Phases()
    with phases.phase("prepare"):
        opened = open_workspace(workspace)
        probe_store(opened)
        wanted = pick_snapshot(opened, snapshot)
        chosen = choose_path(opened, wanted, path)
        live = own_machine(machine) if "@" in machine else find_machine(opened, machine)
        session = open_session(opened, endpoint_of(live))
    with session:
        restore = RemotePath(
            session,
            opened.store,
            wanted,
            opened.key,
            runner().run,
            chosen,
            into=into,
            aside=move_aside,
            spec=opened.spec,
        )
        try:
            with phases.phase("plan"):
                plan = begin_restore(restore, resume=False)
            with phases.phase("restore"):
                _restore_parts(opened, restore, plan)
                finished = finish_restore(restore)
            with phases.phase("check"):
                check_restore(restore, full=True)
        finally:
            with suppress(TorporError):  # the agent gives up by itself when it cannot be told
                restore.end()
    report = PathReport(
        workspace=opened.spec.name,
        snapshot=wanted.snapshot,
        path=path,
        machine=live.id,
        restored_to=plan.roots[0],
        files=finished.files,
        bytes=finished.bytes,
        stored_bytes=plan.stored_bytes,
        warnings=finished.warnings,
        seconds=phases.seconds,
    )
    runner().table(
        key=f"restore-path-{opened.spec.name}",
        rows=report.rows(),
        description=f"{path} of snapshot {wanted.snapshot} is at {report.restored_to}",
    )
    return report


def _restore_parts(opened: OpenWorkspace, restore: RemotePath, plan: RestorePlan) -> None:
    name = opened.spec.name
    progress = Progress(
        f"restore-path-{name}-progress",
        f"Workspace {name} from {restore.wanted.snapshot}",
        sum(part.bytes for part in plan.parts),
    )
    futures = [restore_part.submit(restore, part, progress) for part in plan.parts]
    for future in futures:
        future.result()
    progress.done()
