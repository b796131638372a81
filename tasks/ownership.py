"""Who owns a workspace, of the control sides of its bucket, and what each of them may do.

The side that recovered a workspace owns it. Any other one refuses what ends, wakes, rents, syncs,
prunes or deletes; its backups, which only add snapshots, go on. A store that does not answer is an
error where something may end or be rented: unknown is not "no owner". A record that somebody has
damaged counts as no owner, and is named: whoever can damage it can delete it, which looks the same
as a workspace that nobody has recovered (docs/contributing/safety.md, rule 24).
"""

from __future__ import annotations

import socket
from collections.abc import Callable
from typing import Final

from tasks.runner import runner
from tasks.workspace import OpenWorkspace
from torpor.control.reports import moment
from torpor.control.store.patience import StorePatience
from torpor.control.store.workspace_records import (
    Owner,
    WorkspaceRecord,
    WorkspaceRecords,
)
from torpor.shared.errors import RecordRefused, Recovered, TorporError

KEEP_S: Final = 5.0
"""How long a store may hold up a backup for the owner."""


def check_owner(opened: OpenWorkspace, warn: Callable[[str], None] | None = None) -> None:
    """Recovered where another control side owns the workspace, and the store's error where that is
    not known. Keeps what the workspace's blocks hold in its record: one request, and another one
    where they have changed. ``warn`` gets why they were not kept; None: the run's log."""
    try:
        record = _keep(opened, _records(opened), warn)
    except RecordRefused as error:
        _say_damaged(opened, error)
    else:
        _refuse(opened, record)


def check_still_owner(opened: OpenWorkspace) -> None:
    """The same in one request, before a machine is rented or ended; nothing is written."""
    owner = _owner(opened, _records(opened))
    if owner is not None:
        raise _recovered(opened, owner)


def warn_or_recovered(opened: OpenWorkspace, warned: str = "") -> str:
    """Recovered where another control side owns the workspace; a warning where that is not known:
    for a look at what has begun, which rents and ends nothing. Returns the warning, which is not
    given again where it is ``warned``."""
    try:
        check_still_owner(opened)
    except Recovered:
        raise
    except TorporError as error:
        words = f"who owns workspace {opened.root} is not known: {error}"
        if words != warned:
            runner().log.warning("%s", words)
        return words
    return ""


def why_only_adds(opened: OpenWorkspace) -> str:
    """Why a backup may add a snapshot and delete none: another control side owns the workspace, or
    nobody knows. Empty where it may; the record is kept as in ``check_owner``."""
    try:
        patient = WorkspaceRecords(StorePatience(KEEP_S).of(opened.store), opened.store_key)
        record = _keep(opened, patient)
        _refuse(opened, record)
    except RecordRefused as error:
        _say_damaged(opened, error)
    except TorporError as error:
        return str(error)
    return ""


def why_only_reported(opened: OpenWorkspace) -> str:
    """Why `watch` only reports of the workspace, as in ``why_only_adds``; nothing is written."""
    try:
        owner = _owner(opened, _records(opened))
    except Exception as error:  # noqa: BLE001 - the other workspaces are looked at all the same
        return f"who owns {opened.root} is not known: {error}"
    return "" if owner is None else str(_recovered(opened, owner))


def _records(opened: OpenWorkspace) -> WorkspaceRecords:
    return WorkspaceRecords(opened.store, opened.store_key)


def _keep(
    opened: OpenWorkspace,
    records: WorkspaceRecords,
    said: Callable[[str], None] | None = None,
) -> WorkspaceRecord | None:
    def warn(error: Exception) -> None:
        words = (
            f"the settings of workspace {opened.root} were not written into its bucket, where "
            f"`torpor recover` finds them; its next run tries it again: {error}"
        )
        if said is None:
            runner().log.warning("%s", words)
        else:
            said(words)

    settings = None
    try:
        settings = opened.settings()
    except Exception as error:  # noqa: BLE001 - the Prefect server's client raises any
        warn(error)
    return records.keep(opened.root, settings, opened.side, socket.gethostname(), warn)


def _owner(opened: OpenWorkspace, records: WorkspaceRecords) -> Owner | None:
    """The owner, where that is another control side."""
    try:
        record = records.read(opened.root)
    except RecordRefused as error:
        _say_damaged(opened, error)
        return None
    return None if record is None else record.owned_elsewhere(opened.side)


def _refuse(opened: OpenWorkspace, record: WorkspaceRecord | None) -> None:
    owner = None if record is None else record.owned_elsewhere(opened.side)
    if owner is not None:
        raise _recovered(opened, owner)


def _recovered(opened: OpenWorkspace, owner: Owner) -> Recovered:
    return Recovered(
        f"{opened.root} was recovered by {owner.host} on {moment(owner.since_unix)} (control side "
        f"{owner.side}), which owns it: this host rents, ends and deletes nothing of it. `torpor "
        f"recover {opened.root} --store {opened.store_block or 'STORE'}` here takes it back"
    )


def _say_damaged(opened: OpenWorkspace, error: Exception) -> None:
    runner().log.warning("nobody counts as the owner of workspace %s: %s", opened.root, error)
