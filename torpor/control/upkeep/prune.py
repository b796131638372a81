"""Prune marks what no manifest names, and deletes it a grace time later. It holds no lock.

``plan_prune`` reads and plans; ``carry_out`` does exactly the plan. Both may be killed at any step
and run any number of times at once. docs/contributing/prune.md says why that is safe
beside running snapshots.
"""

from __future__ import annotations

import secrets
from collections.abc import Container, Iterable, Mapping, Sequence
from typing import Final

import msgspec

from torpor.control.store.deletion_records import Deletions
from torpor.control.store.manifests import open_manifest
from torpor.control.store.marks import (
    MOST_MARKED,
    SHORTEST_GRACE_S,
    Mark,
    Marked,
    read_marks,
    write_mark,
)
from torpor.control.store.object_store import ObjectStore
from torpor.control.store.packs import stored_packs
from torpor.control.upkeep.presence import NamedBy, all_named, check_present, needless_records
from torpor.shared.errors import InvalidInput, ManifestInvalid, SnapshotMissing, StoreCorrupt
from torpor.shared.format.keys import Seal
from torpor.shared.format.manifest import Manifest
from torpor.shared.format.names import (
    manifest_key,
    pack_id_of,
    pack_key,
    snapshot_of,
    snapshots_prefix,
)
from torpor.shared.values import GIB, ObjectKey, SnapshotId, StoredObject, WorkspaceName

GRACE_S: Final = SHORTEST_GRACE_S
"""Seconds between mark and deletion: a day, in which a deleted snapshot can be put back."""
YOUNG_S: Final = 72 * 3600
"""Seconds for which a new pack is left alone, because an unfinished run may have written it."""
DEAD_BELOW: Final = 0.25
"""A pack counts as mostly dead if snapshots use less than this share of it."""
REWRITE_BYTES: Final = 1 * GIB
"""Stored bytes that a prune may cause the next snapshots to store again."""


class PruneRules(msgspec.Struct, frozen=True):
    """The limits of a prune. Times are in seconds, by the store's clock."""

    grace_s: float = GRACE_S
    young_s: float = YOUNG_S
    dead_below: float = DEAD_BELOW
    rewrite_bytes: int = REWRITE_BYTES
    without_snapshots: bool = False

    def check(self) -> None:
        """Raise InvalidInput for rules under which a running snapshot could be harmed."""
        if self.grace_s < SHORTEST_GRACE_S:
            raise InvalidInput(
                f"a grace time of {self.grace_s / 3600:g} h is too short: a running snapshot "
                f"could lose packs; use {SHORTEST_GRACE_S / 3600:g} h or more"
            )
        if self.young_s < 0 or not 0 <= self.dead_below <= 1 or self.rewrite_bytes < 0:
            raise InvalidInput(
                f"invalid prune rules {self}: ages and bytes must be 0 or more, the share of a "
                "mostly dead pack between 0 and 1"
            )


class PackShare(msgspec.Struct, frozen=True):
    """Packs and the bytes they take in the store."""

    packs: int
    bytes: int


class PrunePlan(msgspec.Struct, frozen=True):
    """What a prune will do, from one look at the store. Every list has pack ids in hex."""

    workspace: WorkspaceName
    snapshots: int
    stored: PackShare  # every pack of the workspace
    free: list[Marked]  # marked a grace time ago, and still named by nothing: deleted now
    waiting: list[Marked]  # marked, and within the grace time
    next_free_unix: float | None  # when the first of the waiting ones may be deleted
    unnamed: list[Marked]  # not marked yet: marked now
    retired: list[Marked]  # mostly dead: new snapshots will leave them alone
    rewritten_bytes: int  # live bytes in the retired ones, which the next snapshots store again
    retiring: list[Marked]  # in a mark already, and named by earlier snapshots
    young: PackShare  # too young to judge
    marks: list[Mark]
    records: list[SnapshotId] = []  # the snapshots whose deletion records are needed no more

    @property
    def free_bytes(self) -> int:
        return share_of(self.free).bytes


class Pruned(msgspec.Struct, frozen=True):
    """The result of a prune: the packs of its plan that are gone now."""

    plan: PrunePlan
    freed: PackShare


