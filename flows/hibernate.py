"""Hibernate: store a workspace, verify it, and destroy its machine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import msgspec

from blocks import Workspace
from flows.procedures.phases import Phases
from flows.procedures.snapshot import Look, Storing
from tasks.flow import flow
from tasks.jobs import refuse_during_job
from tasks.machines import chosen_machine, destroy_machine, open_session
from tasks.opening import open_workspace, probe_store
from tasks.runner import runner
from tasks.snapshot import confirm, refuse_losses, tell_of_losses
from tasks.watching import see_idle, see_nothing_began
from tasks.workspace import OpenWorkspace
from torpor.control.losses import Lost
from torpor.control.remote.snapshot import RemoteSnapshot
from torpor.control.reports import HibernateReport
from torpor.control.safety import Verified, boot_clock_s
from torpor.shared.errors import InvalidInput
from torpor.shared.values import Machine


@flow("hibernate")
def hibernate(
    workspace: Workspace | str,
    destroy: bool = True,
    machine: str = "",
    accept_changed: list[str] = [],  # noqa: B006 - a form shows the default; it is never changed
    only_if_idle: bool = False,
    accept_lost: list[str] = [],  # noqa: B006 - as above
) -> HibernateReport:
    """Store a workspace, verify it, and destroy its machine.

    The machine is destroyed only if every byte is in the store, was read back and compared, and the
    disk has not changed since. What else is on the machine is reported, and lost.

    Args:
        workspace: The Workspace block to hibernate, or its name.
        destroy: Destroy the machine afterwards. Off: take a snapshot and keep the machine.
        machine: The machine, if the workspace is on several: its id, or user@host:port for a
            machine of your own, which is never destroyed. Empty: the workspace's only machine.
        accept_changed: Patterns of files that may change while they are read, such as *.log.
        only_if_idle: Keep the machine unless it is idle by the rules of the Workspace block, now
            and again right before it is destroyed.
        accept_lost: Directories of the machine that may be lost with it, outside of the workspace.
    """
    phases = Phases()
    with phases.phase("prepare"):
        opened = open_workspace(workspace)
        if destroy:
            refuse_during_job(opened)
    report, _ = store_workspace(
        opened,
        phases,
        destroy,
        machine,
        accept_changed,
        only_if_idle,
        unused=lambda _: refuse_during_job(opened),
        accept_lost=accept_lost,
    )
    runner().table(
        key=f"hibernate-{report.workspace}",
        rows=report.rows(),
        description=f"Workspace {report.workspace} hibernated as {report.snapshot}",
    )
    return report


def store_workspace(
    opened: OpenWorkspace,
    phases: Phases,
    destroy: bool = False,
    machine: str = "",
    accept_changed: Sequence[str] = (),
    only_if_idle: bool = False,
    run: str = "",
    proven: Callable[[Verified], None] = lambda verified: None,
    unused: Callable[[Machine], None] = lambda machine: None,
    accept_lost: Sequence[str] = (),
) -> tuple[HibernateReport, Verified]:
    """Store the workspace as part of any flow; a backup continues with the proof. ``proven`` is
    called before the last walk of the disk, and ``unused`` right before each destroy. Both may
    raise to keep the machine.

    Raises UnsavedWork, after ``proven``, if the machine holds data that the user wants kept and
    that is not in the snapshot."""
    with phases.phase("prepare"):
        patterns = [*opened.spec.accept_changed, *accept_changed]
        lost = [*opened.spec.accept_lost, *accept_lost]
        spec = msgspec.structs.replace(opened.spec, accept_changed=patterns, accept_lost=lost)
        opened = replace(opened, spec=spec)
        probe_store(opened)
        live = chosen_machine(opened, machine, to_store=True)
        if destroy and live.label is None:
            raise InvalidInput(
                f"{machine} is your own machine, which torpor never destroys: turn `destroy` off"
            )
        began_s = boot_clock_s()
        session = open_session(opened, live)

    def still_idle() -> None:
        if idle_since_s is not None:
            see_idle(opened, live, session, idle_since_s)

    def nothing_new(lost: Lost) -> None:
        if only_if_idle and destroy:  # `watch` asks again and again: one snapshot is enough
            refuse_losses(live, lost, "Nothing is new since the last snapshot")

    def end(snapshot: RemoteSnapshot, verified: Verified, lost: Lost) -> None:
        proven(verified)
        refuse_losses(live, lost, f"Snapshot {verified.snapshot} is verified")
        with phases.phase("confirm"):
            warrant = confirm(opened, snapshot, verified, live, session, partial(unused, live))
            still_idle()
            if not only_if_idle:  # whose rules say more
                see_nothing_began(opened, live, session, boot_clock_s() - began_s)
        with phases.phase("destroy"):
            destroy_machine(opened, live, warrant)

    with session:
        idle_since_s = see_idle(opened, live, session, None) if only_if_idle else None
        report, verified = Storing(
            opened,
            session,
            live.id,
            phases,
            end if destroy else None,
            still_idle,
            run,
            look=Look(rented=live.label is not None, whole=destroy),
            nothing_new=nothing_new,
        ).run()
    if not destroy:
        tell_of_losses(live, report.lost)
    else:
        report = msgspec.structs.replace(report, destroyed=True, saved_usd_h=live.price_usd_h)
    return report, verified
