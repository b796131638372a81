"""Whether a store key is the one that a store's snapshots were sealed with, by their headers."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from typing import Final, NamedTuple

from torpor.control.store.manifests import manifests
from torpor.control.store.object_store import ObjectStore
from torpor.shared.errors import ManifestInvalid, StoreCorrupt, StoreMissing, WrongKey
from torpor.shared.format.keys import Seal, workspace_key
from torpor.shared.format.manifest import HEADER_BYTES, manifest_key_id
from torpor.shared.transfer.transfer import Range
from torpor.shared.values import WorkspaceName

_LOOKED_AT: Final = 3
"""Headers that are read of each workspace, at most: a machine may have written the newest one."""


class Sealed(NamedTuple):
    """The workspaces whose newest snapshots were sealed with the key, and with another one."""

    fits: list[WorkspaceName]
    others: list[WorkspaceName]


def sealed_with(
    store: ObjectStore, store_key: bytes, workspaces: Iterable[WorkspaceName]
) -> Sealed:
    """Compare the key with the headers of each workspace's newest snapshots, 60 bytes each."""
    found = Sealed([], [])
    for workspace in workspaces:
        wanted = Seal(workspace_key(store_key, workspace)).key_id
        ids: list[bytes] = []
        for one in [*manifests(store, workspace).values()][: -_LOOKED_AT - 1 : -1]:
            with suppress(ManifestInvalid, StoreMissing, StoreCorrupt):
                header = store.get_range(one.key, Range(0, HEADER_BYTES))
                ids.append(manifest_key_id(header, one.key))
            if wanted in ids:
                found.fits.append(workspace)
                break
        else:
            if any(map(any, ids)):
                found.others.append(workspace)
    return found


def check_sealed_with(
    store: ObjectStore, store_key: bytes, workspaces: Iterable[WorkspaceName], *, all_fit: bool
) -> Sealed:
    """The same; WrongKey where there are sealed snapshots and none with this key, or, with
    ``all_fit``, any with another one."""
    found = sealed_with(store, store_key, workspaces)
    if found.others and (all_fit or not found.fits):
        raise WrongKey(
            f"the key of this block is not the one that the snapshots of "
            f"{', '.join(found.others)} in {store.address} were sealed with: their headers name "
            "another key. Give the block the key of your recovery sheet, and see that bucket and "
            "prefix are right. This does not mean that anything is damaged"
        )
    return found
