"""Snapshots deleted, packs missing or rotten: said before a machine is kept for it."""

from __future__ import annotations

import random

import pytest

from tests.fixtures.plain_flows import hibernate_plainly, wake_plainly
from tests.fixtures.standing import raises
from tests.fixtures.stores import Server
from tests.fixtures.trees import differences, facts, fill
from tests.fixtures.world import World
from torpor.shared.errors import SnapshotDamaged, SnapshotMissing, StoreMissing, TorporError
from torpor.shared.format.names import manifest_key
from torpor.shared.values import ObjectKey


@pytest.fixture
def kept(world: World, short_agent: None, seaweed: Server) -> World:
    """A workspace with two snapshots, on its machine still."""
    machine = world.rent()
    workspace = world.workspace(machine.id)
    fill(workspace, random.Random(3), big=1, big_bytes=1_500_000)
    hibernate_plainly(world.opened, destroy=False)
    (workspace / "later").write_bytes(random.Random(4).randbytes(50_000))
    hibernate_plainly(world.opened, destroy=False)
    return world


def _packs(world: World) -> list[ObjectKey]:
    return [found.key for found in world.direct.list("workspaces/demo/packs/")]


def test_a_named_snapshot_that_was_deleted(kept: World) -> None:
    newest, older = kept.snapshots()
    hibernate_plainly(kept.opened)
    kept.direct.delete([manifest_key(older.workspace, older.snapshot)])
    with raises(SnapshotMissing, older.snapshot, "127.0.0.1", newest.snapshot, "Check"):
        wake_plainly(kept.opened, snapshot=older.snapshot, retries=0)
    assert kept.machines() == []
    wake_plainly(kept.opened)


def test_a_pack_that_is_missing_ends_a_wake_without_a_machine(kept: World) -> None:
    hibernate_plainly(kept.opened)
    saved = {key: kept.direct.get(key, max_bytes=1 << 30) for key in _packs(kept)}
    kept.direct.delete(saved)
    with pytest.raises(TorporError, match=r"packs/") as caught:
        wake_plainly(kept.opened, retries=0)
    assert type(caught.value) in (SnapshotDamaged, StoreMissing)
    assert kept.machines() == []
    for key, body in saved.items():  # from a backup, say
        kept.direct.put(key, body)
    wake_plainly(kept.opened)


def test_a_pack_that_rotted_ends_a_wake_without_a_machine(kept: World) -> None:
    hibernate_plainly(kept.opened)
    key = max(kept.direct.list("workspaces/demo/packs/"), key=lambda found: found.bytes).key
    good = kept.direct.get(key, max_bytes=1 << 30)
    kept.direct.put(key, good[:5000] + bytes([good[5000] ^ 1]) + good[5001:])
    with raises(SnapshotDamaged, "packs/"):
        wake_plainly(kept.opened, retries=0)
    assert kept.machines() == []
    kept.direct.put(key, good)
    wake_plainly(kept.opened)


def test_packs_that_went_missing_meanwhile_are_stored_again_before_a_destroy(kept: World) -> None:
    """The next hibernate refers to earlier packs; it looks whether they are there."""
    (machine,) = kept.machines()
    truth = facts(kept.workspace(machine.id))
    kept.direct.delete(_packs(kept))
    report = hibernate_plainly(kept.opened)
    assert report.destroyed
    assert kept.machines() == []
    wake_plainly(kept.opened)
    (woken,) = kept.machines()
    assert not differences(truth, facts(kept.workspace(woken.id)))


def test_a_manifest_that_rotted_is_refused(kept: World) -> None:
    older = kept.snapshots()[1]
    hibernate_plainly(kept.opened)
    newest = kept.snapshots()[0]
    key = manifest_key(newest.workspace, newest.snapshot)
    good = kept.direct.get(key, max_bytes=1 << 30)
    kept.direct.put(key, good[:-20] + bytes([good[-20] ^ 1]) + good[-19:])
    with pytest.raises(TorporError, match=newest.snapshot):
        wake_plainly(kept.opened, retries=0)
    assert kept.machines() == []
    wake_plainly(kept.opened, snapshot=older.snapshot)
