"""Create: an empty machine for a workspace that has no snapshot yet."""

from __future__ import annotations

from blocks import Workspace
from flows.procedures.rented_machine import rented_machine
from tasks.autosave import start_autosave
from tasks.flow import flow
from tasks.machines import hand_over, open_session
from tasks.programs import start_programs
from tasks.workspace_blocks import open_workspace, probe_store
from torpor.shared.values import Machine


@flow("create")
def create(workspace: Workspace | str) -> Machine:
    """Rent an empty machine for a workspace, to log in and work on.

    Args:
        workspace: The Workspace block that describes the machine, or its name.
    """
    opened = open_workspace(workspace)
    probe_store(opened)
    with rented_machine(opened) as tenancy:
        if opened.spec.programs:
            with open_session(opened, tenancy.machine) as session:
                start_programs(opened, session, tenancy)
        hand_over(tenancy, alone=True)
    if opened.spec.save_minutes:
        with open_session(opened, tenancy.machine) as session:
            start_autosave(opened, session, tenancy.machine)
    return tenancy.machine
