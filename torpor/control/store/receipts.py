"""Receipts: a snapshot that the control side has verified.

A snapshot without a receipt exists, and a restore reads it. But it counts for nothing: a run may
have been killed before its check, the check may have failed, a machine may have made it by itself,
or an older version of torpor. ``safety.verify_snapshot`` alone writes receipts. No machine gets a
grant for one, and each is signed (signatures.py). A receipt is of one manifest: another one under
the same name has none.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Final, Literal

import msgspec

from torpor.control.store.manifests import manifests, root_of
from torpor.control.store.object_store import ObjectStore
from torpor.control.store.signatures import ENVELOPE_BYTES, Forged, Unsigned
from torpor.shared.errors import (
    InvalidInput,
    ManifestInvalid,
    ObjectExists,
    StoreCorrupt,
    StoreMissing,
)
from torpor.shared.format.lineage import AUTOSAVE, MOST_ANCESTORS, Lineage, recorded
from torpor.shared.format.manifest import Manifest
from torpor.shared.format.names import snapshot_of
from torpor.shared.values import (
    ObjectKey,
    SnapshotId,
    StoredObject,
    StoredSnapshot,
    WorkspaceName,
    learned,
)

_MOST_BYTES: Final = 64 * 1024
_MOST_OLDER: Final = 1000
_MOST_NAME: Final = 100
"""Characters of a machine's own name that count. A name has 32, unless the machine lies."""


class Receipt(msgspec.Struct, frozen=True):
    """What was verified: the manifest of this root, size and MD5 (None where the store hides it).

    ``agent``: what its machine calls itself, as in the manifest. ``machine``: as its provider or
    its user names it, and ``made_by``: the flow that made it; empty if the run that verified it did
    not know. ``lineage``: as in the manifest; None if that says none. ``files``, ``bytes``: how
    many files there are, and of what size; ``new_bytes``: what was stored for this snapshot;
    ``stored_bytes``: what the store holds of all of it. As in the manifest, None in older receipts.
    ``autosave``: as in the manifest. ``older``: verified snapshots that existed then and that the
    line goes on from, beyond the ancestors which the lineage has room for.
    """

    version: Literal[1]
    root: str
    manifest_bytes: int
    manifest_md5: str | None
    agent: str
    machine: str
    lineage: Lineage | None = None
    made_by: str = ""
    files: int | None = None
    bytes: int | None = None
    new_bytes: int | None = None
    stored_bytes: int | None = None
    autosave: bool = False
    older: list[SnapshotId] = []

    @property
    def line(self) -> Lineage | None:
        """The lineage, with all ancestors that are known."""
        if self.lineage is None or not self.older:
            return self.lineage
        ancestors = [*self.lineage.ancestors, *self.older]
        return msgspec.structs.replace(self.lineage, ancestors=ancestors)


def write_receipt(
    store: ObjectStore,
    seen: StoredObject,
    manifest: Manifest,
    root: str,
    machine: str,
    made_by: str,
) -> None:
    """Write the receipt of the manifest, whose object was ``seen`` before it was read. A receipt
    that names the machine or older ancestors stays."""
    workspace, snapshot = manifest.workspace, manifest.snapshot
    count = manifest.statistics.get
    lineage = recorded(manifest)
    receipt = Receipt(
        1,
        root,
        seen.bytes,
        seen.md5,
        agent_of(manifest),
        machine,
        lineage,
        made_by,
        count("files"),
        count("bytes"),
        count("new_bytes"),
        count("stored_bytes"),
        is_autosave(manifest),
        _older(store, workspace, lineage),
    )
    there = None if machine else _read(store, workspace, snapshot)
    if there is not None and there.root == root:
        receipt = msgspec.structs.replace(
            receipt,
            machine=there.machine,
            made_by=there.made_by,
            older=there.older or receipt.older,  # its ancestors may have been deleted since
        )
    if there == receipt:
        return
    # Another run may know the machine, and write now. A receipt that cannot be trusted is replaced.
    first = not machine and not receipt_bytes(store, workspace, snapshot)
    with suppress(ObjectExists):
        key = _key(workspace, snapshot)
        store.put(key, store.signer.sign(key, msgspec.json.encode(receipt)), if_absent=first)


def _older(
    store: ObjectStore, workspace: WorkspaceName, lineage: Lineage | None
) -> list[SnapshotId]:
    """What the receipt of the nearest ancestor that has one names beyond this full lineage, as far
    as it is verified still. So a line goes on from what a retention keeps for years, however many
    snapshots were made and deleted since."""
    if lineage is None or lineage.whole or len(lineage.ancestors) < MOST_ANCESTORS:
        return []
    there = receipt_names(store, workspace)
    nearest = next((name for name in lineage.ancestors if name in there), None)
    before = None if nearest is None else _read(store, workspace, nearest)
    line = None if before is None else before.line
    if line is None:
        return []
    beyond = there - lineage.names
    return [name for name in line.ancestors if name in beyond][:_MOST_OLDER]


