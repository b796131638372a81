"""Prune: mark what no snapshot names, and delete it a grace time later."""

from __future__ import annotations

from typing import Annotated

from msgspec.structs import replace
from pydantic import Field

from blocks import Workspace
from tasks.flow import flow
from tasks.ownership import check_owner
from tasks.prune import free_dead_packs, look_for_dead_packs
from tasks.runner import runner
from tasks.workspace import OpenWorkspace
from tasks.workspace_blocks import kept_of_home, open_stored, probe_store
from torpor.control.store.manifests import snapshot_ids
from torpor.control.store.marks import SHORTEST_GRACE_S
from torpor.control.upkeep.prune import PruneRules
from torpor.control.upkeep.prune_report import PruneReport
from torpor.shared.values import GIB


@flow("prune")
def prune(
    workspace: Workspace | str,
    dry_run: bool = True,
    grace_hours: Annotated[float, Field(ge=SHORTEST_GRACE_S / 3600, le=24 * 366)] = 24.0,
    rewrite_gib: Annotated[float, Field(ge=0, le=1024)] = 1.0,
    without_snapshots: bool = False,
) -> PruneReport:
    """Delete stored data that no snapshot uses, a grace time after an earlier prune marked it.

    Safe at any time, also beside running snapshots. A killed prune does no harm. It reports what it
    will free before it frees anything. A snapshot that cannot be read stops it. What was stored of
    a home beside the workspace is pruned with it.

    Args:
        workspace: The Workspace block to prune, or its name.
        dry_run: Report what would be freed, and change nothing. Switch it off to free it.
        grace_hours: The hours from a pack's mark to its deletion. Until then a deleted snapshot can
            be put back. Packs that were stored in the last three days are not marked yet.
        rewrite_gib: Also free packs of which snapshots use less than a quarter. The next snapshots
            store what they still use of such packs once more, up to this many GiB for all packs
            together; then a later prune frees them. 0 leaves such packs alone.
        without_snapshots: Also prune a workspace that has no snapshot left. All its packs are then
            marked, and a later prune frees them.

    Returns:
        In `to_free` what this prune frees, in `waiting` what it has marked and may free later, and
        in `freed` what is gone; `freed` is None after a dry run.

    Raises:
        SnapshotMissing: The workspace has no snapshot, or one is gone that nobody deleted.
        ManifestInvalid: A snapshot cannot be read. Nothing was freed.
        WrongKey: A snapshot was sealed with another key than the store block has.
        InvalidInput: `grace_hours` is too short for snapshots that are being taken.
        Recovered: Another control side has recovered the workspace, and owns it.

    Example:
        Free what an earlier prune has marked at least a day ago, and mark what no snapshot names
        now. To free what has just been deleted, call it now, and once more a day later:
        ```python
        from flows import prune

        print(prune("mywork", dry_run=False).rows())
        ```
    """
    opened = open_stored(workspace)
    probe_store(opened)
    if not dry_run:
        check_owner(opened)
    rules = PruneRules(
        grace_s=grace_hours * 3600,
        rewrite_bytes=int(rewrite_gib * GIB),
        without_snapshots=without_snapshots,
    )
    report = _prune(opened, rules, dry_run=dry_run)
    home = kept_of_home(opened)
    if home is None:
        return report
    if without_snapshots or snapshot_ids(home.store, home.spec.name):
        return replace(report, home=_prune(home, rules, dry_run=dry_run))
    runner().log.warning(
        "what was stored of a home beside workspace %s has no snapshot left, and its packs stay: "
        "prune with `without_snapshots` frees them",
        opened.spec.name,
    )
    return report


def _prune(opened: OpenWorkspace, rules: PruneRules, *, dry_run: bool) -> PruneReport:
    plan = look_for_dead_packs(opened, rules)
    report = PruneReport.of_plan(plan)
    for row in report.rows():
        runner().log.info("%s: %s: %s", opened.spec.name, row["what"], row["value"])
    return report if dry_run else PruneReport.of_prune(free_dead_packs(opened, plan))
