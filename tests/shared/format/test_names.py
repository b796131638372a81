"""Where objects lie."""

from __future__ import annotations

import pytest

from torpor.shared.errors import InvalidInput
from torpor.shared.format.names import (
    manifest_key,
    new_pack_key,
    pack_id_of,
    pack_key,
    snapshot_of,
)
from torpor.shared.values import ObjectKey, SnapshotId, WorkspaceName, object_key

DEMO = WorkspaceName("demo")


def test_names_are_as_the_format_says() -> None:
    snapshot = SnapshotId("20261120T234913Z-1f0c9ab2")
    assert manifest_key(DEMO, snapshot) == "workspaces/demo/snapshots/20261120T234913Z-1f0c9ab2"
    pack = bytes(range(0xA0, 0xB0))
    assert pack_key(DEMO, pack) == "workspaces/demo/packs/a0/a0a1a2a3a4a5a6a7a8a9aaabacadaeaf"


def test_names_lead_back() -> None:
    key = new_pack_key(DEMO)
    assert pack_key(DEMO, pack_id_of(key)) == key == object_key(key)
    assert new_pack_key(DEMO) != key
    snapshot = SnapshotId("20261120T234913Z-1f0c9ab2")
    assert snapshot_of(manifest_key(DEMO, snapshot)) == snapshot


@pytest.mark.parametrize("name", ["packs/aa/aabb", "packs/aa/" + "a" * 34, "packs/aa/not-hex"])
def test_what_is_no_pack_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match=r"pack|hex"):
        pack_id_of(ObjectKey(name))


def test_what_is_no_snapshot_is_refused() -> None:
    with pytest.raises(InvalidInput):
        snapshot_of(ObjectKey("workspaces/demo/snapshots/notes.txt"))
