"""The steps of reconcile: compare a provider's machines with the leases, and end unfinished
ones.
"""

from __future__ import annotations

from tasks.machines import destroy_until_gone, endpoint_of, open_session
from tasks.runner import runner
from tasks.step import step
from tasks.workspace import OpenWorkspace
from torpor.control.ledger import Lease
from torpor.control.measure.scratch import machines_name
from torpor.control.providers.seam import Absent
from torpor.control.providers.waiting import ssh_banner_fault
from torpor.control.reconciliation import Finding, compare
from torpor.control.safety import never_handed_over
from torpor.shared.errors import MachineError, MachineUnreachable, UnsafeDestroy
from torpor.shared.values import DRILL, Machine, reserved_name


@step("compare with leases")
def compare_with_leases(opened: OpenWorkspace) -> list[Finding]:
    """Read the provider's machines and the leases of the workspace, its benchmarks and drills.
    Changes nothing."""
    name = opened.spec.name
    workspaces = [name, machines_name(name), reserved_name(DRILL, name)]
    before = opened.provider.list_own()
    leases = [lease for one in workspaces for lease in opened.under(one).ledger.leases()]
    after = opened.provider.list_own()
    found = compare(opened.provider.identity, workspaces, leases, before, after)
    return [finding for finding in found if not _just_ended(opened, finding)]


def see_that_it_does_not_answer(opened: OpenWorkspace, machine: Machine) -> None:
    """Raises UnsafeDestroy if the machine is starting or if anything answers SSH: only its agent
    knows who works or restores there, and a wake asks the agent."""
    live = opened.provider.find(machine.id)
    machine = machine if isinstance(live, Absent) else live
    if machine.state == "starting":
        raise UnsafeDestroy(
            f"machine {machine.id} is starting, so a run may be about to use it: nothing was "
            "ended. Run reconcile again in a few minutes"
        )
    try:
        with open_session(opened, endpoint_of(machine)):
            says = "its agent"
    except MachineError as error:
        if isinstance(error, MachineUnreachable):
            silence = _silence(machine)
            if silence:
                runner().log.info("machine %s does not answer: %s", machine.id, silence)
                return
        says = str(error)
    raise UnsafeDestroy(
        f"machine {machine.id} answers ({says}), so it may hold a restored workspace or work: "
        "nothing was ended. Run wake or replicate, which continues with it, and then hibernate; "
        "if they fail, use the provider's console"
    )


@step("end unfinished machine")
def end_unfinished(opened: OpenWorkspace, machine: Machine, lease: Lease) -> None:
    """Destroy this one machine, until it is gone, if its lease says that it was never handed over.

    The lease stays for the next run, which may be using it by now.
    """
    ledger = opened.under(lease.label.workspace).ledger

    def ask() -> None:
        ledger.see_unclaimed(lease.label)

    destroy_until_gone(opened, machine, never_handed_over(machine, lease.label, ask))


def _silence(machine: Machine) -> str:
    """The error if no SSH server greets; empty if one does."""
    if machine.endpoint is None:
        return f"it is {machine.state} and has no address"
    return ssh_banner_fault(machine.endpoint) or ""


def _just_ended(opened: OpenWorkspace, finding: Finding) -> bool:
    """The machine looks lost, but its lease is closed by now: a hibernate has just ended it."""
    lease = finding.lease if finding.kind == "lost" else None
    return lease is not None and opened.ledger.lease_of(lease.label) is None
