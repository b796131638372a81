"""The steps of a prune as tasks."""

from __future__ import annotations

from tasks.events import PacksPruned, emit
from tasks.step import step
from tasks.workspace import OpenWorkspace
from torpor.control.upkeep.prune import Pruned, PrunePlan, PruneRules, carry_out, plan_prune


@step("plan prune")
def look_for_dead_packs(opened: OpenWorkspace, rules: PruneRules) -> PrunePlan:
    """Read every manifest and list every pack; return what would be freed. Changes nothing."""
    return plan_prune(opened.store, opened.spec.name, opened.seal, rules)


@step("carry out prune")
def free_dead_packs(opened: OpenWorkspace, plan: PrunePlan) -> Pruned:
    """Mark and delete as planned; a repeat after a fault does the rest."""
    pruned = carry_out(opened.store, plan)
    emit(
        PacksPruned(workspace=opened.spec.name, packs=pruned.freed.packs, bytes=pruned.freed.bytes)
    )
    return pruned
