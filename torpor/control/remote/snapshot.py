"""The control side's half of a snapshot: grants for the agent, passes, and the commit."""

from __future__ import annotations

import time
from collections.abc import Sequence
from datetime import datetime, timezone
from typing import Final, NamedTuple

import msgspec

from torpor.control.remote.agent import Agent
from torpor.control.remote.limits import hostile, is_pack_of
from torpor.control.remote.run import OnEvent, RemoteRun
from torpor.control.store.manifests import list_snapshots
from torpor.control.store.marks import COMMIT_S
from torpor.control.store.object_store import ObjectStore
from torpor.control.store.packs import UsablePacks, compare_packs, stored_packs
from torpor.shared.errors import AgentLost, GrantExpired, MachineError
from torpor.shared.format.names import manifest_key, new_pack_key
from torpor.shared.format.sizes import PACK_BYTES
from torpor.shared.values import (
    Grant,
    ObjectKey,
    SnapshotId,
    StoredSnapshot,
    WorkspaceSpec,
    new_snapshot_id,
)
from torpor.shared.wire.losses import LookAtHomes, LookForLosses, Losses
from torpor.shared.wire.request import Event
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
    PackClaim,
    PassesOutcome,
    Program,
    Quiesce,
    RereadPacks,
    StorePasses,
    UserFiles,
)

KNOWN_SNAPSHOTS: Final = 8
"""How many earlier snapshots a new one may refer to. The agent reads their manifests."""
PUT_S: Final = 3600
"""Seconds that a grant lasts which can replace what it wrote."""
PACKS_AT_ONCE: Final = 1024
"""The most grants for packs in one request: for 60 GiB."""
MOST_REQUESTS: Final = 1000
"""How often passes may get more grants: enough for 60 TB, or for 1000 hours where a grant lasts an
hour."""


class _Leave(NamedTuple):
    """A grant to write one manifest, valid for COMMIT_S."""

    snapshot: SnapshotId
    signed_unix: float
    grant: Grant


class _Bytes(NamedTuple):
    """Bytes of chunks: plain, and stored."""

    new: int = 0
    stored: int = 0


class _PackGrants:
    """The grants for packs that a machine got last. The machine gets more only if it has stored a
    pack with one of them. Once in each pass it gets more without that, but not before half of the
    grants' time is over."""

    def __init__(self, machine: str, passes: int) -> None:
        self.newest: list[Grant] = []
        self._machine = machine
        self._unused_left = passes
        self._signed_s = 0.0

    def replace(self, grants: list[Grant]) -> None:
        """Note the newest grants, signed now."""
        self.newest, self._signed_s = grants, time.monotonic()

    def ask_without_use(self, why: str) -> None:
        """Allow that the machine asks for more without having used the newest grants; ``why``: its
        reason. GrantExpired where it gets no more."""
        too_early = bool(self.newest) and time.monotonic() - self._signed_s < PUT_S / 2
        if too_early or not self._unused_left:
            raise GrantExpired(
                f"machine {self._machine} asks for grants for packs again and again, and "
                f"has stored none with the last ones: {why or 'it does not say why'}"
            )
        self._unused_left -= 1


