"""What a workspace has kept so far: each snapshot, whether it counts, and which machine made it.

For snapshots that were seen before, the catalog says both. A snapshot without a receipt is checked,
and gets one if it is whole. An autosave gets none, because it does not count.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from torpor.control.safety import verify_snapshot
from torpor.control.store.catalog import Catalog
from torpor.control.store.manifests import find_snapshot, open_manifest, snapshot_ids
from torpor.control.store.object_store import ObjectStore
from torpor.control.store.receipts import is_autosave, newest_verified
from torpor.control.upkeep.retention import Taken
from torpor.shared.errors import (
    ManifestInvalid,
    OtherPaths,
    SnapshotDamaged,
    SnapshotMissing,
    WrongKey,
)
from torpor.shared.format.keys import Seal
from torpor.shared.values import SnapshotId, WorkspaceName


def taken_snapshots(
    store: ObjectStore, workspace: WorkspaceName, seal: Seal, paths: Sequence[str]
) -> Iterator[Taken]:
    """Every snapshot as retention sees it, oldest first."""
    catalog = Catalog(store, workspace)
    receipts = catalog.receipts()
    if catalog.manifests.keys() - receipts.keys():
        store.probe()  # the probe says whether the listing shows MD5s
    for snapshot, found in catalog.manifests.items():
        receipt = receipts.get(snapshot)
        if receipt is not None:
            yield Taken(
                snapshot,
                found.modified_unix,
                True,
                receipt.agent,
                receipt.machine,
                receipt.line,
                receipt.autosave,
            )
            continue
        try:
            said = catalog.said(snapshot, seal)
            verified = not said.autosave and _is_whole(store, workspace, seal, snapshot, paths)
        except (ManifestInvalid, WrongKey):
            yield Taken(snapshot, found.modified_unix, False, "")
        except SnapshotMissing:
            continue  # deleted meanwhile
        else:
            yield Taken(
                snapshot,
                found.modified_unix,
                verified,
                said.agent,
                lineage=said.lineage,
                autosave=said.autosave,
            )
    catalog.keep()


class Newest(NamedTuple):
    """``verified``: the newest snapshot that counts. ``faults``: why newer ones do not."""

    verified: SnapshotId | None
    faults: list[str]


def newest_that_counts(
    store: ObjectStore, workspace: WorkspaceName, seal: Seal, paths: Sequence[str]
) -> Newest:
    """The newest verified snapshot. Newer ones without a receipt are checked first, newest before
    older."""
    known = newest_verified(store, workspace)
    newer = [
        snapshot for snapshot in snapshot_ids(store, workspace) if known is None or snapshot > known
    ]
    if newer:
        store.probe()
    faults = []
    for snapshot in reversed(newer):
        try:
            if is_autosave(open_manifest(store, workspace, snapshot, seal, facts=())[0]):
                continue
            verify_snapshot(store, find_snapshot(store, workspace, snapshot), seal, paths=paths)
        except (ManifestInvalid, SnapshotDamaged, WrongKey) as fault:
            faults.append(str(fault))
        except SnapshotMissing:
            continue
        else:
            return Newest(snapshot, faults)
    return Newest(known, faults)


def _is_whole(
    store: ObjectStore,
    workspace: WorkspaceName,
    seal: Seal,
    snapshot: SnapshotId,
    paths: Sequence[str],
) -> bool:
    """Whether the snapshot is verified now."""
    try:
        verify_snapshot(store, find_snapshot(store, workspace, snapshot), seal, paths=paths)
    except (SnapshotDamaged, OtherPaths):
        return False
    return True
