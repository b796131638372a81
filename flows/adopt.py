"""Adopt: take over a machine that the user rents already, or give it up again."""

from __future__ import annotations

from contextlib import suppress

import msgspec

from blocks import Workspace
from flows.procedures.save import LOSSES_TO_REFUSE_S
from tasks.adoption import (
    Adoptable,
    end_saves,
    find_adoptable,
    fingerprint,
    give_up,
    log_in_to_adopt,
    mark_adopted,
    record_adoption,
)
from tasks.autosave import start_autosave
from tasks.flow import flow
from tasks.jobs import check_no_job
from tasks.ownership import check_owner
from tasks.runner import runner
from tasks.snapshot import begin_snapshot, look_for_losses, look_for_new
from tasks.workspace import OpenWorkspace
from tasks.workspace_blocks import open_workspace, probe_store
from torpor.control.losses import judge_losses
from torpor.control.remote.agent import Agent
from torpor.control.remote.snapshot import RemoteSnapshot
from torpor.control.rental.adoption import AdoptReport
from torpor.control.store.manifests import newest_snapshot
from torpor.shared.errors import TorporError


@flow("adopt")
def adopt(
    workspace: Workspace | str,
    machine: str = "",
    price_usd_h: float = 0.0,
    host_key: str = "",
    dry_run: bool = True,
    release: bool = False,
) -> AdoptReport:
    """Take over a machine that you rent already: from then on torpor may store it, prove that, and
    DESTROY it, as it does with a machine that it rented itself.

    Without `dry_run`, the machine is recorded and marked. Only a verified snapshot ever ends it.

    Args:
        workspace: The Workspace block that the machine is to hold, or its name.
        machine: The market or the provider block, and the machine's id there: vast:12345, or
            vast-provider/mine:12345. It must run, let root log in with the workspace's SSH
            identity, and have all directories of the workspace.
        price_usd_h: What it costs, in dollars an hour. EC2, GCP and HOSTKEY do not state it.
        host_key: The only host key that it may show, as a line of OpenSSH. Empty: the key of the
            first login is pinned.
        dry_run: Only look, and report what is in the workspace and what would be lost. Off: adopt.
        release: Give up the workspace's adopted machine instead: its mark and its record go, and
            the machine runs on. `machine` may stay empty.

    Returns:
        What was looked at: its state ("can be adopted", "adopted", "can be given up", "given up" or
        "not adopted"), the host key, the bytes of the workspace there, and in `outside` what would
        be lost with the machine.

    Raises:
        WorkspaceAwake: The workspace is on another machine already.
        WorkspaceInvalid: A directory of the workspace is missing or empty on the machine.
        HostKeyChanged: The machine shows another key than `host_key`, or than the one on record.
        NotOurs: The account has no such machine, or torpor rents it already.
        UnsafeDestroy: The machine is not running, so torpor cannot look at it.
        MachineDenied: root cannot log in with the workspace's SSH identity.
        InvalidInput: No provider block is for it, or its market states no price.
        Recovered: Another control side has recovered the workspace, and owns it.

    Example:
        Look first, then adopt:
        ```python
        from flows import adopt

        print(adopt("mywork", "vast:12345").rows())
        adopt("mywork", "vast:12345", dry_run=False)
        ```
    """
    opened = open_workspace(workspace)
    probe_store(opened)
    if not dry_run:
        check_owner(opened)
    if release:
        return _released(opened, machine, dry_run)
    found = find_adoptable(opened, machine, price_usd_h)
    session, shown = log_in_to_adopt(opened, found, host_key)
    with session:
        size, outside = _look_around(opened, session)
        if not dry_run:
            # recorded first, so that a kill afterwards leaves no unknown machine
            rental = record_adoption(opened, found, shown)
            mark_adopted(found.provider, found.machine, rental.label)
            adopted = msgspec.structs.replace(found.machine, label=rental.label)
            runner().log.info("machine %s is adopted: rental %s", adopted.id, rental.label.rental)
            start_autosave(opened, session, adopted)
    return AdoptReport(
        workspace=opened.spec.name,
        machine=found.machine.id,
        provider=found.machine.provider,
        state="can be adopted" if dry_run else "adopted",
        price_usd_h=found.price_usd_h,
        host_key=shown,
        fingerprint=fingerprint(shown),
        paths=opened.spec.paths,
        bytes=size,
        outside=outside,
        warnings=_warnings(opened, found, host_key),
    )


def _look_around(opened: OpenWorkspace, session: Agent) -> tuple[int, list[str]]:
    """The bytes that a snapshot would store now, and what it would lack. WorkspaceInvalid where a
    directory of the workspace is missing or empty: its snapshot would prove nothing."""
    remote = RemoteSnapshot(session, opened.store, opened.spec, opened.key, runner().run)
    begin_snapshot(remote)
    try:
        seen = look_for_new(remote)
        losses = look_for_losses(remote, rented=False, whole=True, wait_s=LOSSES_TO_REFUSE_S)
    finally:
        with suppress(TorporError):  # an agent that cannot be reached ends the run by itself
            remote.end(committed=False)
    lost = judge_losses(losses, opened.spec)
    return seen.unread, lost.lines


def _warnings(opened: OpenWorkspace, found: Adoptable, host_key: str) -> list[str]:
    warnings = []
    if not host_key and found.rental is None:
        warnings.append("the host key is that of the first login: compare it with the machine's")
    newest = newest_snapshot(opened.store, opened.spec.name)
    if newest is not None and found.rental is None:
        warnings.append(
            f"the workspace has snapshot {newest}, which this machine was not woken from: the next "
            "one is of this machine alone"
        )
    if found.provider.abilities.adopts == "by record":
        warnings.append(
            "this market cannot be told that the machine is torpor's: only the records in this "
            "store say so. Another installation of torpor with this account does not see it"
        )
    return warnings


def _released(opened: OpenWorkspace, machine: str, dry_run: bool) -> AdoptReport:
    mine = [rental for rental in opened.rentals.open() if rental.adopted]
    if machine:
        wanted = machine.strip().rpartition(":")[2]
        mine = [rental for rental in mine if rental.machine == wanted]
    for rental in mine:
        check_no_job(opened, rental.machine)  # the job's driver would hand the machine another book
    warnings: list[str] = []
    for rental in mine if not dry_run else ():
        # before the mark is taken off: without it, torpor may not log in
        warnings += end_saves(opened, rental)
        give_up(opened, rental)
    done = "can be given up" if dry_run else "given up"
    return AdoptReport(
        workspace=opened.spec.name,
        machine=", ".join(str(rental.machine) for rental in mine),
        provider=", ".join(rental.provider for rental in mine),
        state=done if mine else "not adopted",
        warnings=warnings,
    )