def plan_prune(
    store: ObjectStore,
    workspace: WorkspaceName,
    seal: Seal,
    rules: PruneRules,
    named: Mapping[SnapshotId, NamedBy] = {},
) -> PrunePlan:
    """Read everything; change nothing of the workspace. ``named``: the snapshots that its jobs and
    rentals name.

    A manifest that is damaged, of an unknown version or sealed with another key stops it
    (ManifestInvalid, WrongKey), and so does a mark that cannot be read: unknown is not unnamed.
    So does a snapshot that something names and that the listing lacks, unless its deletion is on
    record (``check_present``).
    """
    rules.check()
    # The proof needs this order: the clock, then the marks, the packs, and the manifests last.
    now = store_now(store)
    marks = read_marks(store, workspace)
    packs = _packs(store, workspace)
    named = all_named(store, workspace, named)
    live, there = _live_bytes(store, workspace, seal)
    check_present(store, workspace, named, there)
    snapshots = len(there)
    if not snapshots and packs and not rules.without_snapshots:
        raise SnapshotMissing(
            f"workspace {workspace} has no snapshot in {store.address}, but {len(packs)} packs: "
            "nothing was pruned. Check the prefix and bucket of the store block; if every "
            "snapshot was deleted on purpose, set `without_snapshots`"
        )
    due = _in(mark.unnamed for mark in marks if mark.made_unix + rules.grace_s <= now)
    early = [mark for mark in marks if mark.made_unix + rules.grace_s > now]
    unnamed = {pack_id: found for pack_id, found in packs.items() if pack_id not in live}
    free = {i: f for i, f in unnamed.items() if i in due}
    rest = {i: f for i, f in unnamed.items() if i not in due}
    waiting = {i: f for i, f in rest.items() if any(i in mark.unnamed for mark in early)}
    fresh = {i: f for i, f in rest.items() if i not in waiting}
    old = {i: f for i, f in fresh.items() if f.modified_unix + rules.young_s <= now}
    retired_before = _in(mark.packs for mark in marks) & live.keys() & packs.keys()
    retired = _mostly_dead(packs, live, retired_before, rules)
    return PrunePlan(
        workspace=workspace,
        snapshots=snapshots,
        stored=_share(packs),
        free=_marked(free),
        waiting=_marked(waiting),
        next_free_unix=_next_free(waiting, early, rules),
        unnamed=_marked(old)[:MOST_MARKED],
        retired=retired,
        rewritten_bytes=sum(live[bytes.fromhex(pack.id)] for pack in retired),
        retiring=_marked({i: packs[i] for i in retired_before}),
        young=_share({i: f for i, f in fresh.items() if i not in old}),
        marks=marks,
        records=needless_records(store, workspace, named, there, now - rules.grace_s),
    )


def carry_out(store: ObjectStore, plan: PrunePlan) -> Pruned:
    """Mark and delete as planned, whatever the plan's age: a pack that was unnamed and marked can
    never be named again."""
    still = {bytes.fromhex(pack.id): pack for pack in plan.free}
    _write_mark(store, plan)
    store.delete(pack_key(plan.workspace, pack_id) for pack_id in still)
    left = _packs(store, plan.workspace)
    freed = [pack for pack_id, pack in still.items() if pack_id not in left]
    _remove_marks(store, plan.workspace, still)
    Deletions(store, plan.workspace).remove(*plan.records)
    return Pruned(plan=plan, freed=share_of(freed))


def share_of(packs: Sequence[Marked]) -> PackShare:
    return PackShare(len(packs), sum(pack.bytes for pack in packs))


def store_now(store: ObjectStore) -> float:
    """The time by the clock that dates the store's objects, in Unix seconds."""
    key = ObjectKey(f"probe/clock-{secrets.token_hex(8)}")
    store.put(key, b"torpor asks what time it is\n")
    try:
        found = store.head(key)
    finally:
        store.delete([key])
    if found is None:
        raise StoreCorrupt(
            f"{store.address} does not list {key}, which was just written: nothing was pruned; a "
            "store must list every object right after it was written"
        )
    return found.modified_unix


def _live_bytes(
    store: ObjectStore, workspace: WorkspaceName, seal: Seal
) -> tuple[dict[bytes, int], set[SnapshotId]]:
    """The bytes of each pack that snapshots use, and the snapshots that were read. One manifest is
    in memory at a time."""
    used: dict[bytes, dict[int, int]] = {}
    there = set()
    for snapshot in _listed(store, workspace):
        try:
            manifest, _ = open_manifest(store, workspace, snapshot, seal)
        except SnapshotMissing:
            if store.head(manifest_key(workspace, snapshot)) is not None:
                raise  # the manifest exists, but could not be read
            continue  # the snapshot was deleted meanwhile
        _add_used(manifest, used)
        there.add(snapshot)
    return {pack: sum(runs.values()) for pack, runs in used.items()}, there


