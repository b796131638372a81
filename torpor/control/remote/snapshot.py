"""The control side's half of a snapshot: grants for the agent, and what it answers, typed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import datetime, timezone
from typing import Any, Final, NamedTuple

import msgspec

from torpor.control.remote.run import RemoteRun
from torpor.control.remote.session import Session
from torpor.control.safety import Confirmed
from torpor.control.store.marks import COMMIT_S, marked_packs
from torpor.control.store.seam import ObjectStore
from torpor.control.store.snapshots import list_snapshots
from torpor.shared.errors import AgentLost
from torpor.shared.format.names import manifest_key, new_pack_key, pack_id_of, packs_prefix
from torpor.shared.values import (
    Grant,
    ObjectKey,
    SnapshotId,
    StoredSnapshot,
    WorkspaceSpec,
    new_snapshot_id,
)

KNOWN_SNAPSHOTS: Final = 8
"""How many earlier snapshots a new one may refer to: their manifests are read where work is new."""


class PackClaim(msgspec.Struct, frozen=True):
    """What the agent says that it stored."""

    key: ObjectKey
    bytes: int
    md5: str


class PartPlan(msgspec.Struct, frozen=True):
    part: int
    bytes: int
    packs: int


class Scan(msgspec.Struct, frozen=True):
    """One walk of the workspace. Counts and bytes of ``read_`` are new since the last pass."""

    files: int
    bytes: int
    entries: int
    skipped: int
    read_files: int
    read_bytes: int
    unaccepted_count: int
    unaccepted: list[str]
    parts: list[PartPlan]


class StoreSeconds(msgspec.Struct, frozen=True):
    read: float = 0.0
    hash: float = 0.0
    encode: float = 0.0
    put: float = 0.0


class PartReport(msgspec.Struct, frozen=True):
    """What one part did; ``lost``: nothing, because the agent was started anew meanwhile."""

    part: int
    lost: bool
    files: int
    bytes: int
    new_bytes: int
    stored_bytes: int
    packs: int
    changed_count: int
    changed: list[str]
    seconds: StoreSeconds


class Committed(msgspec.Struct, frozen=True):
    """A manifest that the store has acknowledged; not verified yet."""

    root: str
    manifest_bytes: int
    files: int
    bytes: int
    changed_count: int
    unaccepted_count: int
    unaccepted: list[str]
    encoding: str  # how chunks were encoded and why, in words


class _Leave(NamedTuple):
    """To write one manifest, for COMMIT_S."""

    snapshot: SnapshotId
    signed_unix: float
    grant: dict[str, Any]


class RemoteSnapshot(RemoteRun):
    """One snapshot of one machine's workspace, from ``begin`` to ``end``.

    Every method may raise AgentLost, after which another pass takes up what the store has
    already. Methods come one after the other, but for ``store_part``.
    """

    def __init__(
        self,
        session: Session,
        store: ObjectStore,
        spec: WorkspaceSpec,
        key: bytes | None,
        run: str,
    ) -> None:
        super().__init__(session, store, key, run)
        self.spec = spec
        self._resumed: list[ObjectKey] = []
        self._parent: SnapshotId | None = None
        self._leave: _Leave | None = None

    def begin(self) -> dict[str, Any]:
        """Take the workspace on the machine; returns the machine's environment.

        Raises WorkspaceInvalid, WorkspaceBusy, WrongKey and what the store raises.
        """
        known = list_snapshots(self._store, self.spec.name, newest=KNOWN_SNAPSHOTS)
        self._parent = known[0].snapshot if known else None
        begun = self._call(
            "snapshot.begin",
            workspace=self.spec.name,
            roots=self.spec.paths,
            exclude=self.spec.exclude,
            key=self._key,
            known=[self._known(one) for one in known],
            compression=msgspec.to_builtins(self.spec.compression),
        )
        self._resumed = self._still_there(begun["resumable"])
        environment: dict[str, Any] = begun["environment"]
        return environment

    def scan(self, number: int, lost: Sequence[ObjectKey] = ()) -> Scan:
        """Walk the workspace; ``lost`` packs must be stored anew. Passes count from 1."""
        self._leave = None
        answer = self._held(
            "snapshot.scan",
            **{"pass": number},
            max_parts=self.spec.parts,
            part_bytes=self.spec.part_bytes,
            resumed=self._resumed,
            lost=list(lost),
            accepted=self.spec.accept_changed,
        )
        return msgspec.convert(answer, Scan)

    def store_part(
        self,
        number: int,
        plan: PartPlan,
        on_event: Callable[[dict[str, Any]], None] | None = None,
    ) -> PartReport:
        """Store one part of pass ``number``; with new grants each time. Idempotent."""

        def ask() -> dict[str, Any]:
            keys = [new_pack_key(self.spec.name) for _ in range(plan.packs)]
            grants = [self._grant("PUT", key, plan.bytes) for key in keys]
            return self._call(
                "snapshot.part", on_event, **{"pass": number}, part=plan.part, packs=grants
            )

        try:
            answer = ask()
        except AgentLost:
            # The agent may be alive and still fill the packs of the first request.
            self._begin_again()
            answer = ask()
        return msgspec.convert(answer, PartReport)

    def quiesce(self) -> str:
        """Run the user's hook on the machine; returns the tail of what it printed."""
        answer = self._held(
            "snapshot.hook", argv=self.spec.quiesce, timeout_s=self.spec.quiesce_timeout_s
        )
        return str(answer["tail"])

    def lost_packs(self) -> list[ObjectKey]:
        """Packs that the manifest would name and must not: the store does not have them as
        written, or prune has marked them. Their chunks have to be stored anew.

        The order is what makes prune safe without a lock (docs/safety.md, rule 13): first the
        leave to write the manifest, which ends COMMIT_S later whatever becomes of this process;
        then the marks; then the packs.
        """
        claims = msgspec.convert(self._held("snapshot.packs")["packs"], list[PackClaim])
        self._leave = self._new_leave()
        marked = marked_packs(self._store, self.spec.name)
        missing = set(self._missing(claims))
        return [c.key for c in claims if c.key in missing or pack_id_of(c.key) in marked]

    def commit(self, statistics: dict[str, int]) -> tuple[StoredSnapshot, Committed]:
        """Write the manifest; only after ``lost_packs`` came back empty, and with the leave that
        was signed there: GrantExpired where that was too long ago."""
        if self._leave is None:
            raise RuntimeError("commit comes after lost_packs, and nothing between them")
        leave = self._leave
        answer = self._held(
            "snapshot.commit",
            snapshot=leave.snapshot,
            parent=self._parent,
            created_unix=int(leave.signed_unix),
            statistics=statistics,
            accepted=self.spec.accept_changed,
            grant=leave.grant,
        )
        committed = msgspec.convert(answer, Committed)
        stored = StoredSnapshot(
            self.spec.name,
            leave.snapshot,
            committed.root,
            committed.manifest_bytes,
            leave.signed_unix,
        )
        return stored, committed

    def reread(self, grants: Sequence[Grant]) -> list[ObjectKey]:
        """Have the machine read packs whole; returns those that are not as written."""
        answer = self._held("snapshot.reread", packs=msgspec.to_builtins(list(grants)))
        return [ObjectKey(key) for key in answer["wrong"]]

    def confirm(self) -> Confirmed:
        """Compare the machine's disk with what was committed."""
        answer = self._held("snapshot.confirm", accepted=self.spec.accept_changed)
        return msgspec.convert(answer, Confirmed)

    def end(self, *, committed: bool) -> None:
        """Give the workspace back. The agent keeps its index when the snapshot is verified."""
        self._call("snapshot.end", committed=committed)

    def _begin_again(self) -> None:
        """The new agent answers a part with ``lost``, and what needs a pass with AgentLost."""
        self.begin()

    def _new_leave(self) -> _Leave:
        now = datetime.now(timezone.utc)
        snapshot = new_snapshot_id(now, self._parent)
        key = manifest_key(self.spec.name, snapshot)
        grant = self._store.grant("PUT", key, expires_s=COMMIT_S)
        return _Leave(snapshot, now.timestamp(), msgspec.to_builtins(grant))

    def _known(self, one: StoredSnapshot) -> dict[str, Any]:
        key = manifest_key(one.workspace, one.snapshot)
        grant = self._grant("GET", key, one.manifest_bytes)
        return {
            "root": one.root,
            "bytes": one.manifest_bytes,
            "grant": grant,
        }

    def _still_there(self, resumable: Any) -> list[ObjectKey]:
        claims = msgspec.convert(resumable, list[PackClaim])
        missing = set(self._missing(claims)) if claims else set()
        return [claim.key for claim in claims if claim.key not in missing]

    def _missing(self, claims: Sequence[PackClaim]) -> list[ObjectKey]:
        there = {found.key: found for found in self._store.list(packs_prefix(self.spec.name))}
        missing = []
        for claim in claims:
            found = there.get(claim.key)
            differs = found is None or found.bytes != claim.bytes
            if differs or (found and found.md5 is not None and found.md5 != claim.md5):
                missing.append(claim.key)
        return missing
