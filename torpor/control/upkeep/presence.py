"""Whether the snapshots that something names are still in the store.

One listing decides nothing: a store may end a listing early, without an error, and leave out the
newest keys. So each snapshot that something names and that a listing lacks is asked for by its own
key. Only a deletion record explains that it is gone.

What names a snapshot: its receipt, its user's pin or torpor's own, an open job, a rental that is
open, and the machine that ended last. What a lineage names does not count: ancestors are deleted by
design. Neither do jobs that have ended and the machines that ended before: retention deletes old
snapshots.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Final, NamedTuple

from torpor.control.store.deletion_records import Deletions
from torpor.control.store.object_store import ObjectStore
from torpor.control.store.receipts import receipt_names
from torpor.control.upkeep.pins import holds, pin_times
from torpor.shared.errors import SnapshotMissing, StoreCorrupt
from torpor.shared.format.names import manifest_key
from torpor.shared.values import SnapshotId, WorkspaceName

_NAMED: Final = 5


class NamedBy(NamedTuple):
    """``what`` names a snapshot, in words. ``besides``: what else names a pinned snapshot, and
    would still name it after an unpin."""

    what: str
    besides: NamedBy | None = None


_PIN: Final = "its pin"
_RECEIPT: Final = NamedBy("its receipt")
_HOLD: Final = NamedBy("torpor's own pin")


def all_named(
    store: ObjectStore, workspace: WorkspaceName, by_records: Mapping[SnapshotId, NamedBy]
) -> dict[SnapshotId, NamedBy]:
    """Every snapshot that something names. ``by_records``: those that jobs and rentals name. Ask
    before the manifests are listed: then each one that is there must be in that listing."""
    named = {**by_records, **dict.fromkeys(receipt_names(store, workspace), _RECEIPT)}
    named |= {held: _HOLD for held in holds(store, workspace) if held not in named}
    pins = pin_times(store, workspace)
    return named | {pinned: NamedBy(_PIN, besides=named.get(pinned)) for pinned in pins}


def check_present(
    store: ObjectStore,
    workspace: WorkspaceName,
    named: Mapping[SnapshotId, NamedBy],
    listed: Collection[SnapshotId],
) -> None:
    """Check that every snapshot that is ``named`` and not ``listed`` was deleted on purpose.
    StoreCorrupt where its manifest exists all the same: the store's listing lacks it, and may lack
    others. SnapshotMissing where it is gone and no record says that it was deleted."""
    absent = sorted(named.keys() - listed)
    hidden = [snapshot for snapshot in absent if _is_there(store, workspace, snapshot)]
    if hidden:
        raise StoreCorrupt(
            f"{store.address} has {_with_reasons(hidden, named)} of workspace {workspace}, but its "
            "listing lacks it: nothing was marked or deleted, as the listing may lack other "
            "snapshots too. Run prune again; if the listing stays incomplete, have the store "
            "repaired before anything is deleted there"
        )
    missing = missing_snapshots(store, workspace, named, listed)
    if missing:
        pins = [snapshot for snapshot in missing if named[snapshot].what == _PIN]
        unpinned = {name: named[name].besides if name in pins else named[name] for name in missing}
        besides = {name: by for name, by in unpinned.items() if by is not None}
        ids = [f'"{name}"' for name in missing_snapshots(store, workspace, besides, listed)]
        steps = []
        if pins:
            steps.append(f"remove the pin of {', '.join(pins)} by `pin` with `remove`")
        if ids:
            call = f'delete_snapshots("{workspace}", [{", ".join(ids)}])'
            steps.append(f"run delete-snapshots: {call}")
        raise SnapshotMissing(
            f"{_with_reasons(missing, named)} of workspace {workspace} is missing from "
            f"{store.address}, and no record says that it was deleted: nothing was marked or "
            "deleted, because its packs may be all that is left of it. Put its manifest "
            f"workspaces/{workspace}/snapshots/ID back, say from an old version in the bucket; or, "
            f"to give it up, {', and '.join(steps)}"
        )


def missing_snapshots(
    store: ObjectStore,
    workspace: WorkspaceName,
    named: Mapping[SnapshotId, NamedBy],
    listed: Collection[SnapshotId],
) -> list[SnapshotId]:
    """Those of the ``named`` that are not in the store, although no record says that they were
    deleted. A pin counts also beside a record: who pinned the snapshot was told that it stays."""
    found = not_listed(store, workspace, named, listed)
    return [snapshot for snapshot, there in found if not there]


def not_listed(
    store: ObjectStore,
    workspace: WorkspaceName,
    named: Mapping[SnapshotId, NamedBy],
    listed: Collection[SnapshotId],
) -> Iterator[tuple[SnapshotId, bool]]:
    """Those of the ``named`` that a listing lacks, although no record says that they were deleted,
    and whether each is in the store all the same."""
    deletions = Deletions(store, workspace)
    for snapshot, by in sorted(named.items()):
        if snapshot not in listed and (by.what == _PIN or deletions.of(snapshot) is None):
            yield snapshot, _is_there(store, workspace, snapshot)


def needless_records(
    store: ObjectStore,
    workspace: WorkspaceName,
    named: Collection[SnapshotId],
    listed: Collection[SnapshotId],
    before_unix: float,
) -> list[SnapshotId]:
    """The snapshots whose deletion records were written before that time and are needed no more:
    nothing names these snapshots, or they still exist, because their deletion was killed."""
    times = Deletions(store, workspace).times()
    return [
        snapshot
        for snapshot, written_unix in times.items()
        if written_unix <= before_unix and (snapshot in listed or snapshot not in named)
    ]


def _is_there(store: ObjectStore, workspace: WorkspaceName, snapshot: SnapshotId) -> bool:
    return store.head(manifest_key(workspace, snapshot)) is not None


def _with_reasons(snapshots: Sequence[SnapshotId], named: Mapping[SnapshotId, NamedBy]) -> str:
    words = [f"snapshot {name} ({named[name].what} names it)" for name in snapshots[:_NAMED]]
    more = len(snapshots) - len(words)
    return ", ".join(words) + (f" and {more} more" if more else "")
