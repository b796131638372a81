"""The control side's half of a snapshot: grants for the agent, and what it answers, typed."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from datetime import datetime, timezone
from typing import Any, Final

import msgspec

from torpor.errors import AgentLost
from torpor.format.names import manifest_key, new_pack_key, packs_prefix
from torpor.remote.session import Session
from torpor.safety import Confirmed
from torpor.store.seam import ObjectStore
from torpor.store.snapshots import list_snapshots
from torpor.values import (
    MIB,
    Grant,
    ObjectKey,
    SnapshotId,
    StoredSnapshot,
    WorkspaceSpec,
    new_snapshot_id,
)

KNOWN_SNAPSHOTS: Final = 8
"""How many earlier snapshots a new one may refer to: their manifests are read where work is new."""
_SLOWEST_BYTES_S: Final = 1 * MIB
_SHORTEST_GRANT_S: Final = 3600
_LONGEST_GRANT_S: Final = 24 * 3600


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


class RemoteSnapshot:
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
        self.run = run
        self.spec = spec
        self._session = session
        self._store = store
        self._key = key
        self._requests = itertools.count(1)
        self._resumed: list[ObjectKey] = []
        self._parent: SnapshotId | None = None

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
            key=None if self._key is None else self._key.hex(),
            known=[self._known(one) for one in known],
        )
        self._resumed = self._still_there(begun["resumable"])
        environment: dict[str, Any] = begun["environment"]
        return environment

    def scan(self, number: int, lost: Sequence[ObjectKey] = ()) -> Scan:
        """Walk the workspace; ``lost`` packs must be stored anew. Passes count from 1."""
        answer = self._held(
            "snapshot.scan",
            **{"pass": number},
            max_parts=self.spec.parts,
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
        keys = [new_pack_key(self.spec.name) for _ in range(plan.packs)]
        grants = [self._grant("PUT", key, plan.bytes) for key in keys]
        answer = self._held(
            "snapshot.part",
            on_event,
            **{"pass": number},
            part=plan.part,
            packs=msgspec.to_builtins(grants),
        )
        return msgspec.convert(answer, PartReport)

    def quiesce(self) -> str:
        """Run the user's hook on the machine; returns the tail of what it printed."""
        answer = self._held(
            "snapshot.hook", argv=self.spec.quiesce, timeout_s=self.spec.quiesce_timeout_s
        )
        return str(answer["tail"])

    def lost_packs(self) -> list[ObjectKey]:
        """Packs that the manifest would name and that the store does not have as written."""
        claims = msgspec.convert(self._held("snapshot.packs")["packs"], list[PackClaim])
        return self._missing(claims)

    def commit(self, statistics: dict[str, int]) -> tuple[StoredSnapshot, Committed]:
        """Write the manifest; only after ``lost_packs`` came back empty."""
        now = datetime.now(timezone.utc)
        snapshot = new_snapshot_id(now, self._parent)
        key = manifest_key(self.spec.name, snapshot)
        answer = self._held(
            "snapshot.commit",
            snapshot=snapshot,
            parent=self._parent,
            created_unix=int(now.timestamp()),
            statistics=statistics,
            accepted=self.spec.accept_changed,
            grant=msgspec.to_builtins(self._grant("PUT", key, 0)),
        )
        committed = msgspec.convert(answer, Committed)
        stored = StoredSnapshot(
            self.spec.name, snapshot, committed.root, committed.manifest_bytes, now.timestamp()
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

    def _held(
        self,
        op: str,
        on_event: Callable[[dict[str, Any]], None] | None = None,
        /,
        **args: Any,
    ) -> dict[str, Any]:
        """A call within a run that the agent may have lost: then begin again and ask once more.

        The new agent answers a part with ``lost``, and what needs a pass with AgentLost.
        """
        try:
            return self._call(op, on_event, **args)
        except AgentLost:
            self.begin()
            return self._call(op, on_event, **args)

    def _call(
        self,
        op: str,
        on_event: Callable[[dict[str, Any]], None] | None = None,
        /,
        **args: Any,
    ) -> dict[str, Any]:
        request = f"{self.run}:{next(self._requests)}"
        return self._session.call(op, {"run": self.run, **args}, request=request, on_event=on_event)

    def _known(self, one: StoredSnapshot) -> dict[str, Any]:
        key = manifest_key(one.workspace, one.snapshot)
        grant = self._grant("GET", key, one.manifest_bytes)
        return {
            "root": one.root,
            "bytes": one.manifest_bytes,
            "grant": msgspec.to_builtins(grant),
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

    def _grant(self, verb: str, key: ObjectKey, plain_bytes: int) -> Grant:
        expires_s = min(_LONGEST_GRANT_S, max(_SHORTEST_GRANT_S, plain_bytes // _SLOWEST_BYTES_S))
        return self._store.grant(verb, key, expires_s=expires_s)