class RemoteSnapshot(RemoteRun):
    """One snapshot of one machine's workspace, from ``begin`` to ``end``. ``user_files``: the
    snapshot is of files in a home instead.

    Every method may raise AgentLost; the next pass then uses what is already stored. Call one
    method at a time.
    """

    def __init__(
        self,
        agent: Agent,
        store: ObjectStore,
        spec: WorkspaceSpec,
        key: bytes | None,
        run: str,
        user_files: UserFiles | None = None,
    ) -> None:
        super().__init__(agent, store, key, run)
        self.spec = spec
        self._user_files = user_files
        self.confirmed: Confirmed | None = None  # the last comparison with the disk
        self._resumed: list[ObjectKey] = []
        self._newest: SnapshotId | None = None
        self._tried: SnapshotId | None = None  # the last commit, which may be within this second
        self._leave: _Leave | None = None
        # bytes stored by this agent, and by those before it
        self._counted = self._before = _Bytes()

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
                self._user_files,
            )
        )
        self._resumed = self._still_there(begun.resumable)

    def walk(self) -> PassesOutcome:
        """Have the machine look for what is new, and store nothing."""
        return self._call_resuming(self._store_request(1))

    def store(
        self, passes: int, unusable: Sequence[ObjectKey] = (), on_event: OnEvent = None
    ) -> PassesOutcome:
        """Have the machine make up to ``passes`` passes, with new grants whenever it needs more;
        ``unusable`` packs must be stored again. Idempotent."""
        self._leave = None
        try:
            return self._store_passes(passes, unusable, on_event)
        except AgentLost:
            self._begin_again()
            return self._store_passes(passes, unusable, on_event)

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
        froze = self._call_resuming(request).programs
        if [program.job for program in froze] != [program.job for program in programs]:
            raise hostile(self.machine, "names other programs than it was asked to freeze")
        return froze

    def unusable_packs(self) -> list[ObjectKey]:
        """Packs that the manifest must not name. The grant for the manifest is signed first: see
        ``UsablePacks``."""
        claims = self._call_resuming(ListPacks(self.run)).packs
        if any(not is_pack_of(self.spec.name, claim.key) for claim in claims):
            raise MachineError(
                f"machine {self.machine} names packs that are none of workspace {self.spec.name}: "
                "do not trust its host, and rent elsewhere"
            )
        self._leave = self._new_leave()
        return UsablePacks.read(self._store, self.spec.name).unusable(claims)

    def commit(self, statistics: dict[str, int]) -> tuple[StoredSnapshot, Committed]:
        """Write the manifest with the grant that ``unusable_packs`` signed, and only after it
        returned no pack. GrantExpired if that was too long ago."""
        if self._leave is None:
            raise RuntimeError("commit comes after unusable_packs, and nothing between them")
        leave = self._leave
        self._tried = leave.snapshot
        committed = self._call_resuming(
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
        return self._call_resuming(
            LookForLosses(self.run, accepted, rented, whole, wait_s, list(volumes))
        )

    def homes(self, *, rented: bool, volumes: Sequence[str] = ()) -> Losses:
        """What a user has written in a home until now; the parameters are as in ``losses``."""
        return self._call_resuming(
            LookAtHomes(self.run, self.spec.accept_lost, rented, list(volumes))
        )

    def reread(self, grants: Sequence[Grant]) -> list[ObjectKey]:
        """Have the machine read packs whole; returns those that are not as written."""
        return self._call_resuming(RereadPacks(self.run, list(grants))).wrong

    def confirm(self) -> Confirmed:
        """Compare the machine's disk with what was committed."""
        self.confirmed = self._call_resuming(Confirm(self.run, self.spec.may_change))
        return self.confirmed

    def end(self, *, committed: bool, kept: bool = True) -> str:
        """Give the workspace back. The agent keeps its index when the snapshot is verified, and
        resumes what the hook stopped if the machine is ``kept``. Returns what went wrong there."""
        return self._call(EndSnapshot(self.run, committed, kept)).resume_error

    def _store_passes(
        self, passes: int, unusable: Sequence[ObjectKey], on_event: OnEvent
    ) -> PassesOutcome:
        """Ask for ``passes`` passes, and go on with new grants each time that the machine needs
        more. A hostile machine may ask for grants at any time: see ``_PackGrants``."""
        made, grants = 0, _PackGrants(self.machine, passes)
        for _ in range(MOST_REQUESTS):
            request = self._store_request(passes - made, grants.newest, unusable)
            seen = self._call(request, _counted_from(made, passes, on_event))
            made += seen.passes
            self._count(seen)
            if made > passes or (made == passes if seen.packs else not made):
                raise hostile(self.machine, f"says that it has made {made} of {passes} passes")
            if not seen.packs:
                return self._in_all(seen, made)
            if not self._has_stored_one_of(grants.newest, seen.stored):
                grants.ask_without_use(seen.why)
            grants.replace(self._pack_grants(min(seen.packs, PACKS_AT_ONCE)))
            unusable = ()
        raise GrantExpired(
            f"machine {self.machine} has asked {MOST_REQUESTS} times for more grants for packs"
        )

    def _in_all(self, seen: PassesOutcome, made: int) -> PassesOutcome:
        """The last answer, with the passes and bytes of all requests and agents added up."""
        return msgspec.structs.replace(
            seen,
            passes=made,
            new_bytes=self._before.new + seen.new_bytes,
            stored_bytes=self._before.stored + seen.stored_bytes,
        )

    def _store_request(
        self, passes: int, packs: Sequence[Grant] = (), unusable: Sequence[ObjectKey] = ()
    ) -> StorePasses:
        return StorePasses(
            self.run,
            passes,
            list(packs),
            self._resumed,
            list(unusable),
            self.spec.may_change,
            self.spec.accept_lost,
        )

    def _has_stored_one_of(self, packs: Sequence[Grant], stored: str) -> bool:
        key = next((pack.key for pack in packs if pack.key == stored), None)
        return key is not None and self._store.head(key) is not None

    def _pack_grants(self, count: int) -> list[Grant]:
        """Grants, one for each new pack. A grant that could replace what was verified ends after
        PUT_S; one that is good for one write lasts as long as all of them may take."""
        grants = []
        for _ in range(count):
            key = new_pack_key(self.spec.name)
            grant = self._store.grant("PUT", key, expires_s=PUT_S)
            grants.append(self._grant("PUT", key, count * PACK_BYTES) if grant.once else grant)
        return grants

    def _count(self, seen: PassesOutcome) -> None:
        """Add what the run has stored so far; a new agent counts from 0."""
        if seen.new_bytes < self._counted.new:
            self._before = _Bytes(*map(sum, zip(self._before, self._counted, strict=True)))
        self._counted = _Bytes(seen.new_bytes, seen.stored_bytes)

    def _begin_again(self) -> None:
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
        if not claims:
            return []
        missing, _ = compare_packs(stored_packs(self._store, self.spec.name), claims)
        return [claim.key for claim in claims if claim.key not in missing]


def _counted_from(made: int, passes: int, on_event: OnEvent) -> OnEvent:
    """A callback that passes events on to ``on_event``, with passes counted over all requests, up
    to ``passes``."""
    if on_event is None:
        return None
    hears = on_event

    def hear(event: Event) -> None:
        number = min(made + event.pass_number, passes) if event.pass_number else 0
        hears(msgspec.structs.replace(event, pass_number=number))

    return hear
