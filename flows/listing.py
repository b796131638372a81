"""What there is: machines and snapshots of a workspace, as plain functions."""

from __future__ import annotations

from blocks import Workspace
from tasks.place import open_place
from torpor.store import snapshots
from torpor.values import Machine, StoredSnapshot


def list_machines(workspace: Workspace | str) -> list[Machine]:
    """The workspace's live machines at its provider."""
    place = open_place(workspace)
    return [
        machine
        for machine in place.provider.list_own()
        if machine.label is not None and machine.label.workspace == place.spec.name
    ]


def list_snapshots(workspace: Workspace | str) -> list[StoredSnapshot]:
    """The workspace's snapshots, newest first."""
    place = open_place(workspace)
    return snapshots.list_snapshots(place.store, place.spec.name)
