"""Verifies snapshots from the control side: which objects exist, which are damaged, and which
snapshots and files need them.

``quick_look`` checks the manifests and the store's listing. A machine's agent reads the bytes
(remote/examination.py); ``Verification.heard`` adds what it reports.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final, Literal, NamedTuple

import msgspec

from torpor.control.safety import check_readable
from torpor.control.store.manifests import open_manifest, snapshot_ids
from torpor.control.store.object_store import ObjectStore
from torpor.control.upkeep.pins import pinned_ids
from torpor.shared.errors import ManifestInvalid, SnapshotMissing, StoreCorrupt, WrongKey
from torpor.shared.format.keys import Seal
from torpor.shared.format.manifest import FILE, HARDLINK, Chunk, Manifest, Pack
from torpor.shared.format.names import manifest_key, pack_id_of, pack_key, packs_prefix
from torpor.shared.values import Grant, ObjectKey, SnapshotId, WorkspaceName

SHOWN: Final = 10
"""The most paths and objects that a verdict lists. Counts are always complete."""
_MOST_PATH: Final = 150
"""The most characters of a path in a verdict."""

_FAULTS: Final = (ManifestInvalid, SnapshotMissing, StoreCorrupt, WrongKey)
"""Errors that are a verdict on a manifest. A flipped bit in its header may be reported as
WrongKey."""

Fault = Literal["missing", "cut short", "of another size", "damaged"]


class PackDamage(msgspec.Struct, frozen=True):
    """A fault of one pack. ``lost``: the offsets of the lost chunks, or None if the pack was not
    read, and all of its chunks may be lost."""

    fault: Fault
    lost: frozenset[int] | None


class SnapshotVerdict(msgspec.Struct, frozen=True):
    """What a verify found about one snapshot. ``fault`` is a fault of its manifest or its drill.
    ``damaged_files`` may be lost; if the packs were read, they are lost."""

    snapshot: SnapshotId
    fault: str
    files: int
    damaged_files: int
    paths: list[str]  # the first of the damaged files
    damaged_objects: int
    objects: list[ObjectKey]  # the first of the damaged objects

    @property
    def whole(self) -> bool:
        return not self.fault and not self.damaged_objects

    @property
    def restorable(self) -> bool:
        """Every file can be restored, although an object may differ from what was written."""
        return not self.fault and not self.damaged_files


class Verification:
    """What is known so far about the snapshots of a workspace. One manifest is in memory at a time;
    the packs of each, and the chunks of all together, stay."""

    def __init__(
        self,
        store: ObjectStore,
        workspace: WorkspaceName,
        seal: Seal,
        paths: Sequence[str] | None = None,
    ) -> None:
        self.workspace = workspace
        self.faults: dict[bytes, PackDamage] = {}
        self.unproven: set[bytes] = set()
        """Packs of the right size whose MD5 the store does not show: only reading proves them."""
        self.objects = 0
        self.bytes = 0
        self._store = store
        self._seal = seal
        self._paths = paths
        self._snapshots: dict[SnapshotId, _Seen] = {}
        self._chunks: dict[Pack, dict[tuple[int, bytes], Chunk]] = {}

    def look(self, snapshot: SnapshotId) -> None:
        """Read one manifest, and keep which packs and chunks it uses."""
        self.objects += 1
        try:
            manifest, root = self._manifest(snapshot)
        except _FAULTS as fault:
            key = manifest_key(self.workspace, snapshot)
            self._snapshots[snapshot] = _Seen("", str(fault), 0, frozenset(), [key])
            return
        used = [self._chunks.setdefault(pack, {}) for pack in manifest.packs]
        for chunk in manifest.chunks:
            used[chunk.pack].setdefault((chunk.offset, chunk.name), chunk)
        files = sum(entry.kind in (FILE, HARDLINK) for entry in manifest.entries)
        packs = frozenset(pack.id for pack in manifest.packs)
        self._snapshots[snapshot] = _Seen(root.hex(), "", files, packs, [])

    def compare(self) -> None:
        """Compare every pack with the store's listing. StoreArchived where all are there, and some
        cannot be read now."""
        there = {stored.key: stored for stored in self._store.list(packs_prefix(self.workspace))}
        for pack in self._chunks:
            self.objects += 1
            self.bytes += pack.size
            stored = there.get(pack_key(self.workspace, pack.id))
            if stored is None:
                self.faults[pack.id] = PackDamage("missing", None)
            elif stored.bytes != pack.size:
                fault: Fault = "cut short" if stored.bytes < pack.size else "of another size"
                self.faults[pack.id] = PackDamage(fault, None)
            elif stored.md5 is None:
                self.unproven.add(pack.id)
            elif stored.md5 != pack.md5.hex():
                self.faults[pack.id] = PackDamage("damaged", None)
        # otherwise the damage is named, which is lost, while the archive only waits
        if not self.faults:
            check_readable(self._store, there, self.workspace, self._chunks)

    def works(self) -> list[tuple[Pack, list[Chunk]]]:
        """Every pack with the chunks that snapshots use. Honest manifests agree where a chunk
        begins and ends; if some do not, the pack is returned once for each version."""
        found = []
        for pack, chunks in self._chunks.items():
            layers: list[list[Chunk]] = []
            for chunk in sorted(chunks.values(), key=lambda c: c.offset):
                for layer in layers:
                    if layer[-1].offset + layer[-1].stored <= chunk.offset:
                        layer.append(chunk)
                        break
                else:
                    layers.append([chunk])
            found += [(pack, layer) for layer in layers or [[]]]
        return found

    def heard(self, pack_id: bytes, fault: Fault | Literal[""], lost: Iterable[int]) -> None:
        """Record what a machine found when it read the pack. This overrides the listing."""
        self.unproven.discard(pack_id)
        known = self.faults.get(pack_id)
        gone = frozenset(lost) | ((known.lost if known else None) or frozenset())
        if fault:
            self.faults[pack_id] = PackDamage(fault, gone)
        elif known is not None and known.fault == "damaged" and not gone:
            del self.faults[pack_id]  # what the store shows is not the MD5
        elif known is not None:
            self.faults[pack_id] = PackDamage(known.fault, gone)

    def blame(self, snapshot: SnapshotId, fault: str) -> None:
        """Record a fault of the snapshot itself, whatever the state of its objects."""
        known = self._snapshots[snapshot]
        self._snapshots[snapshot] = known._replace(fault=known.fault or fault)

    def whole_so_far(self, snapshot: SnapshotId) -> bool:
        """Whether no damage of the snapshot is known yet."""
        known = self._snapshots[snapshot]
        return not known.fault and self.faults.keys().isdisjoint(known.packs)

    def wrong(self, grants: Sequence[Grant]) -> list[ObjectKey]:
        """The packs among these that are damaged, or that nobody has read."""
        keys = {grant.key: pack_id_of(grant.key) for grant in grants}
        return [
            key
            for key, pack_id in keys.items()
            if pack_id in self.faults or pack_id in self.unproven
        ]

    def unread(self, snapshot: SnapshotId) -> bool:
        """Whether nobody has read some pack of the snapshot whose MD5 the store does not show."""
        return not self.unproven.isdisjoint(self._snapshots[snapshot].packs)

    def root_of(self, snapshot: SnapshotId) -> str:
        """The root hash in hex; empty where the manifest could not be read."""
        return self._snapshots[snapshot].root

    def verdicts(self) -> list[SnapshotVerdict]:
        """A verdict on each snapshot, newest first. Reads the manifests of damaged ones again."""
        return [
            self._verdict(name, self._snapshots[name]) for name in sorted(self._snapshots)[::-1]
        ]

    def _verdict(self, snapshot: SnapshotId, known: _Seen) -> SnapshotVerdict:
        bad = sorted(pack_id for pack_id in known.packs if pack_id in self.faults)
        fault, paths = known.fault, list[str]()
        if bad:
            try:
                paths = _damaged_paths(self._manifest(snapshot)[0], self.faults)
            except _FAULTS as gone:
                fault = fault or str(gone)
        objects = known.objects + [pack_key(self.workspace, pack_id) for pack_id in bad]
        return SnapshotVerdict(
            snapshot=snapshot,
            fault=fault,
            files=known.files,
            damaged_files=len(paths),
            paths=[path[:_MOST_PATH] for path in paths[:SHOWN]],
            damaged_objects=len(objects),
            objects=objects[:SHOWN],
        )

    def _manifest(self, snapshot: SnapshotId) -> tuple[Manifest, bytes]:
        return open_manifest(self._store, self.workspace, snapshot, self._seal, self._paths)


def quick_look(
    store: ObjectStore,
    workspace: WorkspaceName,
    seal: Seal,
    wanted: Sequence[SnapshotId],
    paths: Sequence[str] | None = None,
) -> Verification:
    """The quick look: whether every object that snapshots name exists with its size and MD5, and
    whether each snapshot names no other directories than ``paths``.

    Raises the store's errors: unknown is not a verdict.
    """
    found = Verification(store, workspace, seal, paths)
    for snapshot in wanted:
        found.look(snapshot)
    found.compare()
    return found


def to_verify(store: ObjectStore, workspace: WorkspaceName) -> list[SnapshotId]:
    """Every snapshot that should exist: the listed ones and the pinned ones.

    Raises SnapshotMissing if there is none: empty is not success.
    """
    every = sorted({*snapshot_ids(store, workspace), *pinned_ids(store, workspace)}, reverse=True)
    if not every:
        raise SnapshotMissing(
            f"workspace {workspace} has no snapshot in {store.address}: there is nothing to "
            "verify; check the workspace's name and store block"
        )
    return every


class _Seen(NamedTuple):
    root: str
    fault: str
    files: int
    packs: frozenset[bytes]
    objects: list[ObjectKey]


def _damaged_paths(manifest: Manifest, faults: dict[bytes, PackDamage]) -> list[str]:
    """Every file with a lost chunk, under each of its names."""
    of_packs = [faults.get(pack.id) for pack in manifest.packs]
    lost = {
        number
        for number, chunk in enumerate(manifest.chunks)
        if (fault := of_packs[chunk.pack]) is not None
        and (fault.lost is None or chunk.offset in fault.lost)
    }
    files = {
        (entry.root, entry.path)
        for entry in manifest.entries
        if entry.kind == FILE and any(extent.chunk in lost for extent in entry.extents)
    }
    return [
        f"{manifest.roots[entry.root]}/{entry.path.decode(errors='backslashreplace')}"
        for entry in manifest.entries
        if (entry.root, entry.path) in files
        or (entry.kind == HARDLINK and (entry.root, entry.target) in files)
    ]
