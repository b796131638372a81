"""Marks: packs that prune will delete once no manifest names them.

No new snapshot names a marked pack, because a run reads the marks before it writes its manifest
(remote/snapshot.py). So "marked, and named by no manifest" stays true once it
is true, and prune needs no lock. docs/contributing/prune.md has the whole proof.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import datetime, timezone
from typing import Final, Literal

import msgspec

from torpor.control.store.object_store import ObjectStore
from torpor.control.store.records import refused
from torpor.control.store.signatures import ENVELOPE_BYTES, Forged, Unsigned
from torpor.shared.errors import StoreError, StoreMissing
from torpor.shared.format.names import marks_prefix
from torpor.shared.values import MIB, ObjectKey, SnapshotId, WorkspaceName, learned, new_snapshot_id

COMMIT_S: Final = 3600
"""Seconds within which a run writes its manifest after it has read the marks; after that the store
refuses the grant."""
OWN_COMMIT_S: Final = 12 * 3600
"""Seconds within which a machine that saves by itself may write manifests after the marks were read
for it, where no grant can replace an object: it may be without its control side for half a day."""
LATEST_COMMIT_S: Final = 13 * 3600
"""Seconds after a mark of one of its packs from which a new manifest does not verify: OWN_COMMIT_S,
a quarter of an hour for a wrong clock of a control side, and two GiB of manifest at 1 MiB/s."""
SHORTEST_GRACE_S: Final = 24 * 3600
"""Seconds from a mark to its sweep at least: LATEST_COMMIT_S, and almost the same time again."""
MOST_MARKED: Final = 200_000
"""Packs in one mark at most: 12 TiB of packs, 9 MiB of text. Further packs wait for the next
prune."""
_MOST_BYTES: Final = 32 * MIB
_LOOKS: Final = 10


class Marked(msgspec.Struct, frozen=True, array_like=True):
    """A pack by its id in hex, and its size in bytes."""

    id: str
    bytes: int


class _Body(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    version: Literal[1]
    unnamed: list[Marked]
    retired: list[Marked]


class Mark(msgspec.Struct, frozen=True):
    """One mark. ``unnamed``: packs that no manifest named, to be swept after the grace time.
    ``retired``: packs that are mostly dead, which new snapshots are to leave alone."""

    key: ObjectKey
    made_unix: float  # by the clock of the store
    unnamed: frozenset[bytes]
    retired: frozenset[bytes]

    @property
    def packs(self) -> frozenset[bytes]:
        return self.unnamed | self.retired


def write_mark(
    store: ObjectStore,
    workspace: WorkspaceName,
    earlier: Sequence[Mark],
    unnamed: Iterable[Marked],
    retired: Iterable[Marked],
) -> ObjectKey:
    """Write a mark under a unique name that sorts after the ``earlier`` ones."""
    names = [SnapshotId(mark.key.rsplit("/", 1)[-1]) for mark in earlier]
    name = new_snapshot_id(datetime.now(timezone.utc), max(names, default=None))
    key = ObjectKey(marks_prefix(workspace) + name)
    body = msgspec.json.encode(_Body(1, list(unnamed), list(retired)))
    store.put(key, store.signer.sign(key, body))
    return key


def read_marks(store: ObjectStore, workspace: WorkspaceName) -> list[Mark]:
    """Every mark of the workspace, by name. Raises StoreError for one that cannot be read:
    its packs are unknown, and unknown is not unmarked."""
    for _ in range(_LOOKS):
        found = list(store.list(marks_prefix(workspace)))
        try:
            return [_read(store, mark.key, mark.modified_unix) for mark in found]
        except StoreMissing:
            continue  # a prune has replaced it: look again
    raise StoreError(
        f"the marks of workspace {workspace} in {store.address} changed {_LOOKS} times while they "
        "were read: wait until the running prunes have ended"
    )


def marked_packs(store: ObjectStore, workspace: WorkspaceName) -> set[bytes]:
    """The ids of all marked packs."""
    return {pack for mark in read_marks(store, workspace) for pack in mark.packs}


def _read(store: ObjectStore, key: ObjectKey, made_unix: float) -> Mark:
    blob = store.get(key, max_bytes=_MOST_BYTES + ENVELOPE_BYTES)
    try:
        body = msgspec.json.decode(store.signer.check(key, blob), type=learned(_Body))
        return Mark(key, made_unix, _ids(body.unnamed), _ids(body.retired))
    except (Unsigned, Forged) as why:
        advice = "while no prune of an older torpor runs"
        raise refused(store, key, why, advice) from None
    except (msgspec.MsgspecError, ValueError) as error:
        raise StoreError(
            f"{key} in {store.address} is not a mark that this torpor can read ({error}): use the "
            "torpor that wrote it; if it is damaged, delete it while no prune runs"
        ) from None


def _ids(packs: Iterable[Marked]) -> frozenset[bytes]:
    return frozenset(bytes.fromhex(pack.id) for pack in packs)
