"""Autosaves: which of them are superfluous, their deletion, and what those that stay hold.

Rules 11 and 13 of docs/contributing/safety.md.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Set
from contextlib import suppress
from dataclasses import dataclass
from typing import Final, NamedTuple

from torpor.control.safety import Verified, check_whole
from torpor.control.store.receipts import Receipt, agent_of, is_autosave, verified_snapshots
from torpor.control.store.seam import ObjectStore
from torpor.control.store.snapshots import find_snapshot, open_manifest, snapshot_times
from torpor.control.upkeep.deletion import delete_snapshot
from torpor.control.upkeep.last_holders import Keepers
from torpor.control.upkeep.pins import pinned_ids
from torpor.shared.errors import SnapshotError, SnapshotKept, SnapshotMissing
from torpor.shared.format.keys import Seal
from torpor.shared.format.lineage import LINEAGE, MOST_SAVES, lineage_of
from torpor.shared.format.manifest import Manifest
from torpor.shared.format.missed import MISSING, Missed
from torpor.shared.values import SnapshotId, WorkspaceName

_FACTS: Final = (LINEAGE, MISSING)
"""All that is read of the environment record of a save, which a machine makes by itself."""
KEPT: Final = 3
"""Each machine keeps so many: a wake uses an older one where the newest is not whole."""


class Holder(NamedTuple):
    """A snapshot, most often an autosave that nobody has verified. It alone holds what a newer one
    lacks, though nobody has deleted that. ``agent``: what its machine calls itself."""

    snapshot: SnapshotId
    agent: str
    stored_unix: float  # by the store's clock
    missed: Missed


class Superseded(NamedTuple):
    """``deleted``: the autosaves that a verified snapshot has made superfluous. ``held``: those
    that stay for what they hold."""

    deleted: list[SnapshotId]
    held: list[Holder]


def delete_superseded(store: ObjectStore, verified: Verified, seal: Seal) -> Superseded:
    """Delete the autosaves whose work the ``verified`` snapshot has and that appeared before it,
    by the store's clock."""
    times = snapshot_times(store, verified.workspace)
    made, deleted, held = times.get(verified.snapshot, 0.0), list[SnapshotId](), list[Holder]()
    named = {name for name in lineage_of(verified.manifest).names if times.get(name, made) < made}
    pins = pinned_ids(store, verified.workspace)
    for save, holder in _judged(store, seal, verified.manifest, times):
        snapshot = save.snapshot
        if snapshot in pins:
            continue
        if holder is not None:
            held.append(holder)
        elif snapshot in named and is_autosave(save) and _delete(store, save.workspace, snapshot):
            deleted.append(snapshot)
    return Superseded(deleted, held)


def last_holders(store: ObjectStore, seal: Seal, newest: Manifest) -> list[Holder]:
    """The snapshots that ``newest`` goes on from and that alone hold what it lacks, where no report
    has said so: autosaves, what a backup left that was killed before its check, and what is equal
    to one of these and outlived it."""
    times = snapshot_times(store, newest.workspace)
    pins = pinned_ids(store, newest.workspace)  # put aside on purpose
    return [
        holder
        for _, holder in _judged(store, seal, newest, times)
        if holder is not None and holder.snapshot not in pins
    ]


def thin(store: ObjectStore, workspace: WorkspaceName, seal: Seal) -> list[SnapshotId]:
    """Delete the autosaves of each machine whose work its newest one has, but for the newest KEPT.
    Where the newest is not whole, all stay. Returns what was deleted."""
    times = snapshot_times(store, workspace)
    of: dict[str, _Line] = {}
    deleted = []
    receipts = dict(verified_snapshots(store, workspace))
    for save in _unreported(store, workspace, seal, _newest_first(times), receipts):
        if not is_autosave(save):
            continue
        line = of.setdefault(agent_of(save), _Line(save.snapshot))
        line.count += 1
        if line.count == KEPT + 1:
            line.whole = _whole(store, workspace, seal, line.newest)
            line.keepers = Keepers(store, seal, line.whole) if line.whole else None
        if (
            line.whole is None
            or line.keepers is None
            or save.snapshot not in lineage_of(line.whole).names
        ):
            continue
        if line.keepers.missed_with(save) is None and _delete(store, workspace, save.snapshot):
            deleted.append(save.snapshot)
    return deleted


