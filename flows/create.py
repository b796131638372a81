"""Create: an empty machine for a workspace that has no snapshot yet."""

from __future__ import annotations

from prefect import flow

from blocks import Workspace
from tasks.machines import create_machine, destroy_created, find_offers, hand_over, take_lease
from tasks.place import open_place, probe_store
from torpor.values import Machine


@flow(name="create", persist_result=False)
def create(workspace: Workspace | str) -> Machine:
    """Rent a machine for a workspace; log in, work there, and hibernate it later.

    Args:
        workspace: The Workspace block that says what machine, or its name.
    """
    place = open_place(workspace)
    probe_store(place)
    offers = find_offers(place)
    lease, fresh = take_lease(place)
    try:
        machine = create_machine(place, offers, lease, fresh)
    except BaseException:
        if fresh:  # one that an earlier run left may hold what that run restored
            destroy_created(place, lease)
        raise
    hand_over(place, lease, machine)
    return machine
