"""What a bucket says of the workspaces in it, to a host that knows nothing else of them."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Final

from torpor.control.jobs.records import Job, Jobs
from torpor.control.rental.records import Rental, Rentals
from torpor.control.reports import Row
from torpor.control.store.block_records import BlockRecord, BlockRecords
from torpor.control.store.object_store import ObjectStore
from torpor.control.store.records import Unread
from torpor.control.store.signatures import Forged, Unsigned
from torpor.control.upkeep.pins import pinned_ids
from torpor.control.upkeep.signing import is_signed_kind
from torpor.shared.errors import InvalidInput, RecordRefused, StoreError
from torpor.shared.format.names import snapshot_of
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
    workspace_name,
)

_TRIED: Final = 20
"""Records of which one must be signed with the key at hand."""
_BESIDE: Final = (*RESERVED, BASE, HOME)
"""What names begin with under which a workspace has things of its own."""


@dataclass
class InBucket:
    """One workspace. ``records``: of its blocks; ``unread``: the records of any kind that cannot be
    believed or read, and why."""

    name: WorkspaceName
    snapshots: list[SnapshotId] = field(default_factory=list)
    records: list[BlockRecord] = field(default_factory=list)
    rentals: list[Rental] = field(default_factory=list)
    jobs: list[Job] = field(default_factory=list)
    pins: int = 0
    unread: Unread = field(default_factory=dict)

    def row(self) -> Row:
        return {
            "workspace": self.name,
            "snapshots": str(len(self.snapshots)),
            "newest": max(self.snapshots, default=""),
            "pins": str(self.pins),
            "rentals": ", ".join(_words(one) for one in self.rentals),
            "jobs": ", ".join(f"{one.id} ({one.state})" for one in self.jobs),
            "blocks": ", ".join(one.settings.block for one in self.records) or "none on record",
        }


def _words(rental: Rental) -> str:
    return f"{rental.machine or 'not named'} at {rental.provider} ({rental.state})"


def look_at_bucket(
    store: ObjectStore,
    store_key: bytes | None,
    wanted: Collection[WorkspaceName] = (),
    *,
    believe: bool = False,
) -> list[InBucket]:
    """The workspaces of a bucket, or the ``wanted`` ones, by one listing and their records.
    ``believe``: also records of blocks that were put back. InvalidInput where this key has signed
    none of the bucket's records; nothing is changed."""
    listed = _listed(store, wanted)
    names = {name for name in listed if not name.startswith(_BESIDE)}
    missing = ", ".join(sorted({*wanted} - names))
    if missing:
        raise InvalidInput(f"{store.address} has nothing of workspace {missing}")
    _check_key(store, [one for name in names for one in listed[name]])
    return [_look(store, store_key, name, listed[name], believe=believe) for name in sorted(names)]


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


def _check_key(store: ObjectStore, listed: Sequence[StoredObject]) -> None:
    """InvalidInput where nothing that is signed was signed with this key."""
    signed = [one.key for one in listed if is_signed_kind(one.key)]
    signed.sort(key=lambda key: "/blocks/" not in key)
    tried = 0
    for key in signed[:_TRIED]:
        try:
            store.signer.check(key, store.get(key, max_bytes=MIB))
        except (Forged, Unsigned, StoreError):
            tried += 1
        else:
            return
    if tried:
        raise InvalidInput(
            f"the key has signed none of {tried} records in {store.address}: give the key that the "
            "old host had for this bucket (`init` kept it in ~/.local/state/torpor/keys), and the "
            "same bucket and prefix. Nothing was changed. Where that key is lost, or the bucket "
            "was copied from another name, --believe-records takes the records as they are"
        )


def _look(
    store: ObjectStore,
    store_key: bytes | None,
    name: WorkspaceName,
    listed: Sequence[StoredObject],
    *,
    believe: bool,
) -> InBucket:
    found = InBucket(name)
    blocks = BlockRecords(store, store_key)
    for stored in listed:
        _, _, kind, last = _parts(stored.key)
        if kind == "snapshots":
            try:
                found.snapshots.append(snapshot_of(stored.key))
            except InvalidInput:
                continue  # another program's
        elif kind == "blocks":
            try:
                record = blocks.read(name, last, None if believe else stored)
            except (RecordRefused, StoreError) as error:
                found.unread[stored.key] = error
                continue
            if record is not None:
                found.records.append(record[0])
    for one in names_of(name):
        found.rentals += Rentals(store, one).open(found.unread)
    found.jobs = Jobs(store, name).open(found.unread)
    found.pins = sum(1 for _ in pinned_ids(store, name))
    return found


def _parts(key: ObjectKey) -> tuple[str, str, str, str]:
    top, name, kind, last = key.split("/", 3)
    return top, name, kind, last
