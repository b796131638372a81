"""The environments of stacks in the store: which one is used, and when one is deleted.

An environment is a snapshot of a workspace of its own (``base_name``). It is used only while it is
pinned, and only a verified snapshot is pinned. Each use renews the pin. So a deploy that is killed
leaves at most a snapshot without a pin, which nobody uses and which ``expire`` deletes.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Final

from torpor.control.safety import Verified, check_whole
from torpor.control.store.manifests import find_snapshot, snapshot_times
from torpor.control.store.object_store import ObjectStore
from torpor.control.upkeep.deletion import delete_snapshot
from torpor.control.upkeep.pins import is_own, is_pinned, pin, pin_times, pinned, unpin
from torpor.control.upkeep.prune import PruneRules, carry_out, plan_prune
from torpor.shared.errors import (
    ManifestInvalid,
    SnapshotDamaged,
    SnapshotKept,
    SnapshotMissing,
    StoreCorrupt,
    TorporError,
    WrongKey,
)
from torpor.shared.format.keys import Seal
from torpor.shared.values import BASE, SnapshotId, StoredSnapshot, WorkspaceName

LEFT_S: Final = 24 * 3600.0
"""Seconds after which a snapshot without a pin counts as left by a killed deploy."""
_PREFIX: Final = "workspaces/"
_NAME: Final = re.compile(BASE + "[0-9a-f]{32}")  # no user's workspace has such a name by chance


def is_base(workspace: WorkspaceName) -> bool:
    """Whether a name is that of a stack's environments. Nobody misses a lost environment, because
    the setup makes it again."""
    return _NAME.fullmatch(workspace) is not None


def shown_name(workspace: WorkspaceName) -> str:
    """The name that people read instead of a base's name, which is a hash."""
    return "the environment" if is_base(workspace) else workspace


def find(
    store: ObjectStore, workspace: WorkspaceName, seal: Seal, reason: str, paths: Sequence[str]
) -> StoredSnapshot | None:
    """The environment that is in use, with its pin renewed; None if there is none. An environment
    that names other directories than the stack's ``paths`` is not used any more."""
    for snapshot in _in_use(store, workspace):
        try:
            found = find_snapshot(store, workspace, snapshot)
            check_whole(store, found, seal, paths)
            pin(store, workspace, snapshot, reason)
        except SnapshotMissing:  # deleted meanwhile
            continue
        except (ManifestInvalid, SnapshotDamaged):
            distrust(store, workspace, snapshot)
            continue
        return found
    return None


def distrust(store: ObjectStore, workspace: WorkspaceName, snapshot: SnapshotId) -> None:
    """Stop the use of a damaged environment; the next deploy makes it again."""
    unpin(store, workspace, snapshot)


def keep(store: ObjectStore, verified: Verified, reason: str) -> bool:
    """Use this environment from now on, unless another deploy has stored one by now. Of several,
    the oldest is kept. Returns whether that is this one."""
    workspace = verified.workspace
    pin(store, workspace, verified.snapshot, reason)
    kept, *others = _in_use(store, workspace)
    for other in others:
        _drop(store, workspace, other)
    return kept == verified.snapshot


def drop(store: ObjectStore, verified: Verified) -> None:
    """Delete an environment that is not to be used."""
    _drop(store, verified.workspace, verified.snapshot)


def forget(store: ObjectStore, workspace: WorkspaceName) -> None:
    """Delete every environment of this name; ``expire`` prunes what is left."""
    for snapshot in snapshot_times(store, workspace):
        _drop(store, workspace, snapshot)


def forget_measured(store: ObjectStore, scratch: WorkspaceName) -> None:
    """Delete the environments that a benchmark made under that scratch name and left: the reason of
    their pins begins with it. Those without a pin are ``expire``'s."""
    for workspace in _names(store):
        if any(why.startswith(f"{scratch}: ") for why in pinned(store, workspace).values()):
            forget(store, workspace)


def expire(
    store: ObjectStore,
    seal_of: Callable[[WorkspaceName], Seal],
    unused_s: float,
    now_unix: float,
) -> list[SnapshotId]:
    """Delete every environment that no deploy has used for so long, and what killed deploys left;
    prune them all. Returns what was deleted; raises the last refusal of a prune after all were
    tried."""
    deleted = []
    fault: TorporError | None = None
    for workspace in _names(store):
        seal = seal_of(workspace)  # first: it may ask the store for the key, which may be removed
        pins = pin_times(store, workspace)
        for snapshot, made_unix in snapshot_times(store, workspace).items():
            old_s = now_unix - pins.get(snapshot, made_unix)
            if old_s <= (unused_s if snapshot in pins else LEFT_S):
                continue
            if snapshot not in pins and is_pinned(store, workspace, snapshot):
                continue  # the listing lacks its pin, so its last use is unknown
            if _drop(store, workspace, snapshot):
                deleted.append(snapshot)
        rules = PruneRules(without_snapshots=True)
        try:
            carry_out(store, plan_prune(store, workspace, seal, rules))
        except (WrongKey, ManifestInvalid):
            continue  # an environment of another store block, or a damaged one
        # the other environments are pruned all the same
        except (SnapshotMissing, StoreCorrupt) as error:
            fault = error
    if fault is not None:
        raise fault
    return deleted


def _in_use(store: ObjectStore, workspace: WorkspaceName) -> list[SnapshotId]:
    """The snapshots that are there and that a deploy has pinned, oldest first."""
    pins = pin_times(store, workspace)
    return [
        snapshot
        for snapshot in snapshot_times(store, workspace)
        if snapshot in pins and is_own(store, workspace, snapshot)
    ]


def _drop(store: ObjectStore, workspace: WorkspaceName, snapshot: SnapshotId) -> bool:
    """Delete an environment. False if another deploy pins it at this moment: then it stays."""
    unpin(store, workspace, snapshot)
    try:
        why = "no deploy uses this environment any more"
        delete_snapshot(store, workspace, snapshot, even_newest=snapshot, why=why)
    except SnapshotKept:
        return False
    except SnapshotMissing:
        return True
    return True


def _names(store: ObjectStore) -> list[WorkspaceName]:
    found = {stored.key.split("/")[1] for stored in store.list(_PREFIX + BASE)}
    return [name for name in map(WorkspaceName, sorted(found)) if is_base(name)]
