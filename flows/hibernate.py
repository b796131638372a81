"""Hibernate: store a workspace, verify it, and destroy its machine."""

from __future__ import annotations

from collections.abc import Sequence

from blocks import Workspace
from flows.procedures.rounds import rounds
from flows.procedures.save import (
    ANOTHER_ROUND,
    LOSSES_TO_REFUSE_S,
    MAX_ROUNDS,
    Snapshot,
    back_up,
    with_warnings,
)
from tasks.autosave import delete_autosaves
from tasks.flow import flow
from tasks.guards import (
    EndingMachine,
    Guard,
    NoJob,
    NothingBegan,
    NothingLost,
    StaysIdle,
    StaysUnused,
    StillOwner,
    check_guards,
)
from tasks.machines import check_rented, chosen_machine, open_session, rental_of
from tasks.ownership import check_owner
from tasks.programs import NEVER, look_at_programs, prove_freezing
from tasks.questions import is_attended
from tasks.sleep import asleep
from tasks.snapshot import preview_snapshot
from tasks.workspace import OpenWorkspace
from tasks.workspace_blocks import open_workspace, probe_store
from torpor.control.losses import judge_losses
from torpor.control.remote.agent import Agent
from torpor.control.reports import AsleepReport, HibernatePreview, HibernateReport
from torpor.control.safety import boot_clock_s
from torpor.control.store.manifests import read_manifest
from torpor.shared.errors import MachineInUse, WorkspaceAsleep
from torpor.shared.values import Machine


@flow("hibernate")
def hibernate(
    workspace: Workspace | str,
    destroy: bool = True,
    machine: str = "",
    accept_changed: list[str] = [],  # noqa: B006 - a form shows the default; it is never changed
    only_if_idle: bool = False,
    accept_lost: list[str] = [],  # noqa: B006 - as above
    dry_run: bool = False,
    only_if_unused: bool = False,
) -> HibernateReport | AsleepReport | HibernatePreview:
    """Store a workspace, verify it, and destroy its machine.

    The machine is destroyed only if all of the snapshot is in the store with the checksums that the
    machine computed, and the disk has not changed since. What else is on the machine is reported,
    and lost; but what was written in a home beside the workspace is stored as a snapshot of its
    own, or keeps the machine until its loss is accepted.

    Args:
        workspace: The Workspace block to hibernate, or its name.
        destroy: Destroy the machine afterwards. Off: take a snapshot and keep the machine.
        machine: The machine, if the workspace is on several: its id, or user@host:port for a
            machine of your own, which is never destroyed. Empty: the workspace's only machine.
        accept_changed: Patterns of files that may change while they are read, such as *.log.
        only_if_idle: Keep the machine unless it is idle by the idle rules of the workspace, now and
            again right before it is destroyed.
        accept_lost: Directories and files of the machine that may be lost with it, outside of the
            workspace. ~/* accepts whatever was written in a home.
        dry_run: Store and destroy nothing. Say what would be stored and what left behind, which
            programs would be frozen, and what is saved.
        only_if_unused: Keep the machine if anybody is or was logged in to it, or a job or a server
            that is no program of the workspace runs on it, or nobody can say so, now and again
            right before it is destroyed. `reconcile` sets it for a machine that no run has told
            anybody of.

    Returns:
        The verified snapshot, what was stored, and in `destroyed` whether the machine was ended.
        `files` and `bytes` are those of the whole snapshot, and `total_stored_bytes` what it takes
        in the store; `new_bytes` is what was read for it as new, and `stored_bytes` what the store
        took for that. `changed` and `accepted` name files that changed while they were read,
        `lost` what went with the machine, `beside` what was stored of a home. With `dry_run`, what
        would be stored, lost and saved. Of a workspace that sleeps already: its newest snapshot,
        and nothing was to do.

    Raises:
        SnapshotDamaged: The check before the destroy found that the store lacks a part of the
            snapshot, or has it with another checksum. The machine is kept: hibernate again.
        StillChanging: Files changed in every pass, or after the snapshot, and no pattern accepts
            that.
        UnsavedWork: The machine holds work that is in no snapshot, such as files in a home.
        MachineInUse: A job works there, a program began meanwhile, or the machine is not idle or
            not unused and that was asked for.
        WorkspaceInvalid: A directory of the workspace is missing, empty or unreadable.
        HookFailed: The quiesce command ended with an error.
        WorkspaceBusy: Another run holds this workspace on this machine.
        MachineUnfit: `process` is `require`, and a program could not be frozen.
        Recovered: Another control side has recovered the workspace, and owns it.
        EndUnproven: The snapshot is verified, and the market has not proven that the machine ended.
            After every other error torpor has not ended the machine.
        InvalidInput: The workspace is on several machines and `machine` names none, or the machine
            is your own and `destroy` is on.

    Example:
        Hibernate, and print what an hour saves:
        ```python
        from flows import hibernate

        report = hibernate("mywork")
        print(report.snapshot, report.new_bytes, report.saved_usd_h)
        ```
    """
    began_s = boot_clock_s()
    opened = open_workspace(workspace).accepting_losses(accept_changed, accept_lost)
    probe_store(opened)
    if not dry_run:
        check_owner(opened)
    try:
        live = chosen_machine(opened, machine, to_store=True, sweeps=not dry_run)
        if destroy:
            check_rented(live)
        with open_session(opened, live, sleeps=True) as session:
            if dry_run:
                asked = ((StaysIdle, only_if_idle), (StaysUnused, only_if_unused))
                wanted = [guard for guard, is_asked in asked if destroy and is_asked]
                keeps = _works(opened, live, session, wanted)
                return _preview(opened, session, live, keeps, destroys=destroy)
            if not destroy:
                return back_up(opened, session, live)[0]
            guards: list[Guard] = [
                NoJob(opened),
                NothingLost(opened.spec.name, repeated=only_if_idle),
            ]
            if only_if_unused:
                guards.append(StaysUnused(opened, live, session))
            if only_if_idle:
                guards.append(StaysIdle(opened, live, session))
            else:
                guards.append(NothingBegan(opened, session, began_s))
            return hibernate_machine(opened, session, live, guards)
    except WorkspaceAsleep as error:
        return asleep(opened, error)


