"""The control side's half of a snapshot: grants for the agent, passes, and the commit."""

from __future__ import annotations

import time
from collections.abc import Sequence
from datetime import datetime, timezone
from typing import Final, NamedTuple

from torpor.control.remote.limits import check_plan, hostile, is_pack_of
from torpor.control.remote.run import OnEvent, RemoteRun
from torpor.control.remote.seam import Agent
from torpor.control.store.marks import COMMIT_S, marked_packs
from torpor.control.store.seam import ObjectStore
from torpor.control.store.snapshots import list_snapshots
from torpor.shared.errors import AgentLost, GrantExpired, MachineError
from torpor.shared.format.names import manifest_key, new_pack_key, pack_id_of, packs_prefix
from torpor.shared.values import (
    Grant,
    ObjectKey,
    SnapshotId,
    StoredSnapshot,
    WorkspaceSpec,
    new_snapshot_id,
)
from torpor.shared.wire.losses import LookAtHomes, LookForLosses, Losses
from torpor.shared.wire.snapshot import (
    BeginSnapshot,
    Commit,
    Committed,
    Confirm,
    Confirmed,
    EndSnapshot,
    Froze,
    KnownSnapshot,
    ListPacks,
    OwnFiles,
    PackClaim,
    PartPlan,
    PartReport,
    Program,
    Quiesce,
    RereadPacks,
    Scan,
    Scanned,
    StorePart,
)

KNOWN_SNAPSHOTS: Final = 8
"""How many earlier snapshots a new one may refer to. The agent reads their manifests."""
PUT_S: Final = 3600
"""How long a grant lasts that can replace what it wrote."""


class _Leave(NamedTuple):
    """A grant to write one manifest, valid for COMMIT_S."""

    snapshot: SnapshotId
    signed_unix: float
    grant: Grant


