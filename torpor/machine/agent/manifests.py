"""Reads the manifest that the control side grants."""

from __future__ import annotations

from typing import Any, NamedTuple

from torpor.shared.errors import SnapshotDamaged
from torpor.shared.format.checks import check_manifest
from torpor.shared.format.keys import Seal
from torpor.shared.format.manifest import Manifest, decode_manifest
from torpor.shared.format.roots import check_roots
from torpor.shared.transfer.transfer import Range, Transfer
from torpor.shared.wire.restore import OfSnapshot


class Wanted(NamedTuple):
    """A manifest: the object's bytes, its root hash, and what it says."""

    blob: bytes
    root: bytes
    manifest: Manifest


def read_wanted(
    wanted: OfSnapshot[Any], seal: Seal, transfer: Transfer, *, any_paths: bool = False
) -> Wanted:
    """The manifest, checked whole; SnapshotDamaged when it is not the one that the control side
    read, OtherPaths when it names directories that are not allowed. ``any_paths``: allow any, for a
    caller that writes nothing to them."""
    what = f"snapshot {wanted.snapshot}"
    whole = [Range(0, wanted.manifest_bytes)]
    blob = bytes(next(transfer.get_ranges(wanted.grant, whole)))
    manifest, found = decode_manifest(blob, seal, what)
    if (found.hex(), manifest.snapshot, manifest.workspace) != (
        wanted.root,
        wanted.snapshot,
        wanted.workspace,
    ):
        raise SnapshotDamaged(
            f"{wanted.grant.key} holds {manifest.snapshot} of workspace {manifest.workspace}, not "
            f"the {what} that the control side read: it was changed in the store"
        )
    check_manifest(manifest, what)
    if not any_paths:
        check_roots(manifest, wanted.paths, what)
    return Wanted(blob, found, manifest)
