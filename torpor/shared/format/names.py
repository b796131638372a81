"""Where things lie below a store's prefix."""

from __future__ import annotations

import secrets

from torpor.shared.values import ObjectKey, SnapshotId, WorkspaceName, snapshot_id


def snapshots_prefix(workspace: WorkspaceName) -> str:
    return f"workspaces/{workspace}/snapshots/"


def packs_prefix(workspace: WorkspaceName) -> str:
    return f"workspaces/{workspace}/packs/"


def marks_prefix(workspace: WorkspaceName) -> str:
    return f"workspaces/{workspace}/marks/"


def deletions_prefix(workspace: WorkspaceName) -> str:
    return f"workspaces/{workspace}/deleted/"


def settings_prefix() -> str:
    """Beside all workspaces: one listing shows the records of each."""
    return "settings/"


def settings_key(workspace: WorkspaceName) -> ObjectKey:
    return ObjectKey(f"{settings_prefix()}{workspace}")


def manifest_key(workspace: WorkspaceName, snapshot: SnapshotId) -> ObjectKey:
    return ObjectKey(snapshots_prefix(workspace) + snapshot)


def pack_key(workspace: WorkspaceName, pack_id: bytes) -> ObjectKey:
    name = pack_id.hex()
    return ObjectKey(f"{packs_prefix(workspace)}{name[:2]}/{name}")


def new_pack_key(workspace: WorkspaceName) -> ObjectKey:
    """A name that no other writer can produce: 128 random bits."""
    return pack_key(workspace, secrets.token_bytes(16))


def pack_id_of(key: ObjectKey) -> bytes:
    """The id in a pack's name; ValueError when it is not one."""
    pack_id = bytes.fromhex(key.rsplit("/", 1)[-1])
    if len(pack_id) != 16:
        raise ValueError(f"{key} is not a pack's name")
    return pack_id


def snapshot_of(key: ObjectKey) -> SnapshotId:
    """The snapshot that a manifest's name stands for; InvalidInput when it is not one."""
    return snapshot_id(key.rsplit("/", 1)[-1])
