"""The control side's half of a sync."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from torpor.control.remote.restore import Checked, RestoredPart, RestorePart
from torpor.control.remote.run import RemoteRun
from torpor.control.remote.session import Session
from torpor.control.store.seam import ObjectStore
from torpor.control.store.snapshots import snapshot_ids
from torpor.shared.format.names import manifest_key
from torpor.shared.values import SnapshotId, StoredSnapshot, WorkspaceSpec


class Intent(msgspec.Struct, frozen=True):
    """What a sync would do; nothing has been written. Names are the first few, counts all.

    ``last``: the snapshot that the machine held. ``staged`` files are made anew, of which a part
    is there already. ``kept``: changed after an earlier run of this sync had begun to write.
    """

    last: SnapshotId | None
    roots: list[str]
    files: int
    bytes: int
    left_out: int
    staged: int
    staged_bytes: int
    removed: list[str]
    removed_count: int
    kept: list[str]
    kept_count: int
    discarded: list[str]
    discarded_count: int


class SyncPlan(msgspec.Struct, frozen=True):
    """What was taken from the machine itself, and what has to be fetched."""

    copied_bytes: int
    stored_bytes: int
    parts: list[RestorePart]


class Changed(msgspec.Struct, frozen=True):
    """The tree has become the snapshot."""

    warnings: list[str]
    warning_count: int


class RemoteSync(RemoteRun):
    """One machine's tree becoming a snapshot. Calls come in this order; parts at the same time.
    When the agent was lost, it begins again by itself: what is there is not fetched again."""

    def __init__(
        self,
        session: Session,
        store: ObjectStore,
        wanted: StoredSnapshot,
        spec: WorkspaceSpec,
        key: bytes | None,
        run: str,
        *,
        discard_local: bool = False,
    ) -> None:
        super().__init__(session, store, key, run)
        self.wanted = wanted
        self._spec = spec
        self._discard_local = discard_local
        self._staging = False

    def begin(self) -> Intent:
        """Look at the machine; UnsavedWork names what would be lost. Writes nothing."""
        wanted = self.wanted
        key = manifest_key(wanted.workspace, wanted.snapshot)
        answer = self._call(
            "sync.begin",
            workspace=wanted.workspace,
            snapshot=wanted.snapshot,
            root=wanted.root,
            manifest_bytes=wanted.manifest_bytes,
            grant=self._grant("GET", key, wanted.manifest_bytes),
            key=self._key,
            exclude=self._spec.exclude,
            stored=snapshot_ids(self._store, wanted.workspace),
            discard_local=self._discard_local,
        )
        return msgspec.convert(answer, Intent)

    def stage(self, on_event: Callable[[dict[str, Any]], None] | None = None) -> SyncPlan:
        """Make the new files beside the tree from what is on the machine; plan the rest."""
        answer = self._held("sync.stage", on_event, max_parts=self._spec.parts)
        self._staging = True
        return msgspec.convert(answer, SyncPlan)

    def sync_part(
        self, plan: RestorePart, on_event: Callable[[dict[str, Any]], None] | None = None
    ) -> RestoredPart:
        """Fetch one part, by the packs it names. Idempotent."""
        answer = self._held(
            "sync.part",
            on_event,
            part=plan.part,
            packs=[self._grant("GET", key, plan.stored_bytes) for key in plan.packs],
        )
        return msgspec.convert(answer, RestoredPart)

    def finish(self) -> Changed:
        """Check every staged file, then change the tree, once every part is there.

        StillChanging: somebody worked on the files meanwhile; sync again."""
        return msgspec.convert(self._held("sync.finish"), Changed)

    def check(self, *, full: bool) -> Checked:
        """Compare what was changed with the snapshot; ``full`` every byte of everything."""
        return msgspec.convert(self._held("sync.check", full=full), Checked)

    def end(self) -> None:
        """Give the workspace back."""
        self._send("sync.end")

    def _begin_again(self) -> None:
        self.begin()
        if self._staging:
            self._call("sync.stage", max_parts=self._spec.parts)
