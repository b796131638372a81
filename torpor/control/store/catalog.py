"""The catalog of a workspace: what its receipts and its unverified manifests say, in one object.

Each look at a workspace wants to know what every snapshot goes on from, which machine made it, and
whether it is verified. The receipts say so, one object for each snapshot. The catalog keeps what
was read of them, beside the ETags of what was read, so that the next look reads one object, however
many snapshots there are. An entry counts only while the store's listings show these ETags; what has
no such entry is read. A catalog that cannot be read, that no control side of this store signed, or
that is of another version costs requests, and nothing else: the receipts say all of it. Before a
snapshot goes, the receipt of its successor is read itself (upkeep/superseded.py).
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from contextlib import suppress
from functools import cached_property
from typing import Final, NamedTuple

import msgspec
import zstandard
from msgspec.structs import replace
from zstandard import ZstdError

from torpor.control.store.manifests import ReadManifest, manifests, open_manifest
from torpor.control.store.object_store import ObjectStore
from torpor.control.store.receipts import (
    Receipt,
    agent_of,
    is_autosave,
    receipt_of,
    receipts_prefix,
)
from torpor.control.store.signatures import Forged, Unsigned
from torpor.shared.errors import InvalidInput, StoreError
from torpor.shared.format.keys import Seal
from torpor.shared.format.lineage import LINEAGE, OWN_SAVE, Lineage, recorded
from torpor.shared.format.names import snapshot_of
from torpor.shared.transfer.retries import hurried
from torpor.shared.values import MIB, ObjectKey, SnapshotId, StoredObject, WorkspaceName, learned

FEW: Final = 8
"""Objects that each look may read besides the catalog before a new catalog is written."""
CATALOG: Final = "catalog"
"""The catalog's name beside the receipts, whose listing shows whether it exists."""
MOST_PLAIN: Final = 32 * MIB
"""Most plain bytes of a catalog: room for the newest 4,500 snapshots at least, where their lineages
name one another. Older ones are read by each look."""
_MOST_BYTES: Final = 2 * MOST_PLAIN
_ENTRY_BYTES: Final = 1024  # bytes of an entry at most, without lists and names
_NAME_BYTES: Final = 32


class ManifestSummary(msgspec.Struct, frozen=True):
    """What a manifest says of its snapshot. ``lineage``: None where it says none."""

    agent: str
    own: bool
    autosave: bool
    lineage: Lineage | None


class _Entry(msgspec.Struct, frozen=True, array_like=True):
    """``versions``: of the manifest and of the receipt that were read; "" without a receipt.
    ``snapshot`` and ``lists`` are numbers of names in the table, as little-endian uint32: the
    ancestors and saves of the lineage, and what is ``older`` in the receipt."""

    snapshot: int
    versions: tuple[str, str]
    receipt: Receipt | None
    said: ManifestSummary | None
    lists: tuple[bytes, bytes, bytes]


class _Shape(msgspec.Struct, frozen=True):
    """The fields of what is kept. ``shape`` differs in another version of torpor, which then reads
    everything again."""

    shape: list[str]


class _Table(_Shape, frozen=True):
    """``oldest``: the oldest snapshot for which there was room; "" where there was for all."""

    oldest: str
    names: list[SnapshotId]
    entries: list[_Entry]


_STORED: Final[dict[str, type[msgspec.Struct]]] = {  # by the names that catalogs hold
    "Receipt": Receipt,
    "Said": ManifestSummary,
    "Lineage": Lineage,
    "_Entry": _Entry,
}
SHAPE: Final = [
    f"{name}.{field}" for name, kind in _STORED.items() for field in kind.__struct_fields__
]
_SHAPES: Final = msgspec.msgpack.Decoder(_Shape)
_TABLES: Final = msgspec.msgpack.Decoder(_Table)


class _Known(NamedTuple):
    """What is known of a snapshot while its manifest and receipt have these versions."""

    versions: tuple[str, str]
    receipt: Receipt | None
    said: ManifestSummary | None


