"""Snapshots: list and show them, compare two, find a file, delete, pin and unpin.

flows.procedures.listing does the same without a Prefect run, and with every row instead of the
first 200.
Listing has no steps to retry: the store's adapter repeats its own requests.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime, timezone

from blocks import Workspace
from flows.procedures import listing
from flows.procedures.listing import PREVIOUS
from tasks.flow import flow
from tasks.opening import open_workspace
from tasks.restore import NEWEST
from tasks.retention import delete_one, pin_one, unpin_one
from tasks.runner import runner
from torpor.control.reports import Row
from torpor.control.upkeep.deletion import check_not_kept
from torpor.control.upkeep.reports import MOST_ROWS, Table
from torpor.shared.errors import InvalidInput
from torpor.shared.values import SnapshotId, WorkspaceName, snapshot_id


@flow("snapshots")
def snapshots(workspace: Workspace | str, snapshot: str = "") -> Table:
    """List the snapshots of a workspace, or the files of one of them.

    Args:
        workspace: The Workspace block whose snapshots are listed, or its name.
        snapshot: The id of a snapshot, or newest, to list its files. Empty: list the snapshots.
    """
    name = open_workspace(workspace).spec.name
    if not snapshot:
        kept = listing.list_kept(workspace)
        rows = [
            {
                "snapshot": one.snapshot,
                "made": _moment(one.made_unix),
                "verified": "yes" if one.verified else "no",
                "machine": one.machine,
                "goes on from": one.parent or "",
                "work also in": one.work_in or ("no other" if one.verified else ""),
                "pinned": one.pinned,
            }
            for one in kept
        ]
        return _told("snapshots", _table(name, f"Snapshots of workspace {name}", rows))
    entries = listing.list_entries(workspace, snapshot)
    total = sum(one.bytes for one in entries)
    title = f"{snapshot}: {len(entries):,} names, {total:,} bytes"
    rows = [
        {
            "path": one.path,
            "kind": one.kind,
            "bytes": f"{one.bytes:,}",
            "mode": one.mode,
            "changed": _moment(one.mtime_ns / 1e9),
        }
        for one in entries[:MOST_ROWS]
    ]
    return _told("snapshot", _table(name, title, rows, len(entries)))


@flow("diff")
def diff(workspace: Workspace | str, before: str = PREVIOUS, after: str = NEWEST) -> Table:
    """Show what differs between two snapshots of a workspace: added, removed, changed, metadata.

    Args:
        workspace: The Workspace block whose snapshots are compared, or its name.
        before: The earlier snapshot's id, or previous for the one right before the later.
        after: The later snapshot's id, or newest.
    """
    found = listing.compare_snapshots(workspace, before, after)
    counts = ", ".join(
        f"{found.count(kind)} {kind}" for kind in ("added", "removed", "changed", "metadata")
    )
    title = (
        f"{found.before} to {found.after}: {counts}; {found.bytes_before:,} bytes became "
        f"{found.bytes_after:,}, {found.new_bytes:,} of them new, stored as "
        f"{found.new_stored_bytes:,}"
    )
    rows = [
        {
            "path": one.path,
            "difference": one.difference,
            "what": one.what,
            "bytes before": f"{one.bytes_before:,}",
            "bytes after": f"{one.bytes_after:,}",
        }
        for one in found.changes[:MOST_ROWS]
    ]
    return _told("diff", _table(found.workspace, title, rows, len(found.changes)))


@flow("find")
def find(workspace: Workspace | str, pattern: str) -> Table:
    """Find a file in all snapshots of a workspace, and list its versions.

    Args:
        workspace: The Workspace block whose snapshots are searched, or its name.
        pattern: A name such as *.safetensors, or the end of a path such as notes/*.txt.
    """
    found = listing.find_files(workspace, pattern)
    rows = [
        {
            "path": one.path,
            "bytes": f"{one.bytes:,}",
            "changed": _moment(one.mtime_ns / 1e9),
            "first in": one.first,
            "last in": one.last,
            "snapshots": str(one.snapshots),
        }
        for one in found.versions[:MOST_ROWS]
    ]
    title = f"{len(found.versions):,} versions of {pattern}"
    if found.unread:
        title += f"; {len(found.unread)} snapshots could not be read: {found.unread[0]}"
    return _told("find", _table(found.workspace, title, rows, len(found.versions)))


@flow("delete-snapshots")
def delete_snapshots(
    workspace: Workspace | str, snapshots: list[str], even_newest: str = ""
) -> Table:
    """Delete snapshots of a workspace for good. Prune frees what only they refer to.

    A pinned snapshot is never deleted.

    Args:
        workspace: The Workspace block whose snapshots are deleted, or its name.
        snapshots: The ids of the snapshots to delete.
        even_newest: The id of the newest snapshot, once more, to delete that one too. A wake
            restores the newest.
    """
    ids = [snapshot_id(text.strip()) for text in snapshots]
    if not ids:
        raise InvalidInput("no snapshot was named: write the ids of the snapshots to delete")
    newest = snapshot_id(even_newest.strip()) if even_newest.strip() else None
    opened = open_workspace(workspace)
    check_not_kept(opened.store, opened.spec.name, ids, newest)  # all of them before the first goes
    for snapshot in sorted(set(ids)):  # the newest last: an earlier one would become the newest
        delete_one(opened, snapshot, newest)
    rows: list[Row] = [{"snapshot": snapshot, "now": "deleted"} for snapshot in sorted(set(ids))]
    title = f"{len(rows)} snapshots of workspace {opened.spec.name} deleted"
    return _told("delete-snapshots", _table(opened.spec.name, title, rows))


@flow("pin")
def pin(workspace: Workspace | str, snapshot: str, reason: str) -> Table:
    """Pin a snapshot: neither retention nor a person can delete it until you unpin it.

    Args:
        workspace: The Workspace block that the snapshot is of, or its name.
        snapshot: The snapshot's id.
        reason: Why to keep it, for later readers.
    """
    opened = open_workspace(workspace)
    wanted = snapshot_id(snapshot.strip())
    pin_one(opened, wanted, reason)
    return _told("pin", _pinning(opened.spec.name, wanted, f"pinned: {reason}"))


@flow("unpin")
def unpin(workspace: Workspace | str, snapshot: str) -> Table:
    """Unpin a snapshot, so that retention and people can delete it again. Deletes nothing itself.

    Args:
        workspace: The Workspace block that the snapshot is of, or its name.
        snapshot: The snapshot's id.
    """
    opened = open_workspace(workspace)
    wanted = snapshot_id(snapshot.strip())
    unpin_one(opened, wanted)
    return _told("unpin", _pinning(opened.spec.name, wanted, "not pinned"))


def _pinning(workspace: WorkspaceName, snapshot: SnapshotId, now: str) -> Table:
    return _table(workspace, f"Snapshot {snapshot}", [{"snapshot": snapshot, "now": now}])


def _table(
    workspace: WorkspaceName, title: str, rows: Sequence[Row], count: int | None = None
) -> Table:
    return Table(workspace, title, len(rows) if count is None else count, list(rows[:MOST_ROWS]))


def _told(what: str, table: Table) -> Table:
    runner().table(key=f"{what}-{table.workspace}", rows=table.rows(), description=table.title)
    return table


def _moment(unix: float) -> str:
    return datetime.fromtimestamp(unix, timezone.utc).strftime("%Y-%m-%d %H:%M:%S UTC")
