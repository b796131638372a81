"""Sync: a machine that holds an earlier state of a workspace gets another one."""

from __future__ import annotations

from contextlib import suppress
from typing import Final

from blocks import Workspace
from flows.flow import flow
from flows.hibernate import store_workspace
from flows.phases import Phases
from tasks.machines import endpoint_of, find_machine, open_session, own_machine
from tasks.opening import open_workspace, probe_store
from tasks.progress import Progress
from tasks.restore import NEWEST, pick_snapshot
from tasks.runner import runner
from tasks.sync import begin_sync, check_sync, finish_sync, stage, sync_part
from tasks.workspace import OpenWorkspace
from torpor.control.remote.session import Session
from torpor.control.remote.sync import RemoteSync, SyncPlan
from torpor.control.reports import SyncReport
from torpor.shared.errors import StillChanging, TorporError
from torpor.shared.values import Machine, SnapshotId, StoredSnapshot

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
) -> SyncReport:
    """Bring a machine that holds an earlier state of a workspace to another snapshot.

    Only what differs is fetched. If files on the machine are in no snapshot as they are, nothing is
    changed and the error names them, unless you save them first or accept their loss.

    Args:
        workspace: The Workspace block to sync, or its name.
        snapshot: Which snapshot: its id, or newest.
        machine: Which machine, when the workspace is on several: its id, or user@host:port for a
            machine of your own. Empty: the workspace's only machine.
        save_first: Take a snapshot of the machine before anything is changed. It becomes the
            newest; the machine gets the one that was the newest before, or the named one.
        discard_local: Accept that changes on the machine which no snapshot has are lost.
        full_check: Read and hash every file at the end, not only those that were written.
    """
    phases = Phases()
    with phases.phase("prepare"):
        opened = open_workspace(workspace)
        probe_store(opened)
        wanted = pick_snapshot(opened, snapshot)
        live = own_machine(machine) if "@" in machine else find_machine(opened, machine)
    saved: SnapshotId | None = None
    if save_first:
        with phases.phase("save"):
            saved = store_workspace(workspace, False, machine, [])[0].snapshot
    with phases.phase("connect"):
        session = open_session(opened, endpoint_of(live))
    with session:
        report = _Synchronisation(opened, session, live, wanted, saved, phases).run(
            discard_local=discard_local, full_check=full_check
        )
    runner().table(
        key=f"sync-{opened.spec.name}",
        rows=report.rows(),
        description=f"Workspace {opened.spec.name} synced to {wanted.snapshot}",
    )
    return report


class _Synchronisation:
    """The order of one run, once the machine is attached to."""

    def __init__(
        self,
        opened: OpenWorkspace,
        session: Session,
        machine: Machine,
        wanted: StoredSnapshot,
        saved: SnapshotId | None,
        phases: Phases,
    ) -> None:
        self._opened = opened
        self._session = session
        self._machine = machine
        self._wanted = wanted
        self._saved = saved
        self._phases = phases

    def run(self, *, discard_local: bool, full_check: bool) -> SyncReport:
        for number in range(1, MAX_ROUNDS + 1):
            remote = RemoteSync(
                self._session,
                self._opened.store,
                self._wanted,
                self._opened.spec,
                self._opened.key,
                f"{runner().run}-sync-{number}",
                discard_local=discard_local,
            )
            try:
                return self._round(remote, full_check)
            except StillChanging as error:
                # somebody works there: look again, and keep or refuse what they changed
                if number == MAX_ROUNDS:
                    raise
                runner().log.warning("another round: %s", error)
            finally:
                with suppress(TorporError):  # the agent gives up by itself when it cannot be told
                    remote.end()
        raise AssertionError("the last round returns or raises")

    def _round(self, remote: RemoteSync, full_check: bool) -> SyncReport:
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
            workspace=self._opened.spec.name,
            snapshot=self._wanted.snapshot,
            root=self._wanted.root,
            last=intent.last,
            saved=self._saved,
            machine=self._machine.id,
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
        name = self._opened.spec.name
        progress = Progress(
            f"sync-{name}-progress",
            f"Workspace {name} to {self._wanted.snapshot}",
            sum(part.bytes for part in plan.parts),
        )
        futures = [sync_part.submit(remote, part, progress) for part in plan.parts]
        for future in futures:
            future.result()
        progress.done()
