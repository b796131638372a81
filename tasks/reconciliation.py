"""The steps of reconcile: compare the providers' machines with the rentals, and end unfinished
ones.
"""

from __future__ import annotations

from tasks.machines import open_session, renter
from tasks.market_look import listed, look_at_markets
from tasks.runner import runner
from tasks.step import step
from tasks.workspace import OpenWorkspace
from torpor.control.reconciliation import Finding
from torpor.control.rental.ending import end_machine
from torpor.control.rental.greeting import greeting_fault, jump_fault
from torpor.control.rental.records import Rental
from torpor.control.store.records import Unread
from torpor.control.store.shared_listings import SharedListings
from torpor.shared.errors import (
    InvalidInput,
    MachineError,
    MachineUnreachable,
    MachineUnread,
    UnsafeDestroy,
)
from torpor.shared.values import Machine


@step("compare with rentals")
def compare_with_rentals(opened: OpenWorkspace) -> tuple[list[Finding], Unread]:
    """Read the machines at all provider blocks, and the rentals of the workspace, under all of its
    names; and the records that cannot be trusted. Changes nothing. A provider of the workspace that
    does not answer is an error, and so is its store; another one is left out with a warning.
    """
    seen = look_at_markets([opened], opened.markets.every(), SharedListings())
    own = {provider.identity for provider in opened.providers}
    for identity, error in (*seen.silent_before.items(), *seen.silent.items()):
        left_out = not isinstance(error, MachineUnread)
        if left_out and identity in own:
            raise error
        runner().log.warning("%s%s: %s", identity, " was left out" if left_out else "", error)
    for error in seen.away.values():
        raise error
    return seen.findings, seen.refused.get(opened.spec.name, Unread())


def check_all_answer(opened: OpenWorkspace) -> None:
    """InvalidInput while a provider is silent: a machine whose account has another name by now may
    be there."""
    _, silent = listed(opened.markets.every())
    for identity, error in silent.items():
        raise InvalidInput(
            f"{identity} did not answer ({error}), so nobody can say which machines are gone: "
            "nothing was closed. Run reconcile again"
        )


def check_silent(opened: OpenWorkspace, machine: Machine) -> None:
    """Raises UnsafeDestroy if the machine is starting or if anything answers SSH: only its agent
    knows who works or restores there, and a wake asks the agent."""
    live = opened.markets.of(machine.provider).find(machine.id)
    machine = live if isinstance(live, Machine) else machine
    if machine.state == "starting":
        raise UnsafeDestroy(
            f"machine {machine.id} is starting, so a run may be about to use it: nothing was "
            "ended. Run reconcile again in a few minutes"
        )
    try:
        with open_session(opened, machine):
            says = "its agent"
    except MachineError as error:
        if isinstance(error, MachineUnreachable):
            silence = _silence(opened, machine)
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
def end_unfinished(opened: OpenWorkspace, machine: Machine, rental: Rental) -> None:
    """Destroy one machine, if its rental says that it was never handed over, and wait until its end
    is proven."""
    end_machine(renter(opened.under(rental.label.workspace)), rental, None, machine)


@step("close rental")
def close_rental(opened: OpenWorkspace, rental: Rental) -> None:
    """Close the rental of a machine that its user says is gone. Destroys nothing."""
    why = "its user told reconcile that the machine is gone"
    opened.under(rental.label.workspace).rentals.change(rental, state="ended", why=why)


def _silence(opened: OpenWorkspace, machine: Machine) -> str:
    """The error if no SSH server greets; empty if one does. UnsafeDestroy where the fault may be
    that of the jump host."""
    if machine.endpoint is None:
        return f"it is {machine.state} and has no address"
    identity = opened.identity.load()
    if fault := jump_fault(machine.endpoint, identity):
        raise UnsafeDestroy(
            f"the jump host before machine {machine.id} lets nobody through ({fault}), so the "
            "machine may hold a restored workspace or work: nothing was ended. Run reconcile again "
            "later"
        )
    return greeting_fault(machine.endpoint, None, identity) or ""
