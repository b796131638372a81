"""Create: an empty machine for a workspace that has no snapshot yet."""

from __future__ import annotations

from typing import Annotated

from msgspec.structs import asdict
from pydantic import Field

from blocks import Workspace
from flows.procedures.rented_machine import rented_machine
from tasks.autosave import start_autosave
from tasks.flow import flow
from tasks.hold import workspace_held
from tasks.job_limits import for_job
from tasks.machines import hand_over, make_paths, open_session
from tasks.ownership import check_owner
from tasks.programs import Freezer, prove_freezing, start_programs
from tasks.workspace_blocks import open_workspace, probe_store
from torpor.control.reports import CreateReport
from torpor.shared.values import WantChange


@flow("create")
def create(
    workspace: Workspace | str,
    gpu: str = "",
    regions: list[str] = [],  # noqa: B006 - a form shows the default; it is never changed
    job: str = "",
    max_usd: Annotated[float, Field(ge=0, le=1e6)] = 0.0,
    agreed_usd_h: Annotated[float | None, Field(ge=0)] = None,
) -> CreateReport:
    """Rent an empty machine for a workspace, to log in and work on. The workspace's directories are
    made there.

    Args:
        workspace: The Workspace block that describes the machine, or its name.
        gpu: The GPUs for this machine, in order of preference, as in the Workspace block. Empty:
            those of the block.
        regions: The regions to rent in this time. Empty: those of the block.
        job: The id of the job that begins on the machine next. `watch` hibernates a machine that
            nothing has run on, if that job never began. Empty: it is rented for a person.
        max_usd: What that job may cost. Only a machine that this pays for is rented. 0: no limit
            but the budgets of the workspace.
        agreed_usd_h: What the machine may come to by the hour, in USD, as a person has agreed.
            Empty: nobody was asked, and the limit of the block holds.

    Returns:
        The machine: `id`, `provider`, `price_usd_h`, and `endpoint` with host, port and user. In
        `programs`, how each of the workspace's programs began.

    Raises:
        WorkspaceAwake: The workspace is on a machine already.
        NoOffer: Nothing on sale fits the workspace, or nothing below the price limit.
        BudgetExceeded: A budget, or `max_usd`, cannot pay for an hour of the machine.
        CreateFailed: No market rented a machine that could be reached; what was rented is ended.
        CreateUncertain: A market's answer was lost. `reconcile` shows whether a machine exists.
        ProviderDenied: A market refused the key, its permissions or the balance.
        MachineUnfit: `process` is `require`, and the machine can freeze no programs.
        Recovered: Another control side has recovered the workspace, and owns it.

    Example:
        Rent a machine with an L40S:
        ```python
        from flows import create

        machine = create("mywork", gpu="L40S")
        print(machine.id, machine.price_usd_h, machine.endpoint)
        ```
    """
    change = WantChange(gpu=gpu.strip(), regions=regions, agreed_usd_h=agreed_usd_h)
    opened = for_job(open_workspace(workspace).wanting(change), job, max_usd).freezing
    probe_store(opened)
    check_owner(opened)
    spec, freezer = opened.spec, Freezer()
    programs: list[str] = []
    with (
        rented_machine(opened) as tenancy,
        open_session(opened, tenancy.machine) as session,
    ):
        # without the lock, the machine looks as if a killed run had left it
        with workspace_held(opened, session):
            make_paths(opened, session)
            if spec.freezes:
                freezer = prove_freezing(opened, session, tenancy.rental)
            hand_over(tenancy, alone=True, starting=bool(spec.programs))
        if spec.programs:
            programs = start_programs(opened, session, tenancy, freezer)
        start_autosave(opened, session, tenancy.machine)
    return CreateReport(**asdict(tenancy.machine), programs=programs)