def _preview(
    opened: OpenWorkspace, session: Agent, machine: Machine, keeps: list[str], *, destroys: bool
) -> HibernatePreview:
    """What a hibernate would store, lose and save. Holds no lock, here or on the machine.
    ``keeps``: why the machine would be kept, as far as that is known."""
    rental = None if machine.label is None else rental_of(opened, machine.label)
    adopted = rental is not None and rental.adopted
    found, since = preview_snapshot(
        session,
        opened.store,
        opened.spec,
        opened.key,
        rented=machine.label is not None and not adopted,
        whole=destroys,
        wait_s=LOSSES_TO_REFUSE_S,
        volumes=() if rental is None else rental.volumes,
    )
    lost = judge_losses(found.losses, opened.spec)
    held = 0
    if since is not None:
        manifest = read_manifest(opened.store, since, opened.seal)
        held = sum(chunk.stored for chunk in manifest.chunks)
    stored_bytes, price = held + found.unread, opened.store_price()
    freezer = NEVER
    if opened.spec.freezes:
        freezer = prove_freezing(opened, session, rental, strict=False, kept=False)
    programs, unfrozen = list[str](), list[str]()
    if opened.spec.programs:
        programs, unfrozen = look_at_programs(opened, session, freezer)
    price_usd_h = machine.price_usd_h
    if rental is not None and rental.adopted:  # the market of an adopted machine may state no price
        price_usd_h = price_usd_h or rental.price_usd_h
    return HibernatePreview(
        workspace=opened.spec.name,
        machine=machine.id,
        destroys=destroys,
        since="" if since is None else since.snapshot,
        files=found.files,
        bytes=found.bytes,
        new_files=found.new_files,
        new_bytes=found.unread,
        skipped=found.skipped,
        stored_bytes=stored_bytes,
        price_usd_h=price_usd_h,
        storage_usd_month=None if price is None else price.usd_month(stored_bytes),
        keeps=[*keeps, *_job(opened, machine), *lost.keep, *unfrozen] if destroys else [],
        yours=lost.user_files,
        lost=lost.lines,
        programs=programs,
    )


def _works(
    opened: OpenWorkspace,
    machine: Machine,
    session: Agent,
    wanted: Sequence[type[StaysIdle | StaysUnused]],
) -> list[str]:
    """Why a hibernate with these guards would keep the machine; empty if it would not."""
    keeps = []
    for guard in wanted:
        try:
            guard(opened, machine, session)
        except MachineInUse as error:
            keeps.append(str(error))
    return keeps


def _job(opened: OpenWorkspace, machine: Machine) -> list[str]:
    """Why a job keeps the machine; empty if none does."""
    try:
        check_guards([NoJob(opened)], EndingMachine(machine))
    except MachineInUse as error:
        return [str(error)]
    return []


def hibernate_machine(
    opened: OpenWorkspace,
    session: Agent,
    machine: Machine,
    guards: Sequence[Guard],
) -> HibernateReport:
    """Store the workspace of a machine, verify it, and destroy the machine if all guards agree. A
    disk that changed after the snapshot begins another round."""
    guards = [*guards, StillOwner(opened)]
    check_guards(guards, EndingMachine(machine))
    home = None if is_attended() else opened.home
    with Snapshot(opened, session, machine, guards, home=home) as snapshot:
        for again in rounds(MAX_ROUNDS, *ANOTHER_ROUND):
            with again:
                # until nothing is new and, after `quiesce`, no program writes
                verified = snapshot.save()
                # the disk is as it was stored, and the guards agree
                warrant = snapshot.confirm(verified)
                snapshot.destroy(opened, warrant)
    return with_warnings(snapshot.report(), delete_autosaves(opened, verified))