class Catalog:
    """The snapshots of a workspace as two listings and the catalog show them: that of the manifests
    now, that of the receipts once somebody asks for one. ``manifests``: oldest id first. ``read``:
    a manifest that the caller has read, so that it is not read again."""

    def __init__(
        self, store: ObjectStore, workspace: WorkspaceName, read: ReadManifest | None = None
    ) -> None:
        self._store = store
        self._workspace = workspace
        self._key = ObjectKey(receipts_prefix(workspace) + CATALOG)
        self.manifests = manifests(store, workspace)
        self._read = read
        self._known: dict[SnapshotId, _Known] = {}
        self._unkept = 0

    def receipts(self) -> dict[SnapshotId, Receipt]:
        """The receipt of each snapshot that is verified and exists; newest first."""
        newest_first = sorted(self.manifests.keys() & self._receipts.keys(), reverse=True)
        found = {snapshot: self.receipt(snapshot) for snapshot in newest_first}
        self.keep()
        return {snapshot: receipt for snapshot, receipt in found.items() if receipt is not None}

    def receipt(self, snapshot: SnapshotId) -> Receipt | None:
        """The receipt of a snapshot that exists; None where it was not verified."""
        if snapshot not in self._receipts:
            return None
        known = self._find(snapshot)
        if known is not None:
            return known.receipt
        read = receipt_of(self._store, self._workspace, snapshot, self.manifests[snapshot])
        if read is not None:
            self._learn(snapshot, read, None)
        return read

    def said(self, snapshot: SnapshotId, seal: Seal) -> ManifestSummary:
        """What the manifest of a snapshot without a receipt says. If it was not read before,
        SnapshotMissing, ManifestInvalid and WrongKey are raised as by ``open_manifest``."""
        known = self._find(snapshot)
        if known is not None and known.said is not None:
            return known.said
        read = self._read
        if read is not None and read.is_of(self.manifests[snapshot]):
            manifest = read.manifest
        else:
            manifest, _ = open_manifest(
                self._store, self._workspace, snapshot, seal, facts=(LINEAGE,)
            )
        own = bool(manifest.statistics.get(OWN_SAVE))
        said = ManifestSummary(agent_of(manifest), own, is_autosave(manifest), recorded(manifest))
        if snapshot not in self._receipts:  # a receipt that is not trusted now may be trusted later
            self._learn(snapshot, None, said)
        return said

    def agent(self, snapshot: SnapshotId, seal: Seal) -> str:
        """The name of an existing snapshot's machine for itself. Raises as ``said`` does."""
        receipt = self.receipt(snapshot)
        return self.said(snapshot, seal).agent if receipt is None else receipt.agent

    def keep(self) -> None:
        """Write the catalog if more than FEW objects were read beside it. If that fails, the next
        look reads them again."""
        if self._unkept <= FEW:
            return
        self._unkept = 0
        body = msgspec.json.encode(zstandard.ZstdCompressor(level=1).compress(self._encoded()))
        with hurried(), suppress(StoreError):
            self._store.put(self._key, self._store.signer.sign(self._key, body))

    def _find(self, snapshot: SnapshotId) -> _Known | None:
        """What is known of the snapshot as the listings show it."""
        if snapshot not in self._known and snapshot in self._entries:
            self._known[snapshot] = _decoded(self._entries[snapshot], self._table.names)
        known = self._known.get(snapshot)
        return known if known is not None and known.versions == self._versions(snapshot) else None

    def _learn(
        self, snapshot: SnapshotId, receipt: Receipt | None, said: ManifestSummary | None
    ) -> None:
        versions = self._versions(snapshot)
        if versions is not None:
            self._known[snapshot] = _Known(versions, receipt, said)
            self._unkept += snapshot >= self._table.oldest

    def _versions(self, snapshot: SnapshotId) -> tuple[str, str] | None:
        """The ETags of a snapshot's manifest and receipt; None where the store shows none, so that
        nothing is remembered after this look."""
        manifest, receipt = self.manifests[snapshot], self._receipts.get(snapshot)
        if not manifest.etag or (receipt is not None and not receipt.etag):
            return None
        return _version(manifest), "" if receipt is None else _version(receipt)

    def _encoded(self) -> bytes:
        names: dict[SnapshotId, int] = {}
        entries: list[_Entry] = []
        oldest, left = "", MOST_PLAIN
        for snapshot in sorted(self.manifests, reverse=True):
            if (known := self._find(snapshot)) is None:
                continue
            before = len(names)
            entry = _entry(snapshot, known, names)
            left -= _ENTRY_BYTES + sum(map(len, entry.lists)) + _NAME_BYTES * (len(names) - before)
            if left < 0:
                break
            entries.append(entry)
            oldest = snapshot
        return msgspec.msgpack.encode(_Table(SHAPE, oldest if left < 0 else "", [*names], entries))

    @cached_property
    def _listed(self) -> dict[ObjectKey, StoredObject]:
        return {found.key: found for found in self._store.list(receipts_prefix(self._workspace))}

    @cached_property
    def _receipts(self) -> dict[SnapshotId, StoredObject]:
        receipts = {}
        for key, found in self._listed.items():
            with suppress(InvalidInput):  # another program's object in this prefix
                receipts[snapshot_of(key)] = found
        return receipts

    @cached_property
    def _entries(self) -> dict[SnapshotId, _Entry]:
        return {self._table.names[one.snapshot]: one for one in self._table.entries}

    @cached_property
    def _table(self) -> _Table:
        is_there = self._key in self._listed
        with hurried(), suppress(StoreError, Unsigned, Forged, msgspec.MsgspecError, ZstdError):
            if is_there:
                blob = self._store.get(self._key, max_bytes=_MOST_BYTES)
                body = msgspec.json.decode(
                    self._store.signer.check(self._key, blob), type=learned(bytes)
                )
                if 0 < zstandard.frame_content_size(body) <= _MOST_BYTES:
                    plain = zstandard.ZstdDecompressor().decompress(body)
                    if _SHAPES.decode(plain).shape == SHAPE:
                        return _TABLES.decode(plain)
        return _Table(SHAPE, "", [], [])


