"""What a bucket says of the workspaces in it, to a host that knows nothing else of them."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Final

from torpor.control.jobs.records import Job, Jobs
from torpor.control.rental.records import Rental, Rentals
from torpor.control.reports import Row, moment
from torpor.control.store.manifests import open_manifest
from torpor.control.store.object_store import ObjectStore
from torpor.control.store.records import Unread
from torpor.control.store.signatures import Forged, Unsigned
from torpor.control.store.workspace_records import (
    WITHHELD,
    Settings,
    WorkspaceRecord,
    WorkspaceRecords,
)
from torpor.control.upkeep.pins import pinned_ids
from torpor.control.upkeep.signing import is_signed_kind
from torpor.shared.errors import (
    InvalidInput,
    ManifestInvalid,
    SnapshotMissing,
    StoreCorrupt,
    StoreMissing,
    WrongKey,
)
from torpor.shared.format.keys import Seal, workspace_key
from torpor.shared.format.names import settings_key, snapshot_of, snapshots_prefix
from torpor.shared.values import (
    BASE,
    HOME,
    MIB,
    RESERVED,
    ObjectKey,
    SnapshotId,
    StoredObject,
    WorkspaceName,
    names_of,
    object_key,
    workspace_name,
)

_BESIDE: Final = (*RESERVED, BASE, HOME)
"""What names begin with under which a workspace has things of its own."""
_MOST_BYTES: Final = 33 * MIB  # a mark of prune; all others are small


@dataclass
class InBucket:
    """One workspace. ``unread``: the records of any kind that cannot be believed, and why."""

    name: WorkspaceName
    snapshots: list[SnapshotId] = field(default_factory=list)
    record: WorkspaceRecord | None = None
    rentals: list[Rental] = field(default_factory=list)
    jobs: list[Job] = field(default_factory=list)
    pins: int = 0
    unread: Unread = field(default_factory=dict)

    @property
    def settings(self) -> Settings | None:
        """What its blocks held; None where nobody has kept it."""
        return None if self.record is None else self.record.settings

    def row(self) -> Row:
        owner = None if self.record is None else self.record.owner
        owned = "" if owner is None else f"{owner.host} since {moment(owner.since_unix)}"
        return {
            "workspace": self.name,
            "snapshots": str(len(self.snapshots)),
            "newest": max(self.snapshots, default=""),
            "pins": str(self.pins),
            "rentals": ", ".join(_words(one) for one in self.rentals),
            "jobs": ", ".join(f"{one.id} ({one.state})" for one in self.jobs),
            "block": "none on record" if self.settings is None else self.settings.block,
            "owner": owned,
        }


def _words(rental: Rental) -> str:
    return f"{rental.machine or 'not named'} at {rental.provider} ({rental.state})"


def look_at_bucket(
    store: ObjectStore, store_key: bytes | None, wanted: Collection[WorkspaceName] = ()
) -> tuple[list[InBucket], list[Settings]]:
    """The workspaces of a bucket, or the ``wanted`` ones, by two listings and their records; and
    the settings of all that are on record. InvalidInput where nothing shows that this key is the
    bucket's, or where it is taken for another kind of key. Ends and makes nothing."""
    unread: Unread = {}
    records = WorkspaceRecords(store, store_key)
    on_record = records.listed()
    read = records.read_all(on_record, unread)
    listed = _listed(store, wanted)
    for name in on_record:
        if not wanted or name in wanted:
            listed.setdefault(name, [])
    names = {name for name in listed if not name.startswith(_BESIDE)}
    missing = ", ".join(sorted({*wanted} - names))
    if missing:
        raise InvalidInput(f"{store.address} has nothing of workspace {missing}")
    _check_kind(records, store_key, [*read][:1] if read else on_record, store)
    if not read:
        _check_key(store, store_key, {name: listed[name] for name in names}, len(on_record))
    found = [InBucket(name, record=read.get(name)) for name in sorted(names)]
    for one in found:
        if (error := unread.get(settings_key(one.name))) is not None:
            one.unread[settings_key(one.name)] = error
        _look(store, one, listed[one.name])
    return found, [record.settings for record in read.values() if record.settings is not None]


