"""The packs of a workspace in a store, compared with what was written."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass

from torpor.control.store.marks import marked_packs
from torpor.control.store.object_store import ObjectStore
from torpor.shared.format.manifest import Pack
from torpor.shared.format.names import pack_id_of, pack_key, packs_prefix
from torpor.shared.values import ObjectKey, StoredObject, WorkspaceName
from torpor.shared.wire.snapshot import PackClaim


def stored_packs(store: ObjectStore, workspace: WorkspaceName) -> dict[ObjectKey, StoredObject]:
    """What a listing shows of the workspace's packs."""
    return {found.key: found for found in store.list(packs_prefix(workspace))}


@dataclass(frozen=True)
class UsablePacks:
    """Which packs of a workspace a new manifest may name: those that are ``there`` as they were
    written, and that no mark of prune names (``marked``)."""

    there: Mapping[ObjectKey, StoredObject]
    marked: Set[bytes]

    @classmethod
    def read(cls, store: ObjectStore, workspace: WorkspaceName) -> UsablePacks:
        """Look at the store. The caller signs the grant for the manifest before: the grant ends
        COMMIT_S or OWN_COMMIT_S later, even if this process dies. The marks are read first, then
        the packs are listed. This order makes prune safe without a lock
        (docs/contributing/prune.md).
        """
        marked = marked_packs(store, workspace)
        return cls(stored_packs(store, workspace), marked)

    def unusable(self, claims: Sequence[PackClaim]) -> list[ObjectKey]:
        """The claimed packs that a new manifest must not name: their chunks are stored again."""
        gone = set(compare_packs(self.there, claims)[0])
        return [c.key for c in claims if c.key in gone or pack_id_of(c.key) in self.marked]


def claims_of(workspace: WorkspaceName, packs: Iterable[Pack]) -> list[PackClaim]:
    """The claims of a manifest about its ``packs``."""
    return [PackClaim(pack_key(workspace, pack.id), pack.size, pack.md5.hex()) for pack in packs]


def compare_packs(
    there: Mapping[ObjectKey, StoredObject], claims: Sequence[PackClaim]
) -> tuple[list[ObjectKey], list[ObjectKey]]:
    """Packs that are missing or differ in size or MD5 from what is claimed, and those of the right
    size whose MD5 the store hides, by what is ``there`` (``stored_packs``).

    A pack of the second list does not count as missing: otherwise a store that shows no MD5 would
    get all packs again each time. It is not proven either: only reading it again
    (``verify_snapshot``) proves it.
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
