"""The steps of reconcile: compare the providers' machines with the rentals, and end unfinished
ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TypeAlias

from tasks.machines import open_session, renter
from tasks.runner import runner
from tasks.step import step
from tasks.workspace import OpenWorkspace
from torpor.control.providers.seam import Provider, Residue
from torpor.control.reconciliation import Finding, compare
from torpor.control.rental.ending import end
from torpor.control.rental.greeting import greeting_fault, jump_fault
from torpor.control.rental.markets import ask_all, recall
from torpor.control.rental.records import Rental, rental_named
from torpor.control.store.records import Unread
from torpor.shared.errors import (
    InvalidInput,
    MachineError,
    MachineUnreachable,
    MachineUnread,
    TorporError,
    UnsafeDestroy,
)
from torpor.shared.values import Machine, names_of

Listing: TypeAlias = tuple[list[Machine], list[Residue]]


@step("compare with rentals")
def compare_with_rentals(opened: OpenWorkspace) -> tuple[list[Finding], Unread]:
    """Read the machines at all provider blocks, and the rentals of the workspace, under all of its
    names; and the records that cannot be believed. Changes nothing. A provider of the workspace
    that does not answer is an error; another one is left out with a warning."""
    before, unread = _listed(opened), Unread()
    rentals = open_rentals(opened, unread)
    after = _listed(opened, rentals)
    residue = [one for found in after.values() for one in found[1]]
    found = compare(
        after.keys(),
        names_of(opened.spec.name),
        rentals,
        [machine for machines, _ in before.values() for machine in machines],
        [machine for machines, _ in after.values() for machine in machines],
        residue,
        {rental_named(key) for key in unread},
    )
    return [finding for finding in found if not just_ended(opened, finding)], unread


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
    """Destroy this one machine, until its end is proven, if its rental says that it was never
    handed over."""
    end(renter(opened.under(rental.label.workspace)), rental, None, machine)


@step("close rental")
def close_rental(opened: OpenWorkspace, rental: Rental) -> None:
    """Close the rental of a machine that its user knows to be gone. Nothing is destroyed."""
    why = "its user told reconcile that the machine is gone"
    opened.under(rental.label.workspace).rentals.change(rental, state="ended", why=why)


def open_rentals(opened: OpenWorkspace, unread: Unread | None = None) -> list[Rental]:
    """The open rentals of the workspace, under all of its names. ``unread``: as in
    Records.read_each."""
    names = names_of(opened.spec.name)
    return [one for name in names for one in opened.under(name).rentals.open(unread)]


def listed(
    providers: Sequence[Provider],
    rentals: Sequence[Rental] = (),
) -> tuple[dict[str, Listing], dict[str, TorporError]]:
    """The machines and the residue by the identity of each provider that answered, and the error of
    each that did not. A provider that lists a machine which cannot be read is among both. Each is
    told first which machines the open ``rentals`` adopted there."""
    answers = ask_all(providers, partial(_listing, rentals=rentals))
    found: dict[str, Listing] = {}
    silent: dict[str, TorporError] = {}
    for provider, answer in zip(providers, answers, strict=True):
        if isinstance(answer, TorporError):
            silent[provider.identity] = answer
            continue
        machines, residue, unread = answer
        found[provider.identity] = machines, residue
        if unread is not None:
            silent[provider.identity] = unread
    return found, silent


def _listing(
    provider: Provider, rentals: Sequence[Rental]
) -> tuple[list[Machine], list[Residue], MachineUnread | None]:
    recall([provider], rentals)
    try:
        return provider.list_own(), provider.residue(), None
    except MachineUnread as error:
        return [*error.machines], provider.residue(), error


def _listed(opened: OpenWorkspace, rentals: Sequence[Rental] = ()) -> dict[str, Listing]:
    providers = opened.markets.every()
    found, silent = listed(providers, rentals)
    for identity, error in silent.items():
        left_out = identity not in found
        if left_out and identity in {provider.identity for provider in opened.providers}:
            raise error
        runner().log.warning("%s%s: %s", identity, " was left out" if left_out else "", error)
    return found


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


def just_ended(opened: OpenWorkspace, finding: Finding) -> bool:
    """The machine looks lost, but its rental has ended by now: a hibernate has just ended it."""
    rental = finding.rental if finding.kind == "lost" else None
    return rental is not None and opened.rentals.of(rental.label) is None