def is_autosave(manifest: Manifest) -> bool:
    """Whether a machine made the snapshot by itself, on its schedule or when it was to be taken
    away, and for no job."""
    return bool(manifest.statistics.get(AUTOSAVE))


def agent_of(manifest: Manifest) -> str:
    """The name of a snapshot's machine for itself; never empty, and never long."""
    return manifest.machine[:_MOST_NAME] or "unnamed"


def withdraw_receipt(store: ObjectStore, workspace: WorkspaceName, snapshot: SnapshotId) -> None:
    """Remove the receipt of a snapshot that is damaged or deleted, which then counts no more.
    Idempotent."""
    store.delete([_key(workspace, snapshot)])


def receipt_bytes(store: ObjectStore, workspace: WorkspaceName, snapshot: SnapshotId) -> bytes:
    """The receipt as it is stored, to put it back; empty if there is none."""
    try:
        return store.get(_key(workspace, snapshot), max_bytes=_MOST_BYTES + ENVELOPE_BYTES)
    except StoreMissing:
        return b""


def put_back_receipt(
    store: ObjectStore, workspace: WorkspaceName, snapshot: SnapshotId, blob: bytes
) -> None:
    """Store what ``receipt_bytes`` returned."""
    if blob:
        store.put(_key(workspace, snapshot), blob)


def receipt_names(store: ObjectStore, workspace: WorkspaceName) -> set[SnapshotId]:
    """The snapshots that have a receipt. Needs only a listing: their manifests may be gone."""
    names = set()
    for found in store.list(receipts_prefix(workspace)):
        with suppress(InvalidInput):  # another program's object in this prefix
            names.add(snapshot_of(found.key))
    return names


def verified_snapshots(
    store: ObjectStore,
    workspace: WorkspaceName,
    wanted: Callable[[SnapshotId], bool] = lambda snapshot: True,
) -> Iterator[tuple[SnapshotId, Receipt]]:
    """The verified snapshots that exist and are ``wanted``, newest first; reads one small object
    for each."""
    there = manifests(store, workspace)
    names = receipt_names(store, workspace)
    for snapshot in sorted(filter(wanted, there.keys() & names), reverse=True):
        receipt = receipt_of(store, workspace, snapshot, there[snapshot])
        if receipt is not None:
            yield snapshot, receipt


def receipt_of(
    store: ObjectStore, workspace: WorkspaceName, snapshot: SnapshotId, manifest: StoredObject
) -> Receipt | None:
    """The receipt of this manifest; None if it was not verified."""
    receipt = _read(store, workspace, snapshot)
    return receipt if receipt is not None and _is_of(store, receipt, manifest) else None


def newest_verified(store: ObjectStore, workspace: WorkspaceName) -> SnapshotId | None:
    """The id of the newest verified snapshot, or None."""
    snapshot, _ = newest_receipt(store, workspace)
    return snapshot


def newest_receipt(
    store: ObjectStore, workspace: WorkspaceName
) -> tuple[SnapshotId, Receipt] | tuple[None, None]:
    """The newest verified snapshot that is no autosave, and its receipt."""
    found = verified_snapshots(store, workspace)
    return next((pair for pair in found if not pair[1].autosave), (None, None))


def is_verified(store: ObjectStore, found: StoredSnapshot) -> bool:
    """Whether this listed snapshot has a receipt."""
    receipt = _read(store, found.workspace, found.snapshot)
    return receipt is not None and receipt.root == found.root


def _is_of(store: ObjectStore, receipt: Receipt, manifest: StoredObject) -> bool:
    if manifest.bytes != receipt.manifest_bytes:
        return False
    if manifest.md5 is not None and receipt.manifest_md5 is not None:
        return manifest.md5 == receipt.manifest_md5
    try:
        return root_of(store, manifest) == receipt.root
    except (ManifestInvalid, StoreMissing):
        return False


def _read(store: ObjectStore, workspace: WorkspaceName, snapshot: SnapshotId) -> Receipt | None:
    """The receipt; None also for one that this version cannot read, or that no control side of this
    store has signed: the snapshot is then verified again."""
    key = _key(workspace, snapshot)
    try:
        body = store.signer.check(key, receipt_bytes(store, workspace, snapshot))
        return msgspec.json.decode(body, type=learned(Receipt))
    except (StoreCorrupt, Unsigned, Forged, msgspec.MsgspecError, UnicodeDecodeError):
        return None


def receipts_prefix(workspace: WorkspaceName) -> str:
    """The prefix of the names of the workspace's receipts."""
    return f"workspaces/{workspace}/verified/"


def _key(workspace: WorkspaceName, snapshot: SnapshotId) -> ObjectKey:
    return ObjectKey(receipts_prefix(workspace) + snapshot)