def _listed(store: ObjectStore, workspace: WorkspaceName) -> list[SnapshotId]:
    """The names of all snapshots. An object that may be a manifest stops the prune, because unknown
    is not unnamed."""
    there = []
    for found in store.list(snapshots_prefix(workspace)):
        try:
            there.append(snapshot_of(found.key))
        except InvalidInput:
            raise ManifestInvalid(
                f"{found.key} in {store.address} is not a snapshot that this version of torpor "
                "can read: nothing was pruned; use a newer torpor, or move the object out of the "
                "prefix"
            ) from None
    return there


def _packs(store: ObjectStore, workspace: WorkspaceName) -> dict[bytes, StoredObject]:
    packs = {}
    for key, found in stored_packs(store, workspace).items():
        try:
            pack_id = pack_id_of(key)
        except ValueError:
            continue  # another program's object in this prefix
        if key == pack_key(workspace, pack_id):
            packs[pack_id] = found
    return packs


def _add_used(manifest: Manifest, used: dict[bytes, dict[int, int]]) -> None:
    for pack in manifest.packs:
        used.setdefault(pack.id, {})
    for chunk in manifest.chunks:
        used[manifest.packs[chunk.pack].id][chunk.offset] = chunk.stored


def _mostly_dead(
    packs: Mapping[bytes, StoredObject],
    live: Mapping[bytes, int],
    retired_before: set[bytes],
    rules: PruneRules,
) -> list[Marked]:
    """The packs with the smallest live share first, as long as their live bytes stay within the
    limit."""
    dead = sorted(
        (live[i] / found.bytes, i)
        for i, found in packs.items()
        if i in live and i not in retired_before and live[i] < rules.dead_below * found.bytes
    )
    chosen: list[Marked] = []
    left = rules.rewrite_bytes
    for _, pack_id in dead:
        if live[pack_id] > left or len(chosen) == MOST_MARKED:
            continue
        left -= live[pack_id]
        chosen.append(Marked(pack_id.hex(), packs[pack_id].bytes))
    return chosen


def _write_mark(store: ObjectStore, plan: PrunePlan) -> None:
    """Write one mark with what is new, and with the still named packs of earlier marks, which can
    be removed once their unnamed packs are gone."""
    if plan.unnamed or plan.retired:
        retired = [*plan.retired, *plan.retiring]
        write_mark(store, plan.workspace, plan.marks, plan.unnamed, retired)


def _remove_marks(store: ObjectStore, workspace: WorkspaceName, deleted: Container[bytes]) -> None:
    """Remove the marks whose packs are all gone, or are in a later mark. A pack's last mark is
    never removed while the pack is there, so that no snapshot ever refers to it again: a pack that
    the listing lacks and that this prune has not ``deleted`` is asked for by its own key."""
    # In this order, a marked pack that is gone by now never comes back.
    marks = read_marks(store, workspace)
    left = _packs(store, workspace)

    def is_gone(pack: bytes) -> bool:
        if pack in left:
            return False
        return pack in deleted or store.head(pack_key(workspace, pack)) is None

    later: set[bytes] = set()
    done = []
    for mark in reversed(marks):
        if all(pack in later or is_gone(pack) for pack in mark.packs):
            done.append(mark.key)
        else:
            later |= mark.packs
    store.delete(done)


def _in(sets: Iterable[frozenset[bytes]]) -> set[bytes]:
    return {pack_id for pack_ids in sets for pack_id in pack_ids}


def _marked(packs: Mapping[bytes, StoredObject]) -> list[Marked]:
    return [Marked(pack_id.hex(), found.bytes) for pack_id, found in sorted(packs.items())]


def _share(packs: Mapping[bytes, StoredObject]) -> PackShare:
    return PackShare(len(packs), sum(found.bytes for found in packs.values()))


def _next_free(waiting: Container[bytes], early: Sequence[Mark], rules: PruneRules) -> float | None:
    due = [m.made_unix + rules.grace_s for m in early if any(i in waiting for i in m.unnamed)]
    return min(due, default=None)
