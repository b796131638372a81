"""Sync: bring a machine that holds an earlier state of a workspace to another one."""

from __future__ import annotations

from contextlib import suppress
from typing import Final

from blocks import Workspace
from flows.procedures.parts import do_parts
from flows.procedures.phases import Phases
from flows.procedures.snapshot import back_up
from tasks.flow import flow
from tasks.machines import chosen_machine, open_session
from tasks.opening import open_workspace, probe_store
from tasks.restore import NEWEST, pick_snapshot
from tasks.runner import runner
from tasks.sync import begin_sync, check_sync, finish_sync, stage, sync_part
from tasks.workspace import StoredWorkspace
from torpor.control.remote.seam import Agent
from torpor.control.remote.sync import RemoteSync
from torpor.control.reports import SyncReport
from torpor.shared.errors import StillChanging, TorporError
from torpor.shared.values import MachineId, SnapshotId, StoredSnapshot
from torpor.shared.wire.sync import SyncPlan

MAX_ROUNDS: Final = 3
"""Tries before giving up on a machine whose files change while they are synced."""


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
    the error names them, unless you save them first or accept their loss.

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
    """
    phases = Phases()
    with phases.phase("prepare"):
        opened = open_workspace(workspace).accepting(accept_paths)
        probe_store(opened)
        wanted = pick_snapshot(opened, snapshot)
        live = chosen_machine(opened, machine)
    saved: SnapshotId | None = None
    with phases.phase("connect"):
        session = open_session(opened, live)
    with session:
        if save_first:
            with phases.phase("save"):
                saved = back_up(opened, session, live, Phases())[0].snapshot
        report = Synchronisation(opened, session, live.id, wanted, phases).run(
            saved=saved, discard_local=discard_local, full_check=full_check
        )
    runner().table(
        key=f"sync-{opened.spec.name}",
        rows=report.rows(),
        description=f"Workspace {opened.spec.name} synced to {wanted.snapshot}",
    )
    return report


class Synchronisation:
    """The order of one sync over an open session."""

    def __init__(
        self,
        workspace: StoredWorkspace,
        session: Agent,
        machine: MachineId,
        wanted: StoredSnapshot,
        phases: Phases,
    ) -> None:
        self._workspace = workspace
        self._session = session
        self._machine = machine
        self._wanted = wanted
        self._phases = phases

    def run(
        self,
        *,
        saved: SnapshotId | None = None,
        discard_local: bool = False,
        full_check: bool = False,
    ) -> SyncReport:
        for number in range(1, MAX_ROUNDS + 1):
            remote = RemoteSync(
                self._session,
                self._workspace.store,
                self._wanted,
                self._workspace.spec,
                self._workspace.key,
                f"{runner().run}-sync-{number}",
                discard_local=discard_local,
            )
            try:
                return self._round(remote, saved, full_check)
            except StillChanging as error:
                # the user works there: look again, and keep or refuse the changes
                if number == MAX_ROUNDS:
                    raise
                runner().log.warning("another round: %s", error)
            finally:
                with suppress(TorporError):  # an agent that cannot be reached ends the run itself
                    remote.end()
        raise AssertionError("the last round returns or raises")

    def _round(self, remote: RemoteSync, saved: SnapshotId | None, full_check: bool) -> SyncReport:
        with self._phases.phase("look"):
            intent = begin_sync(remote)
        with self._phases.phase("stage"):
            plan = stage(remote)
        with self._phases.phase("fetch"):
            self._fetch(remote, plan)
        with self._phases.phase("change"):
            changed = finish_sync(remote)
        with self._phases.phase("check"):
            check_sync(remote, full_check)
        return SyncReport(
            workspace=self._workspace.spec.name,
            snapshot=self._wanted.snapshot,
            root=self._wanted.root,
            last=intent.last,
            saved=saved,
            machine=self._machine,
            roots=intent.roots,
            files=intent.files,
            bytes=intent.bytes,
            written=intent.staged,
            removed=intent.removed_count,
            copied_bytes=plan.copied_bytes,
            stored_bytes=plan.stored_bytes,
            left_out=intent.left_out,
            kept=intent.kept,
            discarded=intent.discarded,
            discarded_count=intent.discarded_count,
            checked="every byte and attribute" if full_check else "what was written",
            warnings=changed.warnings,
            seconds=self._phases.seconds,
        )

    def _fetch(self, remote: RemoteSync, plan: SyncPlan) -> None:
        name = self._workspace.spec.name
        do_parts(
            f"sync-{name}-progress",
            f"Workspace {name} to {self._wanted.snapshot}",
            sum(part.bytes for part in plan.parts),
            plan.parts,
            lambda part, progress: sync_part.submit(remote, part, progress),
        )
