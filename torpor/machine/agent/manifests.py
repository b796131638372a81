"""Read the manifest that the control side grants."""

from __future__ import annotations

from typing import NamedTuple

from torpor.shared.errors import SnapshotDamaged
from torpor.shared.format.checks import check_manifest
from torpor.shared.format.keys import Seal
from torpor.shared.format.manifest import Manifest, decode_manifest
from torpor.shared.transfer.transfer import Range, Transfer
from torpor.shared.values import Grant, SnapshotId, WorkspaceName


class Wanted(NamedTuple):
    """Which snapshot the control side means, and leave to read its manifest."""

    workspace: WorkspaceName
    snapshot: SnapshotId
    root: bytes
    grant: Grant
    manifest_bytes: int


def read_wanted(wanted: Wanted, seal: Seal, transfer: Transfer) -> tuple[bytes, Manifest]:
    """The object's bytes and the manifest in it, checked whole; SnapshotDamaged when it is not
    the one that the control side read."""
    what = f"snapshot {wanted.snapshot}"
    whole = [Range(0, wanted.manifest_bytes)]
    blob = bytes(next(transfer.get_ranges(wanted.grant, whole)))
    manifest, found = decode_manifest(blob, seal, what)
    if (found, manifest.snapshot, manifest.workspace) != (
        wanted.root,
        wanted.snapshot,
        wanted.workspace,
    ):
        raise SnapshotDamaged(
            f"{wanted.grant.key} holds {manifest.snapshot} of workspace {manifest.workspace}, not "
            f"the {what} that the control side read: it was changed in the store"
        )
    check_manifest(manifest, what)
    return blob, manifest