class RemoteSnapshot(RemoteRun):
    """One snapshot of one machine's workspace, from ``begin`` to ``end``. ``own``: of a user's own
    files in a home instead.

    Every method may raise AgentLost; the next pass then uses what is already stored. Call one
    method at a time, except ``store_part``.
    """

    def __init__(
        self,
        agent: Agent,
        store: ObjectStore,
        spec: WorkspaceSpec,
        key: bytes | None,
        run: str,
        own: OwnFiles | None = None,
    ) -> None:
        super().__init__(agent, store, key, run)
        self.spec = spec
        self._own = own
        self.confirmed: Confirmed | None = None  # the last comparison with the disk
        self._resumed: list[ObjectKey] = []
        self._newest: SnapshotId | None = None
        self._tried: SnapshotId | None = None  # the last commit, maybe in this very second
        self._leave: _Leave | None = None

    def begin(self) -> None:
        """Take the workspace on the machine.

        Raises WorkspaceInvalid, WorkspaceBusy, WrongKey and what the store raises.
        """
        known = list_snapshots(self._store, self.spec.name, newest=KNOWN_SNAPSHOTS)
        self._newest = known[0].snapshot if known else None
        begun = self._call(
            BeginSnapshot(
                self.run,
                self.spec.name,
                self._store.authority,
                self.spec.paths,
                self.spec.exclude,
                self._key,
                [self._known(stored) for stored in known],
                self.spec.compression,
                self._own,
            )
        )
        self._resumed = self._still_there(begun.resumable)

    def scan(self, number: int, lost: Sequence[ObjectKey] = ()) -> Scanned:
        """Walk the workspace; ``lost`` packs must be stored again. Passes count from 1."""
        self._leave = None
        seen = self._held(
            Scan(
                self.run,
                number,
                self.spec.parts,
                self.spec.part_bytes,
                self._resumed,
                list(lost),
                self.spec.may_change,
                self.spec.accept_lost,
            )
        )
        check_plan(self.machine, seen.parts, self.spec.parts)
        return seen

    def store_part(self, number: int, plan: PartPlan, on_event: OnEvent = None) -> PartReport:
        """Store one part of pass ``number``; with new grants each time. Idempotent."""
        try:
            return self._store_part(number, plan, on_event)
        except AgentLost:
            # The agent may be alive and still fill the packs of the first request.
            self._begin_again()
            return self._store_part(number, plan, on_event)

    def quiesce(
        self, programs: Sequence[Program] = (), criu: str = "", *, hook: bool = True
    ) -> list[Froze]:
        """Run the user's hook on the machine, and freeze ``programs`` by the CRIU in that folder;
        the end of this run resumes what was stopped. Returns what became of each program."""
        spec = self.spec
        request = Quiesce(
            self.run,
            spec.quiesce if hook else [],
            spec.quiesce_timeout_s,
            spec.resume,
            [*programs],
            criu,
        )
        froze = self._held(request).programs
        if [program.job for program in froze] != [program.job for program in programs]:
            raise hostile(self.machine, "names other programs than it was asked to freeze")
        return froze

    def lost_packs(self) -> list[ObjectKey]:
        """Packs that the manifest must not name: the store does not have them as written, or prune
        has marked them. Their chunks have to be stored again.

        The order makes prune safe without a lock (docs/contributing/safety.md, rule 13): first sign
        the grant for the manifest, which ends COMMIT_S later even if this process dies; then read
        the marks; then list the packs.
        """
        claims = self._held(ListPacks(self.run)).packs
        if any(not is_pack_of(self.spec.name, claim.key) for claim in claims):
            raise MachineError(
                f"machine {self.machine} names packs that are none of workspace {self.spec.name}: "
                "do not trust its host, and rent elsewhere"
            )
        self._leave = self._new_leave()
        marked = marked_packs(self._store, self.spec.name)
        missing = set(self._missing(claims))
        return [c.key for c in claims if c.key in missing or pack_id_of(c.key) in marked]

    def commit(self, statistics: dict[str, int]) -> tuple[StoredSnapshot, Committed]:
        """Write the manifest with the grant that ``lost_packs`` signed, and only after it returned
        no pack. GrantExpired if that was too long ago."""
        if self._leave is None:
            raise RuntimeError("commit comes after lost_packs, and nothing between them")
        leave = self._leave
        self._tried = leave.snapshot
        committed = self._held(
            Commit(
                self.run,
                leave.snapshot,
                int(leave.signed_unix),
                statistics,
                self.spec.may_change,
                leave.grant,
            )
        )
        stored = StoredSnapshot(
            self.spec.name,
            leave.snapshot,
            committed.root,
            committed.manifest_bytes,
            leave.signed_unix,
        )
        return stored, committed

    def losses(
        self, *, rented: bool, whole: bool, wait_s: float, volumes: Sequence[str] = ()
    ) -> Losses:
        """What is on the machine and not in the snapshot; ``wait_s`` 0 only begins to look.
        ``volumes``: where its provider mounted what outlives it."""
        accepted = self.spec.accept_lost
        return self._held(LookForLosses(self.run, accepted, rented, whole, wait_s, list(volumes)))

    def homes(self, *, rented: bool, volumes: Sequence[str] = ()) -> Losses:
        """What a user has written in a home until now; the others are as in ``losses``."""
        return self._held(LookAtHomes(self.run, self.spec.accept_lost, rented, list(volumes)))

    def reread(self, grants: Sequence[Grant]) -> list[ObjectKey]:
        """Have the machine read packs whole; returns those that are not as written."""
        return self._held(RereadPacks(self.run, list(grants))).wrong

    def confirm(self) -> Confirmed:
        """Compare the machine's disk with what was committed."""
        self.confirmed = self._held(Confirm(self.run, self.spec.may_change))
        return self.confirmed

    def end(self, *, committed: bool, kept: bool = True) -> str:
        """Give the workspace back. The agent keeps its index when the snapshot is verified, and
        resumes what the hook stopped if the machine is ``kept``. Returns what went wrong there."""
        return self._call(EndSnapshot(self.run, committed, kept)).resume_error

    def _store_part(self, number: int, plan: PartPlan, on_event: OnEvent) -> PartReport:
        """A part may take longer than its grants last. It gets new ones at most once for each of
        its packs, and only if they lasted and a pack was stored: a hostile machine may say
        GrantExpired at any time."""
        for left in reversed(range(max(1, plan.packs))):
            grants = self._pack_grants(plan)
            signed_s = time.monotonic()
            try:
                return self._call(StorePart(self.run, number, plan.part, grants), on_event)
            except GrantExpired:
                too_early = time.monotonic() - signed_s < PUT_S / 2
                if not left or too_early or self._store.head(grants[0].key) is None:
                    raise
        raise AssertionError("the last turn returns or raises")

    def _pack_grants(self, plan: PartPlan) -> list[Grant]:
        """One for each new pack. A grant that could replace what was verified ends after PUT_S; one
        that is good for one write lasts as long as the part may take."""
        grants = []
        for _ in range(plan.packs):
            key = new_pack_key(self.spec.name)
            grant = self._store.grant("PUT", key, expires_s=PUT_S)
            grants.append(self._grant("PUT", key, plan.bytes) if grant.once else grant)
        return grants

    def _begin_again(self) -> None:
        """A restarted agent answers a part with ``lost``, and other requests with AgentLost."""
        self.begin()

    def _new_leave(self) -> _Leave:
        now = datetime.now(timezone.utc)
        snapshot = new_snapshot_id(now, self._tried or self._newest)
        key = manifest_key(self.spec.name, snapshot)
        grant = self._store.grant("PUT", key, expires_s=COMMIT_S)
        return _Leave(snapshot, now.timestamp(), grant)

    def _known(self, stored: StoredSnapshot) -> KnownSnapshot:
        key = manifest_key(stored.workspace, stored.snapshot)
        grant = self._grant("GET", key, stored.manifest_bytes)
        return KnownSnapshot(stored.root, stored.manifest_bytes, grant)

    def _still_there(self, claims: Sequence[PackClaim]) -> list[ObjectKey]:
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
