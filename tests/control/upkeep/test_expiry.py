"""Old snapshots go only by the proof of a newer one."""

from __future__ import annotations

from datetime import datetime, timedelta, timezone

import pytest

from tests.fixtures.manifests import PLAIN, entry, honest
from tests.fixtures.memory_store import MemoryStore
from torpor.control.safety import Verified, verify_snapshot
from torpor.control.store.manifests import find_snapshot, snapshot_ids
from torpor.control.upkeep.history import taken_snapshots
from torpor.control.upkeep.pins import pin
from torpor.control.upkeep.retention import Retention, Taken, judge
from torpor.control.upkeep.superseded import Succession
from torpor.shared.errors import SnapshotMissing
from torpor.shared.format.lineage import Lineage
from torpor.shared.format.manifest import DIRECTORY, FILE, encode_manifest
from torpor.shared.format.names import manifest_key
from torpor.shared.values import SnapshotId, WorkspaceName, new_snapshot_id

DEMO = WorkspaceName("demo")


def _stored(store: MemoryStore, days: int) -> list[SnapshotId]:
    """So many snapshots, one a day, stored in their order; the newest comes first."""
    entries, made = [entry(DIRECTORY, b""), entry(FILE, b"empty")], []
    for days_ago in reversed(range(days)):
        name = new_snapshot_id(datetime.now(timezone.utc) - timedelta(days=days_ago))
        line = Lineage(name, name, made[::-1]).record()
        manifest = honest(snapshot=name, entries=entries, chunks=[], packs=[], environment=line)
        made.append(name)
        store.put(manifest_key(DEMO, made[-1]), encode_manifest(manifest, PLAIN)[0])
    return made[::-1]


def _verified(store: MemoryStore, snapshot: SnapshotId) -> Verified:
    return verify_snapshot(store, find_snapshot(store, DEMO, snapshot), PLAIN)


def _taken(store: MemoryStore) -> list[Taken]:
    return list(taken_snapshots(store, DEMO, PLAIN, honest().roots))


def _expire(store: MemoryStore, verified: Verified, retention: Retention) -> list[SnapshotId]:
    wanted = [one.snapshot for one in judge(_taken(store), retention, {}) if not one.kept]
    return Succession.of(store, verified, PLAIN).end(wanted, "no rule keeps it").deleted


def test_what_no_rule_keeps_goes_oldest_first(store: MemoryStore) -> None:
    ages = _stored(store, 4)
    verified = _verified(store, ages[0])
    assert _expire(store, verified, Retention(last=2)) == [ages[3], ages[2]]
    assert snapshot_ids(store, DEMO) == [ages[1], ages[0]]
    assert _expire(store, verified, Retention(last=2)) == []  # again, as after a retry


def test_what_goes_on_from_no_verified_snapshot_stays(store: MemoryStore) -> None:
    newer, proven, older = _stored(store, 3)
    succession = Succession.of(store, _verified(store, proven), PLAIN)
    assert succession.end([newer, proven, older], "asked").deleted == [older]
    assert snapshot_ids(store, DEMO) == [proven, newer]


def test_what_was_pinned_since_it_was_judged_stays(store: MemoryStore) -> None:
    newest, older, oldest = _stored(store, 3)
    succession = Succession.of(store, _verified(store, newest), PLAIN)
    pin(store, DEMO, older, "just now")
    assert succession.end([older, oldest], "asked").deleted == [oldest]
    assert snapshot_ids(store, DEMO) == [older, newest]


def test_a_proof_of_a_snapshot_that_is_gone_deletes_nothing(store: MemoryStore) -> None:
    newest, older = _stored(store, 2)
    verified = _verified(store, newest)
    store.delete([manifest_key(DEMO, newest)])
    with pytest.raises(SnapshotMissing, match="nothing was deleted; run the backup again"):
        _expire(store, verified, Retention(last=1))
    assert snapshot_ids(store, DEMO) == [older]
