"""Finds workspaces on a machine whose newest verified snapshot is too old."""

from __future__ import annotations

import time
from collections.abc import Sequence

from tasks.retention import look_at_newest
from tasks.runner import runner
from tasks.trouble import trouble
from tasks.workspace import OpenWorkspace
from torpor.control.rental.records import Rental
from torpor.shared.errors import SnapshotError
from torpor.shared.values import WorkspaceName


def missed_backups(
    in_hand: Sequence[tuple[OpenWorkspace, Rental]], hours: float
) -> tuple[dict[WorkspaceName, str], dict[WorkspaceName, str]]:
    """Why workspaces have no recent backup, for those that have had a rented machine for ``hours``;
    and the error of each that could not be looked at. With 0 hours, no workspace is looked at."""
    owing = {
        opened.spec.name: opened
        for opened, rental in in_hand
        if hours and time.time() - rental.created_unix >= hours * 3600
    }
    looks = [(name, look_at_newest.submit(opened, hours)) for name, opened in owing.items()]
    missed: dict[WorkspaceName, str] = {}
    unread: dict[WorkspaceName, str] = {}
    for name, look in looks:
        try:
            look.result()
        except Exception as error:  # noqa: BLE001 - the others are looked at all the same
            why = str(trouble(error))
            runner().log.warning("workspace %s has missed its backup: %s", name, why)
            (missed if isinstance(error, SnapshotError) else unread)[name] = why
    return missed, unread