def _listed(
    store: ObjectStore, wanted: Collection[WorkspaceName]
) -> dict[WorkspaceName, list[StoredObject]]:
    """The snapshots, records and pins of each name; packs only say that the name is there."""
    prefixes = [f"workspaces/{name}/" for name in wanted] or ["workspaces/"]
    found: dict[WorkspaceName, list[StoredObject]] = {}
    for prefix in prefixes:
        for stored in store.list(prefix):
            _, name, kind, *_ = [*stored.key.split("/"), "", ""]
            try:
                own = found.setdefault(workspace_name(name), [])
            except InvalidInput:
                continue  # another program's
            if kind == "snapshots" or is_signed_kind(stored.key):
                own.append(stored)
    return found


def _check_kind(
    records: WorkspaceRecords,
    store_key: bytes | None,
    names: Iterable[WorkspaceName],
    store: ObjectStore,
) -> None:
    """InvalidInput where a store key is taken for the key that signs the records of a plain store,
    or the other way round: both sign, and only the records say whether anything is sealed."""
    known = (sealed for name in names if (sealed := records.is_sealed(name)) is not None)
    sealed = next(known, store_key is not None)
    if store_key is None and sealed:
        raise InvalidInput(
            f"the records in {store.address} are sealed: leave --plain out. Nothing was changed"
        )
    if store_key is not None and not sealed:
        raise InvalidInput(
            f"the records in {store.address} are plain, and this key only signs them: give --plain "
            "too. Nothing was changed"
        )


def _check_key(
    store: ObjectStore,
    store_key: bytes | None,
    listed: dict[WorkspaceName, list[StoredObject]],
    unread: int,
) -> None:
    """InvalidInput where the key has signed none of these records and opens none of these
    snapshots, the smallest first. All are tried: somebody may have put any number of others there.
    ``unread``: so many records of workspaces it has not signed."""
    every = [(name, one) for name, objects in listed.items() for one in objects]
    for name, stored in sorted(every, key=lambda one: one[1].bytes):
        if is_signed_kind(stored.key):
            if _is_signed(store, stored.key):
                return
        elif store_key is not None and _opens(store, store_key, name, stored.key):
            return
    if not every and not unread:
        raise InvalidInput(
            f"{store.address} has nothing of any workspace: give the bucket and the prefix that "
            "the old host had. Nothing was changed"
        )
    raise InvalidInput(
        f"the key has signed none of the records in {store.address}, and opens none of the "
        f"snapshots ({len(every) + unread} objects): give the key that the old host had for this "
        "bucket (`init` kept it in ~/.local/state/torpor/keys), or the store key of its recovery "
        "sheet, and the same bucket and prefix. Nothing was changed"
    )


def _is_signed(store: ObjectStore, key: ObjectKey) -> bool:
    try:
        store.signer.check(key, store.get(key, max_bytes=_MOST_BYTES))
    except (Forged, Unsigned, StoreMissing, StoreCorrupt):
        return False
    return True


def _opens(store: ObjectStore, store_key: bytes, name: WorkspaceName, key: ObjectKey) -> bool:
    try:
        snapshot = snapshot_of(key)
        open_manifest(store, name, snapshot, Seal(workspace_key(store_key, name)))
    except (InvalidInput, ManifestInvalid, SnapshotMissing, StoreCorrupt, WrongKey):
        return False
    return True


def _look(store: ObjectStore, found: InBucket, listed: Sequence[StoredObject]) -> None:
    """Fill in what the bucket says of the workspace beside its record."""
    name = found.name
    for stored in listed:
        if stored.key.startswith(snapshots_prefix(name)):
            try:
                found.snapshots.append(snapshot_of(stored.key))
            except InvalidInput:
                continue  # another program's
    for name_there in names_of(name):
        with _kept_back(found, "rentals"):
            found.rentals += Rentals(store, name_there).open(found.unread)
    with _kept_back(found, "jobs"):
        found.jobs = Jobs(store, name).open(found.unread)
    with _kept_back(found, "pins"):
        found.pins = sum(1 for _ in pinned_ids(store, name))


@contextmanager
def _kept_back(found: InBucket, what: str) -> Iterator[None]:
    """Name what the store keeps to itself: an object in an archive, or of somebody else's key."""
    try:
        yield
    except WITHHELD as error:
        found.unread[object_key(f"workspaces/{found.name}/{what}")] = error
