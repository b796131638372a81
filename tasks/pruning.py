"""The steps of a prune as tasks."""

from __future__ import annotations

from prefect import task

from tasks.events import PacksPruned, emit
from tasks.place import Place
from tasks.retrying import STEP
from torpor.control.upkeep.prune import Pruned, PrunePlan, PruneRules, carry_out, plan_prune


@task(name="plan prune", **STEP)
def look_for_dead_packs(place: Place, rules: PruneRules) -> PrunePlan:
    """Read every manifest and list every pack; says what would be freed. Changes nothing."""
    return plan_prune(place.store, place.spec.name, place.seal, rules)


@task(name="carry out prune", **STEP)
def free_dead_packs(place: Place, plan: PrunePlan) -> Pruned:
    """Mark and delete what the plan says; again after a fault, it does what is left to do."""
    pruned = carry_out(place.store, plan)
    emit(PacksPruned(workspace=place.spec.name, packs=pruned.freed.packs, bytes=pruned.freed.bytes))
    return pruned
