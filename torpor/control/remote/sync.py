"""The control side's half of a sync."""

from __future__ import annotations

from torpor.control.remote.agent import Agent
from torpor.control.remote.limits import check_fetches
from torpor.control.remote.run import OnEvent, RemoteRun
from torpor.control.store.manifests import snapshot_ids
from torpor.control.store.object_store import ObjectStore
from torpor.shared.values import StoredSnapshot, WorkspaceSpec
from torpor.shared.wire.restore import Checked, RestorePart
from torpor.shared.wire.sync import (
    BeginSync,
    Changed,
    CheckSync,
    EndSync,
    FinishSync,
    Intent,
    StageSync,
    SyncPart,
    SyncPlan,
)


class RemoteSync(RemoteRun):
    """Makes one machine's tree equal to a snapshot. Call in this order; parts in parallel. After a
    lost agent it begins again by itself, without fetching again what is there."""

    def __init__(
        self,
        agent: Agent,
        store: ObjectStore,
        wanted: StoredSnapshot,
        spec: WorkspaceSpec,
        key: bytes | None,
        run: str,
        *,
        discard_local: bool = False,
    ) -> None:
        super().__init__(agent, store, key, run)
        self.wanted = wanted
        self._spec = spec
        self._discard_local = discard_local
        self._staging = False

    def begin(self) -> Intent:
        """Look at the machine; UnsavedWork names what would be lost. Writes nothing."""
        return self._call(
            BeginSync(
                **self._of(self.wanted, self._spec.restorable),
                exclude=self._spec.exclude,
                stored=snapshot_ids(self._store, self.wanted.workspace),
                discard_local=self._discard_local,
            )
        )

    def stage(self) -> SyncPlan:
        """Make the new files beside the tree from what is on the machine; plan the rest."""
        plan = self._call_resuming(StageSync(self.run, self._spec.parts))
        check_fetches(self.machine, self.wanted.workspace, plan.parts, self._spec.parts + 1)
        self._staging = True
        return plan

    def sync_part(self, plan: RestorePart, on_event: OnEvent = None) -> None:
        """Fetch one part, by the packs it names. Idempotent."""
        grants = [self._grant("GET", key, plan.stored_bytes) for key in plan.packs]
        self._call_resuming(SyncPart(self.run, grants), on_event)

    def finish(self) -> Changed:
        """Check every staged file, then change the tree, once every part is there.

        StillChanging: files changed meanwhile; sync again."""
        return self._call_resuming(FinishSync(self.run))

    def check(self, *, full: bool) -> Checked:
        """Compare what was changed with the snapshot; ``full``: every byte of every file."""
        return self._call_resuming(CheckSync(self.run, full))

    def end(self) -> None:
        """Give the workspace back."""
        self._send(EndSync(self.run))

    def _begin_again(self) -> None:
        self.begin()
        if self._staging:
            self._call(StageSync(self.run, self._spec.parts))