@dataclass
class _Line:
    """The autosaves of a machine. ``whole``: its newest one, once more than KEPT were seen."""

    newest: SnapshotId
    count: int = 0
    whole: Manifest | None = None
    keepers: Keepers | None = None


def _judged(
    store: ObjectStore, seal: Seal, newest: Manifest, times: Mapping[SnapshotId, float]
) -> Iterator[tuple[Manifest, Holder | None]]:
    """The older snapshots of the line of ``newest`` of which no report has said what it misses,
    newest first, and what it misses of each. A snapshot of another line that is equal to one of
    them stands for that one where it is gone."""
    workspace, named, line = newest.workspace, lineage_of(newest).names, lineage_of(newest)
    made = times.get(newest.snapshot, 0.0)
    receipts = dict(verified_snapshots(store, workspace))
    equal = {
        snapshot
        for snapshot, receipt in receipts.items()
        if receipt.line is not None and snapshot != newest.snapshot
        if snapshot not in named and receipt.line.content in named - times.keys()
    }
    # A lineage names the last MOST_SAVES autosaves: what stays is older than those at some time.
    oldest = min(line.saves) if len(line.saves) == MOST_SAVES else ""
    older = [
        snapshot
        for snapshot in _newest_first(times)
        if snapshot in named | equal or (times[snapshot] <= made and snapshot < oldest)
    ]
    keepers = Keepers(store, seal, newest)
    agents: dict[str, float] | None = None
    for save in _unreported(store, workspace, seal, older, receipts, equal):
        snapshot = save.snapshot
        if snapshot not in named | equal:
            agents = _agents(newest, times, receipts) if agents is None else agents
            if times[snapshot] > agents.get(agent_of(save), 0.0):
                continue  # of another line, as far as is known
        lost = keepers.missed_with(save)
        yield save, lost and Holder(snapshot, agent_of(save), times[snapshot], lost)


def _newest_first(times: Mapping[SnapshotId, float]) -> list[SnapshotId]:
    """By the store's clock, which may count whole seconds only, then by name."""
    return sorted(times, key=lambda snapshot: (times[snapshot], snapshot), reverse=True)


def _agents(
    newest: Manifest,
    times: Mapping[SnapshotId, float],
    receipts: Mapping[SnapshotId, Receipt],
) -> dict[str, float]:
    """The machines of a snapshot and of its verified ancestors, and when the store got the last
    snapshot of each: an older autosave of such a machine is of the same line."""
    found = {agent_of(newest): times.get(newest.snapshot, 0.0)}
    for snapshot in receipts.keys() & set(lineage_of(newest).ancestors):
        agent = receipts[snapshot].agent
        found[agent] = max(found.get(agent, 0.0), times.get(snapshot, 0.0))
    return found


def _unreported(
    store: ObjectStore,
    workspace: WorkspaceName,
    seal: Seal,
    among: list[SnapshotId],
    receipts: Mapping[SnapshotId, Receipt],
    equal: Set[SnapshotId] = frozenset(),
) -> Iterator[Manifest]:
    """The manifests of those that nobody has verified, of autosaves and of ``equal`` ones, and of
    what another run has verified than the one that made it: its machine has compared no later
    snapshot with it. One at a time."""
    for snapshot in among:
        receipt = receipts.get(snapshot)
        if receipt and receipt.made_by and not receipt.autosave and snapshot not in equal:
            continue
        with suppress(SnapshotError):  # it is not known to be one
            yield open_manifest(store, workspace, snapshot, seal, facts=_FACTS)[0]


def _whole(
    store: ObjectStore, workspace: WorkspaceName, seal: Seal, snapshot: SnapshotId
) -> Manifest | None:
    try:
        return check_whole(store, find_snapshot(store, workspace, snapshot), seal)
    except SnapshotError:
        return None


def _delete(store: ObjectStore, workspace: WorkspaceName, snapshot: SnapshotId) -> bool:
    """Delete it, unless it is pinned, gone, or the newest of all."""
    with suppress(SnapshotKept, SnapshotMissing):
        delete_snapshot(store, workspace, snapshot, why="a newer save has its work")
        return True
    return False
