"""The packs of a workspace in a store, compared with what was written."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from torpor.control.store.object_store import ObjectStore
from torpor.shared.format.manifest import Pack
from torpor.shared.format.names import pack_key, packs_prefix
from torpor.shared.values import ObjectKey, StoredObject, WorkspaceName
from torpor.shared.wire.snapshot import PackClaim


def stored_packs(store: ObjectStore, workspace: WorkspaceName) -> dict[ObjectKey, StoredObject]:
    """What a listing shows of the workspace's packs."""
    return {found.key: found for found in store.list(packs_prefix(workspace))}


def claims_of(workspace: WorkspaceName, packs: Iterable[Pack]) -> list[PackClaim]:
    """What a manifest of the workspace says of its ``packs``."""
    return [PackClaim(pack_key(workspace, pack.id), pack.size, pack.md5.hex()) for pack in packs]


def compare_packs(
    there: Mapping[ObjectKey, StoredObject], claims: Sequence[PackClaim]
) -> tuple[list[ObjectKey], list[ObjectKey]]:
    """Packs that are missing or differ in size or MD5 from what is claimed, and those of the right
    size whose MD5 the store hides, by what is ``there`` (``stored_packs``).

    A pack of the second list is not missing: a store that shows no MD5 would else have to be sent
    all again, each time. Nor is it proven: only reading it again (``verify_snapshot``) does that.
    """
    missing, unsure = [], []
    for claim in claims:
        found = there.get(claim.key)
        if found is None or found.bytes != claim.bytes:
            missing.append(claim.key)
        elif found.md5 is None:
            unsure.append(claim.key)
        elif found.md5 != claim.md5:
            missing.append(claim.key)
    return missing, unsure
