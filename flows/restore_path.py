"""Restore path: one file or directory of a snapshot, onto a machine, beside what is there."""

from __future__ import annotations

from contextlib import suppress

from prefect import flow
from prefect.artifacts import create_table_artifact
from prefect.runtime import flow_run
from prefect.task_runners import ThreadPoolTaskRunner

from blocks import Workspace
from flows.hibernate import PARTS_AT_ONCE
from flows.phases import Phases
from flows.run_name import run_name
from tasks.machines import endpoint_of, find_machine, open_session, own_machine
from tasks.place import Place, open_place, probe_store
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
from torpor.control.remote.paths import RemotePath
from torpor.control.remote.restore import RestorePlan
from torpor.control.upkeep.reports import PathReport
from torpor.shared.errors import TorporError


@flow(
    name="restore-path",
    flow_run_name=run_name,
    task_runner=ThreadPoolTaskRunner(max_workers=PARTS_AT_ONCE),  # type: ignore[arg-type]
    persist_result=False,
)
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
        place = open_place(workspace)
        probe_store(place)
        wanted = pick_snapshot(place, snapshot)
        chosen = choose_path(place, wanted, path)
        live = own_machine(machine) if "@" in machine else find_machine(place, machine)
        session = open_session(place, endpoint_of(live))
    with session:
        restore = RemotePath(
            session,
            place.store,
            wanted,
            place.key,
            str(flow_run.id),
            chosen,
            into=into,
            aside=move_aside,
            spec=place.spec,
        )
        try:
            with phases.phase("plan"):
                plan = begin_restore(restore, resume=False)
            with phases.phase("restore"):
                _restore_parts(place, restore, plan)
                finished = finish_restore(restore)
            with phases.phase("check"):
                check_restore(restore, full=True)
        finally:
            with suppress(TorporError):  # the agent gives up by itself when it cannot be told
                restore.end()
    report = PathReport(
        workspace=place.spec.name,
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
    create_table_artifact(
        key=f"restore-path-{place.spec.name}",
        table=report.rows(),
        description=f"{path} of snapshot {wanted.snapshot} is at {report.restored_to}",
    )
    return report


def _restore_parts(place: Place, restore: RemotePath, plan: RestorePlan) -> None:
    name = place.spec.name
    progress = Progress(
        f"restore-path-{name}-progress",
        f"Workspace {name} from {restore.wanted.snapshot}",
        sum(part.bytes for part in plan.parts),
    )
    futures = [restore_part.submit(restore, part, progress) for part in plan.parts]
    for future in futures:
        future.result()
    progress.done()
