"""Create: an empty machine for a workspace that has no snapshot yet."""

from __future__ import annotations

from prefect import flow

from blocks import Workspace
from flows.tenancy import rented
from tasks.machines import find_offers, take_lease
from tasks.place import open_place, probe_store
from torpor.shared.values import Machine


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
    with rented(place, offers, lease, fresh) as tenancy:
        tenancy.hand_over()
    return tenancy.machine
