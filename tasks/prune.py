"""The steps of a prune as tasks."""

from __future__ import annotations

from tasks.events import PacksPruned, emit
from tasks.ownership import check_still_owner
from tasks.step import step
from tasks.workspace import OpenWorkspace
from torpor.control.upkeep.presence import NamedBy
from torpor.control.upkeep.prune import Pruned, PrunePlan, PruneRules, carry_out, plan_prune
from torpor.shared.values import SnapshotId


@step("plan prune", says="looking for what no manifest names")
def look_for_dead_packs(opened: OpenWorkspace, rules: PruneRules) -> PrunePlan:
    """Read every manifest and list every pack; return what would be freed. Changes nothing."""
    named = named_by_records(opened)  # read before the manifests are listed
    return plan_prune(opened.store, opened.spec.name, opened.seal, rules, named)


def named_by_records(opened: OpenWorkspace) -> dict[SnapshotId, NamedBy]:
    """The snapshots that are named by open jobs, by open rentals or by the rental that ended
    last."""
    named: dict[SnapshotId, NamedBy] = {}
    last = opened.rentals.last_stored()
    if last is not None and last.snapshot is not None:
        what = f"machine {last.machine}, which was ended for it,"
        named[last.snapshot] = NamedBy(what)
    for rental in opened.rentals.open():
        if rental.snapshot is not None:
            named[rental.snapshot] = NamedBy(f"machine {rental.machine}, which is being ended,")
    for job in opened.jobs.open():
        for snapshot in (*job.kept_saves, job.newest, job.frozen, job.final):
            if snapshot is not None:
                named[snapshot] = NamedBy(f"job {job.id}")
    return named


@step("carry out prune", says="marking and deleting what no manifest names")
def free_dead_packs(opened: OpenWorkspace, plan: PrunePlan) -> Pruned:
    """Mark and delete packs as planned. Safe to repeat after a fault: the repeat does the rest."""
    check_still_owner(opened)  # the plan has taken hours
    pruned = carry_out(opened.store, plan)
    emit(
        PacksPruned(workspace=opened.spec.name, packs=pruned.freed.packs, bytes=pruned.freed.bytes)
    )
    return pruned