def _version(found: StoredObject) -> str:
    return f"{found.etag} {found.bytes} {found.modified_unix:.3f}"


def _entry(snapshot: SnapshotId, known: _Known, names: dict[SnapshotId, int]) -> _Entry:
    def numbers(wanted: Sequence[SnapshotId]) -> bytes:
        found = [names.setdefault(name, len(names)) for name in wanted]
        return struct.pack(f"<{len(found)}I", *found)

    number = names.setdefault(snapshot, len(names))
    receipt, said = known.receipt, known.said
    line = receipt.lineage if receipt is not None else None
    line = said.lineage if said is not None else line
    bare = None if line is None else replace(line, ancestors=[], saves=[])
    return _Entry(
        number,
        known.versions,
        None if receipt is None else replace(receipt, lineage=bare, older=[]),
        None if said is None else replace(said, lineage=bare),
        (
            numbers([] if line is None else line.ancestors),
            numbers([] if line is None else line.saves),
            numbers([] if receipt is None else receipt.older),
        ),
    )


def _decoded(entry: _Entry, names: Sequence[SnapshotId]) -> _Known:
    ancestors, saves, older = (
        [names[number] for number in struct.unpack(f"<{len(packed) // 4}I", packed)]
        for packed in entry.lists
    )

    def whole(bare: Lineage | None) -> Lineage | None:
        return None if bare is None else replace(bare, ancestors=ancestors, saves=saves)

    receipt, said = entry.receipt, entry.said
    return _Known(
        entry.versions,
        None if receipt is None else replace(receipt, lineage=whole(receipt.lineage), older=older),
        None if said is None else replace(said, lineage=whole(said.lineage)),
    )
