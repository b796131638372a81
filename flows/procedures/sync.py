"""One sync of a machine to a snapshot, over an open session."""

from __future__ import annotations

from contextlib import suppress
from typing import Final

from flows.procedures.parts import do_parts
from tasks.phases import phase, seconds_by_phase
from tasks.runner import runner
from tasks.sync import begin_sync, check_sync, finish_sync, stage, sync_part
from tasks.workspace import StoredWorkspace
from torpor.control.remote.agent import Agent
from torpor.control.remote.sync import RemoteSync
from torpor.control.reports import SyncReport
from torpor.shared.errors import StillChanging, TorporError
from torpor.shared.values import MachineId, SnapshotId, StoredSnapshot
from torpor.shared.wire.sync import SyncPlan

MAX_ROUNDS: Final = 3
"""Most tries of a sync on a machine whose files change meanwhile."""


class Synchronisation:
    """The order of one sync over an open session."""

    def __init__(
        self,
        workspace: StoredWorkspace,
        session: Agent,
        machine: MachineId,
        wanted: StoredSnapshot,
    ) -> None:
        self._workspace = workspace
        self._session = session
        self._machine = machine
        self._wanted = wanted

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
                runner().run,
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
                # an agent that cannot be reached ends the run by itself
                with suppress(TorporError):
                    remote.end()
        raise AssertionError("the last round returns or raises")

    def _round(self, remote: RemoteSync, saved: SnapshotId | None, full_check: bool) -> SyncReport:
        intent = begin_sync(remote)
        plan = stage(remote)
        with phase("fetch"):
            self._fetch(remote, plan)
        changed = finish_sync(remote)
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
            seconds=seconds_by_phase(),
        )

    def _fetch(self, remote: RemoteSync, plan: SyncPlan) -> None:
        name = self._workspace.spec.name
        do_parts(
            f"sync-{name}-progress",
            f"fetching what is new of {name}",
            sum(part.bytes for part in plan.parts),
            plan.parts,
            lambda part, progress: sync_part.submit(remote, part, progress),
        )
