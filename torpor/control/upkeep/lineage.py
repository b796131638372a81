"""Which work a snapshot lacks: what another machine stored meanwhile, or the same one before it was
synced back. A snapshot without a receipt counts for nothing, and a pinned one is put aside on
purpose."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Final, NamedTuple

from torpor.control.reports import moment
from torpor.control.store.receipts import Receipt, verified_snapshots
from torpor.control.store.seam import ObjectStore
from torpor.control.upkeep.pins import pinned_ids
from torpor.shared.format.lineage import Lineage, Work
from torpor.shared.values import SnapshotId, WorkspaceName, made_at

_NAMED: Final = 3


class Other(NamedTuple):
    """The end of another line: it has work that a snapshot lacks. ``machine``: as its provider or
    its user names it, else as it calls itself."""

    snapshot: SnapshotId
    machine: str


def lacking(
    store: ObjectStore,
    workspace: WorkspaceName,
    mine: Lineage,
    since: SnapshotId | None = None,
) -> list[Other]:
    """The ends of other lines than ``mine``, newest first; ``since``: newer ones alone. It reads a
    small object for each snapshot that is not of this line: none, where there is one line."""
    pins = set(pinned_ids(store, workspace))
    own = Work([mine])

    def may_be_other(snapshot: SnapshotId) -> bool:
        is_newer = since is None or snapshot > since
        return is_newer and snapshot not in pins and not own.names(snapshot)

    return ends(mine, verified_snapshots(store, workspace, may_be_other))


def ends(mine: Lineage, newest_first: Iterable[tuple[SnapshotId, Receipt]]) -> list[Other]:
    """Those of the snapshots whose work neither ``mine`` nor a newer one has."""
    work = Work([mine])
    found = []
    for snapshot, receipt in newest_first:
        line = receipt.lineage or Lineage.unknown(snapshot)
        if not work.has(line):
            found.append(Other(snapshot, receipt.machine or receipt.agent))
            work.add(line)
    return found


def also_in(
    receipts: Mapping[SnapshotId, Receipt],
) -> dict[SnapshotId, SnapshotId | None]:
    """The newest other snapshot that has the work of each; None where no other has it."""
    lines = {
        snapshot: receipt.lineage or Lineage.unknown(snapshot)
        for snapshot, receipt in sorted(receipts.items(), reverse=True)
    }
    works = {snapshot: Work([line]) for snapshot, line in lines.items()}
    return {
        snapshot: next(
            (other for other, work in works.items() if other != snapshot and work.has(line)), None
        )
        for snapshot, line in lines.items()
    }


def named(others: Sequence[Other]) -> str:
    """For messages: the first of them, with machine and time."""
    words = [
        f"{other.snapshot} of machine {other.machine} "
        f"({moment(made_at(other.snapshot).timestamp())})"
        for other in others[:_NAMED]
    ]
    more = len(others) - len(words)
    return ", ".join(words) + (f" and {more} more" if more else "")
