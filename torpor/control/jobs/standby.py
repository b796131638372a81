"""What a machine needs to save by itself while no control side is there.

docs/contributing/prune.md says why prune does such a save no harm: the order in
``book_for``.
"""

from __future__ import annotations

import time
from collections.abc import Set
from datetime import datetime, timezone
from typing import Final

import msgspec

from torpor.control.store.manifests import (
    find_snapshot,
    newest_snapshot,
    open_manifest,
    read_manifest,
)
from torpor.control.store.marks import COMMIT_S, OWN_COMMIT_S
from torpor.control.store.object_store import ObjectStore
from torpor.control.store.packs import UsablePacks, claims_of
from torpor.shared.format.keys import Seal
from torpor.shared.format.lineage import OWN_SAVE
from torpor.shared.format.manifest import Manifest, Pack
from torpor.shared.format.names import manifest_key, new_pack_key, pack_id_of
from torpor.shared.values import (
    Compression,
    Grant,
    ObjectKey,
    SnapshotId,
    WorkspaceName,
    WorkspaceSpec,
    made_at,
    new_snapshot_id,
)
from torpor.shared.wire.autosave import Book, SaveGrant
from torpor.shared.wire.snapshot import KnownSnapshot

OWN_SAVES: Final = 4
"""Saves that a machine may make on one book besides scheduled ones. Several, because a notice may
be withdrawn, or follow a recommendation, and a save may fail."""
SCHEDULED_SAVES: Final = OWN_COMMIT_S // 60
"""Scheduled saves on one book: one each minute, until its grants end."""
PACKS: Final = 2048
"""Grants for packs in one book, for 128 GiB: a program may write far more than the workspace held.
They are 1.4 MB, which the machine holds in memory; the names of young packs are half a megabyte."""
_MOST_YOUNG: Final = 8192
_YOUNG_S: Final = 24 * 3600.0


def book_for(
    store: ObjectStore,
    spec: WorkspaceSpec,
    key: bytes | None,
    job: str,
    basis: SnapshotId | None,
    manifest: Manifest | None = None,
    every_s: float = 0.0,
) -> Book:
    """The book (presigned URLs and more) by which a machine can save the workspace by itself for
    ``lasts_s`` seconds, after notices and every ``every_s`` seconds; 0: after notices alone.
    ``basis``: the snapshot that the machine's disk was last equal to, None for the newest one;
    ``manifest``: its manifest, where the caller has it.

    The grants for the manifests are signed first, and end ``lasts_s`` later: see ``UsablePacks``.
    """
    end_s = _lasts_s(store, spec.name)
    saves = _sign_saves(store, spec, every_s, end_s)
    known: list[KnownSnapshot] = []
    packs: list[Pack] = []
    basis = basis or newest_snapshot(store, spec.name)
    if basis is not None:
        stored = find_snapshot(store, spec.name, basis)
        if manifest is None:
            manifest = read_manifest(store, stored, Seal(key))
        packs = manifest.packs
        grant = _grant(store, "GET", manifest_key(spec.name, basis), end_s)
        known = [KnownSnapshot(stored.root, stored.manifest_bytes, grant)]
    usable, claims = UsablePacks.read(store, spec.name), claims_of(spec.name, packs)
    return Book(
        job=job,
        workspace=spec.name,
        roots=spec.paths,
        exclude=spec.exclude,
        accepted=spec.may_change,
        compression=Compression(),
        key=None if key is None else key.hex(),
        known=known,
        unusable=usable.unusable(claims),
        saves=saves,
        packs=[_grant(store, "PUT", new_pack_key(spec.name), end_s) for _ in range(PACKS)],
        save_argv=spec.quiesce,
        save_timeout_s=spec.quiesce_timeout_s,
        young=_young(usable, {claim.key for claim in claims}),
        resume_argv=spec.resume if spec.quiesce else [],
        authority=store.authority,
        every_s=every_s,
        lasts_s=end_s,
    )


def _lasts_s(store: ObjectStore, workspace: WorkspaceName) -> int:
    """Seconds that a machine may save on one book. A grant that could replace what was verified
    ends within COMMIT_S."""
    probe = _grant(store, "PUT", new_pack_key(workspace), COMMIT_S)
    return OWN_COMMIT_S if probe.once else COMMIT_S


def renewed_s(lasts: float) -> float:
    """The age in seconds at which a book that lasts ``lasts_s`` is replaced by a new one."""
    return min(lasts / 2, float(COMMIT_S))


def is_own_save(
    store: ObjectStore,
    workspace: WorkspaceName,
    snapshot: SnapshotId,
    seal: Seal,
    since_unix: float,
) -> bool:
    """Whether a machine has made the snapshot by itself, on a book that was signed after
    ``since_unix``, when the job first had a machine: the snapshot's name has the time of the book.
    Without the check, a machine that lies could name any other snapshot, also an earlier job's, and
    have this job delete it."""
    if made_at(snapshot).timestamp() < int(since_unix):
        return False
    manifest, _ = open_manifest(store, workspace, snapshot, seal, facts=())
    return bool(manifest.statistics.get(OWN_SAVE))


def _young(usable: UsablePacks, named: Set[ObjectKey]) -> list[ObjectKey]:
    """The packs of the last day that are neither named by a snapshot nor marked, the newest
    first."""
    since_unix = time.time() - _YOUNG_S
    young = [
        pack
        for pack in usable.there.values()
        if pack.modified_unix >= since_unix
        and pack.key not in named
        and pack_id_of(pack.key) not in usable.marked
    ]
    young.sort(key=lambda pack: pack.modified_unix, reverse=True)
    return [pack.key for pack in young[:_MOST_YOUNG]]


def _sign_saves(
    store: ObjectStore, spec: WorkspaceSpec, every_s: float, end_s: int
) -> list[SaveGrant]:
    """Grants for manifests whose names sort after every snapshot, and one after the other: one for
    each time at which a save is due, and OWN_SAVES more. All names have the time of this book, by
    which ``choose_newest`` tells a machine that was given up from its successor."""
    newest = newest_snapshot(store, spec.name)
    now = datetime.now(timezone.utc)
    due = min(SCHEDULED_SAVES, int(end_s / every_s) + 1) if every_s else 0
    saves = []
    for _ in range(OWN_SAVES + due):
        newest = new_snapshot_id(now, newest)
        grant = _grant(store, "PUT", manifest_key(spec.name, newest), end_s)
        saves.append(SaveGrant(newest, int(now.timestamp()), grant))
    return saves


def _grant(store: ObjectStore, verb: str, key: ObjectKey, end_s: int) -> Grant:
    """A grant without patience: the save itself tries again, and soon, because seconds count before
    a machine ends."""
    grant = store.grant(verb, key, expires_s=end_s)
    return msgspec.structs.replace(grant, patience_s=0.0)
