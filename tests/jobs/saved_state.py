"""What a training has reached in a snapshot, by a reader that is not torpor's."""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path
from typing import Any

from tests import independent_reader as reader
from tests.jobs import training
from torpor.control.store.object_store import ObjectStore
from torpor.shared.format.names import manifest_key
from torpor.shared.values import MIB, ObjectKey, SnapshotId, WorkspaceName


def state_in(
    store: ObjectStore, store_key: bytes, workspace: WorkspaceName, snapshot: SnapshotId
) -> dict[str, Any]:
    keys = reader.Keys(store_key, workspace)
    blob = store.get(manifest_key(workspace, snapshot), max_bytes=64 * MIB)
    manifest = reader.read_manifest(blob, keys, workspace, snapshot)

    def get(name: str, first: int, count: int | None) -> bytes:
        whole = store.get(ObjectKey(name), max_bytes=256 * MIB)
        return whole[first:] if count is None else whole[first : first + count]

    with tempfile.TemporaryDirectory() as target:
        reader.restore(manifest, get, keys, [os.fsencode(target)])
        file = Path(target) / "state.json"
        state: dict[str, Any] = json.loads(file.read_text()) if file.exists() else training.start()
        return state
