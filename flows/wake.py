"""Wake: restore a snapshot on a machine."""

from __future__ import annotations

from typing import Annotated

from msgspec.structs import replace
from pydantic import Field

from blocks import Workspace
from flows.procedures.offers import offers_for
from flows.procedures.rented_machine import own_or_rented_machine
from flows.procedures.restore import restore_all, restore_run_before_handover
from flows.procedures.rounds import rounds
from tasks.autosave import start_autosave
from tasks.budgets import what_is_left
from tasks.flow import flow
from tasks.job_limits import for_job
from tasks.machines import hand_over, make_paths, open_session
from tasks.ownership import check_owner
from tasks.packages import put_packages_back
from tasks.programs import OWN_MACHINE, Freezer, prove_freezing, start_programs
from tasks.restore import (
    NEWEST,
    check_still_newest,
    new_restore,
    pick_snapshot_to_wake,
    woken,
)
from tasks.workspace import OpenWorkspace
from tasks.workspace_blocks import open_workspace, probe_store
from torpor.control.compare.offers import OffersReport
from torpor.control.reports import WakeReport
from torpor.control.store.manifests import snapshot_ids
from torpor.shared.errors import InvalidInput, RestoreUnfinished
from torpor.shared.values import WantChange


@flow("wake")
def wake(
    workspace: Workspace | str,
    snapshot: str = NEWEST,
    machine: str = "",
    full_check: bool = True,
    accept_paths: list[str] = [],  # noqa: B006 - a form shows the default; it is never changed
    dry_run: bool = False,
    gpu: str = "",
    regions: list[str] = [],  # noqa: B006
    job: str = "",
    max_usd: Annotated[float, Field(ge=0, le=1e6)] = 0.0,
    agreed_usd_h: Annotated[float | None, Field(ge=0)] = None,
) -> WakeReport | OffersReport:
    """Restore a workspace on a new machine, byte for byte.

    A wake that fails destroys the machine that it created. The snapshot is only read. Where the
    block says that `environment` is keep, packages of apt and pip that were added outside of the
    workspace are put back on a rented machine; one that cannot be fails no wake.

    Args:
        workspace: The Workspace block to wake, or its name.
        snapshot: The snapshot's id, or newest.
        machine: user@host:port of a machine of your own to wake on. Empty: rent one.
        full_check: Read and hash every restored byte at the end, not names and attributes only.
        accept_paths: Directories of the snapshot that are not among the workspace's paths, to
            restore all the same. Without them such a snapshot is refused.
        dry_run: Show what would be rented and what it costs, and rent nothing.
        gpu: The GPUs for this wake, in order of preference, as in the Workspace block. Empty: those
            of the block.
        regions: The regions to rent in this time. Empty: those of the block.
        job: The id of the job that begins on the machine next. `watch` hibernates a machine that
            nothing has run on, if that job never began. Empty: it is rented for a person.
        max_usd: What that job may cost. Only a machine that this pays for is rented. 0: no limit
            but the budgets of the workspace.
        agreed_usd_h: What the machine may come to by the hour, in USD, as a person has agreed.
            Empty: nobody was asked, and the limit of the block holds.

    Returns:
        The machine with `host`, `port` and `user`, its price, and how the restored bytes were
        checked; `packages` says which came back and which did not. With `dry_run`, the offers that
        fit and those that were refused.

    Raises:
        WorkspaceAwake: The workspace is on a machine already.
        NoOffer: Nothing on sale fits the workspace, or nothing below the price limit.
        BudgetExceeded: A budget, or `max_usd`, cannot pay for an hour of the machine.
        CreateFailed: No market rented a machine that could be reached; what was rented is ended.
        SnapshotMissing: The workspace has no snapshot, or none of that id.
        SnapshotDamaged: A restored byte differs from the snapshot, or the store lacks a pack.
        OtherPaths: The snapshot names directories that the workspace does not have.
        WrongKey: The snapshot was sealed with another key than the store block has.
        DiskFull: The machine has no room for the snapshot.
        MachineUnfit: The machine's disk cannot hold a file, or `process` is `require` and the
            machine can freeze no programs.
        Recovered: Another control side has recovered the workspace, and owns it.

    Example:
        Wake, and print how to log in, once `torpor ssh --setup` has been run:
        ```python
        from flows import wake

        report = wake("mywork")
        print(f"ssh {report.workspace}", report.price_usd_h)
        ```
    """
    change = WantChange(gpu=gpu.strip(), regions=regions, agreed_usd_h=agreed_usd_h)
    if machine and (change != WantChange() or job):
        raise InvalidInput(
            f"a wake on {machine} rents nothing: leave `gpu`, `regions`, `agreed_usd_h` and `job` "
            "empty, or `machine`"
        )
    opened = open_workspace(workspace).accepting(accept_paths).wanting(change)
    opened = for_job(opened, job, max_usd)
    probe_store(opened)
    if dry_run:
        return _offers(opened, snapshot, machine)
    check_owner(opened)
    return wake_workspace(opened, snapshot, machine, full_check)


def _offers(opened: OpenWorkspace, snapshot: str, own: str) -> OffersReport:
    if own:
        raise InvalidInput(f"a wake on {own} rents nothing: leave `machine` empty for a dry run")
    return offers_for(opened.freezing, snapshot)


def wake_workspace(
    opened: OpenWorkspace,
    snapshot: str = NEWEST,
    own: str = "",
    full_check: bool = True,
) -> WakeReport:
    """Restore a snapshot on the user's ``own`` machine, or on a rented one. A machine that a killed
    run left is continued; if that run restored another snapshot, it is destroyed, and a second
    round rents another one."""
    before = snapshot_ids(opened.store, opened.spec.name)
    wanted, opened = pick_snapshot_to_wake(opened.freezing, snapshot)
    # the programs may still run on another machine of the user's
    freezes = opened.spec.freezes and not own
    for again in rounds(1 if own else 2, RestoreUnfinished):
        with (
            again,
            # the rented machine is destroyed after an error
            own_or_rented_machine(opened, own) as tenancy,
            open_session(opened, tenancy.machine) as session,
            restore_run_before_handover(
                new_restore(opened, session, wanted, wakes=True), tenancy
            ) as restore,
        ):
            if snapshot in ("", NEWEST):
                check_still_newest(opened, before)
            freezer = OWN_MACHINE if own else Freezer()
            if freezes:
                freezer = prove_freezing(opened, session, tenancy.rental)
            restore_all(restore, "wake", tenancy.machine, full_check=full_check)
            packages = put_packages_back(opened, restore, rented=not own)
            if not own:  # a machine that packages have cut off is not handed over
                make_paths(opened, session)
            programs: list[str] = []
            starting = bool(opened.spec.programs)
            hand_over(tenancy, restore.plan, alone=True, starting=starting)
            if starting:
                programs = start_programs(opened, session, tenancy, freezer)
            start_autosave(opened, session, tenancy.machine)
    report = woken(opened, tenancy.machine, restore, full_check)
    budgets = [] if own else what_is_left(opened)
    return replace(
        report, budgets=budgets, programs=programs, packages=packages, chosen=tenancy.chosen
    )
