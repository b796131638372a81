"""Which snapshots a workspace has in a store, and reading their manifests."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import NamedTuple

from torpor.control.store.object_store import ObjectStore
from torpor.shared.errors import InvalidInput, ManifestInvalid, SnapshotMissing, StoreMissing
from torpor.shared.format.checks import check_manifest
from torpor.shared.format.keys import Seal
from torpor.shared.format.manifest import (
    HEADER_BYTES,
    MAX_BODY_BYTES,
    Manifest,
    decode_manifest,
    manifest_root,
)
from torpor.shared.format.names import manifest_key, snapshot_of, snapshots_prefix
from torpor.shared.format.roots import check_roots
from torpor.shared.transfer.transfer import Range
from torpor.shared.values import SnapshotId, StoredObject, StoredSnapshot, WorkspaceName

MAX_MANIFEST_BYTES = MAX_BODY_BYTES


def list_snapshots(
    store: ObjectStore, workspace: WorkspaceName, *, newest: int | None = None
) -> list[StoredSnapshot]:
    """The workspace's snapshots, newest first; at most ``newest`` of them."""
    objects = list(_manifests(store, workspace))[::-1][:newest]
    return [stored_snapshot(store, workspace, found) for found in objects]


def snapshot_ids(store: ObjectStore, workspace: WorkspaceName) -> list[SnapshotId]:
    """The ids of the workspace's snapshots, oldest first. Needs only a listing."""
    return [snapshot_of(found.key) for found in _manifests(store, workspace)]


def snapshot_times(store: ObjectStore, workspace: WorkspaceName) -> dict[SnapshotId, float]:
    """When each snapshot appeared in the store, by the store's clock; oldest id first."""
    return {
        snapshot_of(manifest.key): manifest.modified_unix
        for manifest in _manifests(store, workspace)
    }


def manifests(store: ObjectStore, workspace: WorkspaceName) -> dict[SnapshotId, StoredObject]:
    """The object of each snapshot's manifest; oldest id first."""
    return {snapshot_of(manifest.key): manifest for manifest in _manifests(store, workspace)}


def newest_snapshot(store: ObjectStore, workspace: WorkspaceName) -> SnapshotId | None:
    """The id that sorts last; None without any."""
    return max(snapshot_ids(store, workspace), default=None)


def find_snapshot(
    store: ObjectStore, workspace: WorkspaceName, snapshot: SnapshotId | None
) -> StoredSnapshot:
    """The named snapshot, or the newest. SnapshotMissing names those that exist."""
    objects = {snapshot_of(found.key): found for found in _manifests(store, workspace)}
    wanted = max(objects, default=None) if snapshot is None else snapshot
    if wanted is not None and wanted in objects:
        # Read only this one: another may be damaged.
        return stored_snapshot(store, workspace, objects[wanted])
    there = ", ".join(sorted(objects, reverse=True)[:5]) or "none"
    raise SnapshotMissing(
        f"workspace {workspace} has no snapshot{f' {snapshot}' if snapshot else ''} in "
        f"{store.address}; there: "
        f"{there}. Check the workspace's name and store block, or hibernate it first"
    )


class ReadManifest(NamedTuple):
    """A manifest, and its object as the store showed it right before the manifest was read."""

    seen: StoredObject | None
    manifest: Manifest

    def is_of(self, found: StoredObject) -> bool:
        """Whether ``found``, in a listing, is the object that was read."""
        seen = self.seen
        if seen is None or not seen.etag:
            return False
        return (seen.key, seen.etag) == (found.key, found.etag)


def read_manifest(
    store: ObjectStore,
    wanted: StoredSnapshot,
    seal: Seal,
    paths: Sequence[str] | None = None,
) -> Manifest:
    """A checked manifest whose root hash is the listed one. OtherPaths where it names other
    directories than ``paths``; without ``paths`` any are accepted, and nothing may be restored from
    the manifest."""
    manifest, root = open_manifest(store, wanted.workspace, wanted.snapshot, seal, paths)
    if root.hex() != wanted.root:
        what = _what(store, wanted.workspace, wanted.snapshot)
        raise SnapshotMissing(f"{what} was replaced after it was listed: list the snapshots again")
    return manifest


def read_with_object(
    store: ObjectStore,
    wanted: StoredSnapshot,
    seal: Seal,
    paths: Sequence[str] | None = None,
) -> ReadManifest:
    """As ``read_manifest``, with the object of the manifest."""
    seen = store.head(manifest_key(wanted.workspace, wanted.snapshot))
    return ReadManifest(seen, read_manifest(store, wanted, seal, paths))


def open_manifest(
    store: ObjectStore,
    workspace: WorkspaceName,
    snapshot: SnapshotId,
    seal: Seal,
    paths: Sequence[str] | None = None,
    *,
    facts: Collection[str] | None = None,
) -> tuple[Manifest, bytes]:
    """A checked manifest and its root hash, by its name alone; ``paths`` as in read_manifest.
    ``facts``: read only these of its environment record. Raises SnapshotMissing, ManifestInvalid
    and WrongKey."""
    what = _what(store, workspace, snapshot)
    try:
        blob = store.get(manifest_key(workspace, snapshot), max_bytes=MAX_MANIFEST_BYTES)
    except StoreMissing:
        raise SnapshotMissing(
            f"{what} is gone: it was deleted meanwhile; list the snapshots"
        ) from None
    manifest, root = decode_manifest(blob, seal, what, facts)
    check_manifest(manifest, what)
    if (manifest.workspace, manifest.snapshot) != (workspace, snapshot):
        raise ManifestInvalid(
            f"{what} is not what its name says: it holds snapshot {manifest.snapshot} of "
            f"workspace {manifest.workspace}"
        )
    if paths is not None:
        check_roots(manifest, paths, what)
    return manifest, root


def _what(store: ObjectStore, workspace: WorkspaceName, snapshot: SnapshotId) -> str:
    return f"snapshot {snapshot} of workspace {workspace} in {store.address}"


def _manifests(store: ObjectStore, workspace: WorkspaceName) -> Iterator[StoredObject]:
    for found in store.list(snapshots_prefix(workspace)):
        try:
            snapshot_of(found.key)
        except InvalidInput:
            continue  # another program's object in this prefix
        yield found


def stored_snapshot(
    store: ObjectStore, workspace: WorkspaceName, found: StoredObject
) -> StoredSnapshot:
    """The snapshot of this manifest, whose header is read."""
    root = root_of(store, found)
    return StoredSnapshot(workspace, snapshot_of(found.key), root, found.bytes, found.modified_unix)


def root_of(store: ObjectStore, found: StoredObject) -> str:
    """The root hash (hex) in the header of this manifest; unchecked."""
    what = f"{found.key} in {store.address}"
    if not found.bytes:
        raise ManifestInvalid(f"{what} is empty, so it is no manifest any more: run verify")
    header = store.get_range(found.key, Range(0, min(HEADER_BYTES, found.bytes)))
    return manifest_root(header, what).hex()
