"""Create: an empty machine for a workspace that has no snapshot yet."""

from __future__ import annotations

from blocks import Workspace
from flows.flow import flow
from flows.tenancy import rented
from tasks.machines import find_offers, take_lease
from tasks.opening import open_workspace, probe_store
from torpor.shared.values import Machine


@flow("create")
def create(workspace: Workspace | str) -> Machine:
    """Rent an empty machine for a workspace, to log in and work on.

    Args:
        workspace: The Workspace block that describes the machine, or its name.
    """
    opened = open_workspace(workspace)
    probe_store(opened)
    offers = find_offers(opened)
    lease, fresh = take_lease(opened)
    with rented(opened, offers, lease, fresh) as tenancy:
        tenancy.hand_over()
    return tenancy.machine
