"""Lists the machines and snapshots of a workspace: plain functions, without a Prefect run.

A flow has the name of its deployment, such as ``snapshots`` or ``diff``. A plain function is called
``list_`` and what it returns, such as ``list_versions`` or ``list_differences``, and no flow is.
``frame`` turns any list that one of them returns into a pandas table.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Final

import msgspec

from blocks import Workspace
from flows.procedures.offers import offers_for
from tasks.job_limits import paid_usd_h
from tasks.jobs import for_nodes
from tasks.machines import machines_of
from tasks.restore import NEWEST
from tasks.workspace import OpenWorkspace
from tasks.workspace_blocks import open_stored, open_workspace
from torpor.control.compare.offers import OffersReport
from torpor.control.rental.records import with_host_key
from torpor.control.reports import Row, exact_moment
from torpor.control.store import manifests
from torpor.control.store.catalog import Catalog
from torpor.control.upkeep import differences
from torpor.control.upkeep.differences import FileVersion, ListedEntry, SnapshotDiff
from torpor.control.upkeep.frames import frame
from torpor.control.upkeep.lineage import also_in
from torpor.control.upkeep.pins import pinned
from torpor.shared.errors import ManifestInvalid, SnapshotMissing, WrongKey
from torpor.shared.format.manifest import Manifest
from torpor.shared.values import (
    Machine,
    SnapshotId,
    StoredSnapshot,
    WantChange,
    WorkspaceName,
    made_at,
    snapshot_id,
)

__all__ = [
    "KeptSnapshot",
    "SearchResult",
    "frame",
    "list_differences",
    "list_entries",
    "list_kept",
    "list_logins",
    "list_machines",
    "list_offers",
    "list_snapshots",
    "list_versions",
    "needs_machine",
]

PREVIOUS: Final = "previous"


class KeptSnapshot(msgspec.Struct, frozen=True):
    """A snapshot as a listing of its workspace shows it; ``pinned`` is the reason, or empty.
    ``verified``: it has a receipt, and ``machine`` and ``made_by`` say which machine and which flow
    made it, as far as that is known. ``files``, ``bytes``: what the snapshot holds; ``new_bytes``:
    bytes that were stored for it. ``parent``: the snapshot that its machine went on from.
    ``work_in``: the newest other snapshot that has its work."""

    snapshot: SnapshotId
    made_unix: float
    pinned: str
    verified: bool
    machine: str
    made_by: str
    files: int | None
    bytes: int | None
    new_bytes: int | None
    parent: SnapshotId | None
    work_in: SnapshotId | None

    def row(self) -> Row:
        return {
            "snapshot": self.snapshot,
            "made": exact_moment(self.made_unix),
            "verified": "yes" if self.verified else "no",
            "machine": self.machine,
            "made by": self.made_by,
            "files": _count(self.files),
            "bytes": _count(self.bytes),
            "new bytes": _count(self.new_bytes),
            "goes on from": self.parent or "",
            "work also in": self.work_in or ("no other" if self.verified else ""),
            "pinned": self.pinned,
        }


def _count(known: int | None) -> str:
    return "" if known is None else f"{known:,}"


class SearchResult(msgspec.Struct, frozen=True):
    """The result of a search, and the snapshots that could not be read, with the reason."""

    workspace: WorkspaceName
    versions: list[FileVersion]
    unread: list[str]

    def title(self, pattern: str) -> str:
        title = f"{len(self.versions):,} versions of {pattern}"
        if self.unread:
            title += f"; {len(self.unread)} snapshots could not be read: {self.unread[0]}"
        return title


def list_machines(workspace: Workspace | str) -> list[Machine]:
    """List the workspace's live machines at all providers that it or an open rental names.

    Args:
        workspace: The Workspace block, or its name.

    Returns:
        Each machine with `id`, `provider`, `price_usd_h`, `state`, and `endpoint` with host, port
        and user.

    Raises:
        InvalidInput: There is no such Workspace block.

    Example:
        The machines of a workspace:
        ```python
        from flows import list_machines

        for one in list_machines("mywork"):
            print(one.id, one.provider, one.price_usd_h)
        ```
    """
    return [machine for machine, _ in machines_of(open_workspace(workspace)).machines]


def list_logins(workspace: Workspace | str) -> list[Machine]:
    """The workspace's machines that a person may log in to, with the host key that each must show,
    where torpor has met it."""
    return [
        with_host_key(machine, rental)
        for machine, rental in machines_of(open_workspace(workspace)).machines
        if rental is not None and rental.state == "handed over" and not rental.is_ending(machine)
    ]


def needs_machine(workspace: Workspace | str) -> bool:
    """Whether a job that begins now rents a machine: the workspace is on no machine, or another job
    is open, which will end the machine before."""
    return not list_logins(workspace) or bool(open_workspace(workspace).jobs.open())


def list_offers(
    workspace: Workspace | str,
    snapshot: str = NEWEST,
    starts: bool = True,
    change: WantChange = WantChange(),  # noqa: B008 - it is never changed
    *,
    nodes: int = 1,
    max_usd: float = 0.0,
) -> OffersReport:
    """What a wake of that snapshot would try to rent, the best first. Rents nothing. Where there is
    no snapshot, what `create` would try. Without ``starts``, what a replicate, a deploy or a job
    would try, which starts none of the workspace's programs. ``change``: what this one rental wants
    other than the workspace. ``nodes``: on how many machines a job runs, which only some markets
    have. ``max_usd``: what the job may cost; 0 for no limit."""
    opened = for_nodes(open_workspace(workspace).wanting(change), nodes)
    if max_usd:
        opened = replace(opened, most_usd_h=paid_usd_h(opened, max_usd))
    return offers_for(opened.freezing if starts else opened, snapshot, nodes)


def list_snapshots(workspace: Workspace | str) -> list[StoredSnapshot]:
    """List the workspace's snapshots, newest first.

    Args:
        workspace: The Workspace block, or its name; home--NAME for what was stored of a home beside
            it.

    Returns:
        Each snapshot with its id in `snapshot`, `root` (a hash of its contents),
        `manifest_bytes` and `modified_unix` (seconds).

    Raises:
        InvalidInput: There is no such Workspace block.

    Example:
        The id of the newest snapshot:
        ```python
        from flows import list_snapshots

        print(list_snapshots("mywork")[0].snapshot)
        ```
    """
    opened = open_stored(workspace)
    return manifests.list_snapshots(opened.store, opened.spec.name)


def list_kept(workspace: Workspace | str) -> list[KeptSnapshot]:
    """List the workspace's snapshots with times, sizes and pins, newest first; damaged ones too.

    Args:
        workspace: The Workspace block, or its name; home--NAME for what was stored of a home beside
            it.

    Returns:
        Each snapshot with `made_unix` (seconds), `verified`, `files`, `bytes`, `new_bytes`, and in
        `pinned` the reason of its pin, or nothing.

    Raises:
        InvalidInput: There is no such Workspace block.

    Example:
        The snapshots as a pandas table:
        ```python
        from flows import frame, list_kept

        print(frame(list_kept("mywork")))
        ```
    """
    opened = open_stored(workspace)
    why = pinned(opened.store, opened.spec.name)
    known = Catalog(opened.store, opened.spec.name).receipts()
    work_in = also_in(known)
    kept = []
    for snapshot in reversed(manifests.snapshot_ids(opened.store, opened.spec.name)):
        receipt = known.get(snapshot)
        kept.append(
            KeptSnapshot(
                snapshot,
                made_at(snapshot).timestamp(),
                why.get(snapshot, ""),
                receipt is not None,
                receipt.machine if receipt else "",
                receipt.made_by if receipt else "",
                receipt.files if receipt else None,
                receipt.bytes if receipt else None,
                receipt.new_bytes if receipt else None,
                receipt.lineage.parent if receipt and receipt.lineage else None,
                work_in.get(snapshot),
            )
        )
    return kept


def list_entries(workspace: Workspace | str, snapshot: str = NEWEST) -> list[ListedEntry]:
    """List every file, directory and link of a snapshot.

    Args:
        workspace: The Workspace block, or its name; home--NAME for what was stored of a home beside
            it.
        snapshot: The snapshot's id, or newest.

    Returns:
        Each entry with `path`, `kind`, `bytes`, `mode` (octal), `uid`, `gid`, `mtime_ns`, and
        `target` of a link.

    Raises:
        SnapshotMissing: There is no such snapshot.
        WrongKey: The snapshot was sealed with another key than the store block has.

    Example:
        Bytes by kind of entry:
        ```python
        from flows import frame, list_entries

        print(frame(list_entries("mywork")).groupby("kind").bytes.sum())
        ```
    """
    opened = open_stored(workspace)
    return list(differences.listed(read_snapshot(opened, snapshot)))


def list_differences(
    workspace: Workspace | str, before: str = PREVIOUS, after: str = NEWEST
) -> SnapshotDiff:
    """List the differences between two snapshots of a workspace.

    Args:
        workspace: The Workspace block, or its name; home--NAME for what was stored of a home beside
            it.
        before: The earlier snapshot's id, or previous for the one right before the later.
        after: The later snapshot's id, or newest.

    Returns:
        In `changes`, each path that was added, removed or changed, or whose metadata was.

    Raises:
        SnapshotMissing: There is no such snapshot, or none before it.
        WrongKey: A snapshot was sealed with another key than the store block has.

    Example:
        What the newest snapshot changed:
        ```python
        from flows import frame, list_differences

        print(frame(list_differences("mywork").changes))
        ```
    """
    opened = open_stored(workspace)
    later = read_snapshot(opened, after)
    earlier = _before(opened, later.snapshot) if before == PREVIOUS else before
    return differences.compare(read_snapshot(opened, earlier), later)


def list_versions(workspace: Workspace | str, pattern: str, snapshot: str = "") -> SearchResult:
    """Find files by their names in all snapshots of a workspace, or in one, with their versions.

    Args:
        workspace: The Workspace block, or its name; home--NAME for what was stored of a home beside
            it.
        pattern: *.bin fits last names, notes/*.txt whole paths or their ends.
        snapshot: The id of the one snapshot to look in, or newest. Empty: all of them.

    Returns:
        In `versions`, each version of each file that fits; in `unread`, the snapshots that could
        not be read, with the reason.

    Raises:
        InvalidInput: The pattern is empty.
        SnapshotMissing: There is no such snapshot.

    Example:
        Every version of the weights:
        ```python
        from flows import frame, list_versions

        print(frame(list_versions("mywork", "*.safetensors").versions))
        ```
    """
    opened = open_stored(workspace)
    unread: list[str] = []
    read = [read_snapshot(opened, snapshot)] if snapshot else _readable(opened, unread)
    versions = differences.find(read, pattern)
    return SearchResult(opened.spec.name, versions, unread)


def read_snapshot(opened: OpenWorkspace, name: str) -> Manifest:
    """The checked manifest of the newest snapshot or the named one."""
    wanted = None if name in ("", NEWEST) else snapshot_id(name)
    found = manifests.find_snapshot(opened.store, opened.spec.name, wanted)
    return manifests.read_manifest(opened.store, found, opened.seal)


def _before(opened: OpenWorkspace, snapshot: SnapshotId) -> SnapshotId:
    ids = manifests.snapshot_ids(opened.store, opened.spec.name)
    earlier = [one for one in ids if one < snapshot]
    if not earlier:
        raise SnapshotMissing(
            f"workspace {opened.spec.name} has no snapshot before {snapshot} in "
            f"{opened.store.address}: there is nothing to compare it with"
        )
    return earlier[-1]


def _readable(opened: OpenWorkspace, unread: list[str]) -> Iterator[Manifest]:
    for snapshot in manifests.snapshot_ids(opened.store, opened.spec.name):
        try:
            yield read_snapshot(opened, snapshot)
        except (ManifestInvalid, SnapshotMissing, WrongKey) as error:
            unread.append(f"{snapshot}: {error}")
