"""Finding, creating, reaching and destroying machines."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

import msgspec

from tasks.events import MachineCreated, MachineDestroyed, MachineHandedOver, emit
from tasks.retrying import ONCE
from tasks.runner import runner
from tasks.step import step
from tasks.workspace import OpenWorkspace
from torpor.control.ledger import Lease
from torpor.control.providers.offers import Offer, misfit
from torpor.control.providers.seam import Absent
from torpor.control.providers.waiting import wait_until_reachable
from torpor.control.remote.session import Session
from torpor.control.rental.order import order_for
from torpor.control.safety import Warrant, never_handed_over
from torpor.shared.errors import (
    CreateFailed,
    HandedOver,
    InvalidInput,
    MachineUnreachable,
    NoOffer,
    NotOurs,
    ProviderError,
    StoreError,
    TorporError,
)
from torpor.shared.values import Endpoint, Machine, MachineId

READY_S: Final = 900.0
"""How long a rented machine may take until SSH answers; Vast.ai took 85 s, images can take more."""
GONE_S: Final = 300.0
_FIRST_POLL_S: Final = 0.1
_LONGEST_POLL_S: Final = 5.0


@step("find machine")
def find_machine(opened: OpenWorkspace, wanted: str) -> Machine:
    """The workspace's live machine, or the one with that id; never one without our label."""
    mine = _live_machines(opened)
    if wanted:
        mine = [machine for machine in mine if machine.id == wanted]
    if len(mine) == 1:
        _check_lease(opened, mine[0])
        return mine[0]
    there = ", ".join(machine.id for machine in mine)
    if mine:
        raise InvalidInput(
            f"workspace {opened.spec.name} is on {len(mine)} machines at "
            f"{opened.provider.identity}: {there}. Choose one in `machine`"
        )
    raise InvalidInput(
        f"workspace {opened.spec.name} is on no machine at {opened.provider.identity}"
        f"{f' called {wanted}' if wanted else ''}: wake it first, or check the provider block"
    )


def chosen_machine(opened: OpenWorkspace, wanted: str) -> Machine:
    """The machine that the user chose: its id, user@host:port, or nothing for the workspace's only
    machine."""
    return own_machine(wanted) if "@" in wanted else find_machine(opened, wanted)


@step("open session")
def open_session(opened: OpenWorkspace, endpoint: Endpoint) -> Session:
    """Connect to the machine, install the agent and attach to it."""
    ledger = opened.ledger
    return Session.open(
        ledger.pinned(endpoint),
        opened.identity,
        pin=lambda host_key: ledger.pin(endpoint, host_key),
    )


@step("find offers")
def find_offers(opened: OpenWorkspace) -> list[Offer]:
    """The offers that fit the workspace, cheapest first; NoOffer if there is none."""
    want = opened.spec.want
    offers = sorted(opened.provider.offers(want), key=lambda offer: offer.price_usd_h)
    offers = [offer for offer in offers if not misfit(offer, want)]
    if not offers:
        raise NoOffer(
            f"{opened.provider.identity} has no offer for {_wish(opened)}: ask for less in the "
            "workspace block, raise its price limit, or use another provider"
        )
    return offers


@step("take lease")
def take_lease(opened: OpenWorkspace) -> tuple[Lease, bool]:
    """A lease for one new machine of the workspace, and whether it is fresh (no earlier run had
    it).

    An unfinished lease of an earlier run is used again, with its machine, so nothing is rented
    twice. InvalidInput if the workspace is on a machine already.
    """
    provider = opened.provider.identity
    live = _live_machines(opened)
    unfinished = opened.ledger.unfinished(provider, [machine.label for machine in live])
    labels = [lease.label for lease in unfinished]
    left = ", ".join(machine.id for machine in live if machine.label in labels)
    for machine in live:
        if machine.label not in labels:
            also = f". A replicate left {left} unfinished: run it again to continue" if left else ""
            raise InvalidInput(
                f"workspace {opened.spec.name} is already on machine {machine.id} at {provider}: "
                f"work there, or hibernate it first{also}"
            )
    if len(live) > 1:
        raise InvalidInput(
            f"a replicate of workspace {opened.spec.name} that did not finish left {len(live)} "
            f"machines at {provider}, or still runs: run replicate again, which continues with "
            "them and destroys the surplus"
        )
    if live:
        return next(lease for lease in unfinished if lease.label == live[0].label), False
    if unfinished:
        return unfinished[0], False
    return opened.ledger.open_lease(opened.owner, provider), True


@step("take leases")
def take_leases(opened: OpenWorkspace, most: int) -> list[tuple[Lease, bool]]:
    """Leases for at least ``most`` machines of the workspace, and whether each is fresh.

    Unfinished leases of earlier runs come first, all that have a machine, so each machine is used
    or destroyed, never forgotten. The workspace may be on other machines already.
    """
    provider = opened.provider.identity
    labels = {machine.label for machine in _live_machines(opened)}
    unfinished = opened.ledger.unfinished(provider, labels)
    standing = [lease for lease in unfinished if lease.label in labels]
    empty = [lease for lease in unfinished if lease.label not in labels]
    taken = [*standing, *empty[: max(0, most - len(standing))]]
    fresh = [opened.ledger.open_lease(opened.owner, provider) for _ in range(most - len(taken))]
    return [*((lease, False) for lease in taken), *((lease, True) for lease in fresh)]


@step("create machine", retries=ONCE)
def create_machine(
    opened: OpenWorkspace,
    offers: list[Offer],
    lease: Lease,
    fresh: bool,
    nap: Callable[[float], None] | None = None,
) -> Machine:
    """Rent the first available offer and wait until SSH answers.

    If an offer fails, its machine is destroyed and the next offer is tried. Idempotent by the
    lease's label. A lease that is not ``fresh`` may have an earlier run's machine, which may hold
    work, so it is left alone. HandedOver if another run was faster with the lease. ``nap`` sleeps
    between two looks, and may raise to stop waiting.
    """
    log = runner().log
    refused: list[str] = []
    for offer in offers:
        if refused:
            opened.ledger.see_unclaimed(lease.label)  # an offer took its time to fail
        try:
            machine = opened.provider.create(
                order_for(offer, lease.label, opened.identity.load(), opened.spec.want)
            )
            live = wait_until_reachable(
                opened.provider, machine.id, timeout_s=READY_S, sleep=nap or time.sleep
            )
        except (CreateFailed, MachineUnreachable) as error:
            if fresh:
                _end_unclaimed(opened, lease)
            elif _may_stand(opened, lease):
                raise type(error)(
                    f"{error}. The machine of lease {lease.label.rental} may hold another run's "
                    "restore, so it was not destroyed. Run this again; if the machine never "
                    "answers, name it in `end` of reconcile, which lists it"
                ) from error
            log.warning("offer %s failed, trying the next: %s", offer.id, error)
            refused.append(f"{offer.id}: {error}")
        else:
            emit(
                MachineCreated(
                    workspace=opened.spec.name,
                    machine=live.id,
                    provider=live.provider,
                    price_usd_h=live.price_usd_h,
                )
            )
            return live
    raise CreateFailed(
        f"none of {len(offers)} offers at {opened.provider.identity} became a machine: "
        f"{'; '.join(refused[:3])}"
    )


def hand_over(opened: OpenWorkspace, lease: Lease, machine: Machine) -> None:
    """Hand the machine over: from now on only a verified snapshot may end it."""
    opened.ledger.hand_over(lease)
    emit(
        MachineHandedOver(workspace=opened.spec.name, machine=machine.id, provider=machine.provider)
    )


def destroy_created(opened: OpenWorkspace, lease: Lease) -> None:
    """Destroy the machine of a lease that was never handed over, until it is gone; close the lease.

    If another run has used the lease and handed the machine over, both are left alone. StoreError
    if the ledger does not answer: both are left to the next run.
    """
    try:
        _end_unclaimed(opened, lease)
        opened.ledger.see_unclaimed(lease.label)
        if not _under(opened, lease):
            opened.ledger.close_lease(lease.label)
    except HandedOver as error:
        runner().log.warning("%s", error)


def end_scratch(opened: OpenWorkspace, lease: Lease) -> None:
    """Destroy the machine of a lease with a reserved name, and close the lease.

    Such a machine is never handed over, so the ledger is not read.
    """
    for machine in _under(opened, lease):
        destroy_until_gone(opened, machine, never_handed_over(machine, lease.label))
    opened.ledger.close_lease(lease.label)


def end_left(opened: OpenWorkspace, *, older_s: float = 0.0) -> None:
    """Destroy scratch machines of this reserved name at this provider that are older than
    ``older_s``; raise the last failure after trying all."""
    fault: TorporError | None = None
    standing = [machine.label for machine in _live_machines(opened)]
    for lease in opened.ledger.unfinished(opened.provider.identity, standing):
        if lease.created_unix <= time.time() - older_s:
            try:
                end_scratch(opened, lease)
            except TorporError as error:
                fault = error
    if fault is not None:
        raise fault


@step("destroy machine")
def destroy_machine(opened: OpenWorkspace, machine: Machine, warrant: Warrant) -> None:
    """Destroy the machine, with a warrant from a verified snapshot, until it is gone."""
    end_machine(opened, machine, warrant)


def end_machine(opened: OpenWorkspace, machine: Machine, warrant: Warrant) -> None:
    """Destroy the machine until it is gone, and close its lease."""
    destroy_until_gone(opened, machine, warrant)
    if machine.label is not None:
        opened.ledger.close_lease(machine.label)


def destroy_until_gone(opened: OpenWorkspace, machine: Machine, warrant: Warrant) -> None:
    """Destroy, repeatedly, until the provider says that the machine is gone.

    Raises ProviderError if it still exists after five minutes: it still costs money.
    """
    give_up = time.monotonic() + GONE_S
    wait_s = _FIRST_POLL_S
    while True:
        fault: TorporError | None = None
        try:
            live = opened.provider.find(machine.id)
            if isinstance(live, Absent) and live.proof:
                break
            live = machine if isinstance(live, Absent) else live
            opened.provider.destroy(live, warrant)
        except TorporError as error:
            if not error.retryable:
                raise
            fault = error
        if time.monotonic() > give_up:
            if isinstance(fault, StoreError):  # the ledger did not answer, so it may not go
                raise fault
            raise ProviderError(
                f"machine {machine.id} at {opened.provider.identity} was told to end but still "
                f"exists after {GONE_S:.0f} s{f' ({fault})' if fault else ''}: it may still cost "
                "money; check the provider's console"
            )
        time.sleep(wait_s)
        wait_s = min(2 * wait_s, _LONGEST_POLL_S)
    emit(
        MachineDestroyed(
            workspace=machine.label.workspace if machine.label else opened.spec.name,
            machine=machine.id,
            provider=machine.provider,
            reason=warrant.reason,
        )
    )


def endpoint_of(machine: Machine) -> Endpoint:
    """The SSH address; MachineUnreachable if the provider does not know it yet."""
    if machine.endpoint is None:
        raise MachineUnreachable(
            f"machine {machine.id} at {machine.provider} is {machine.state} and has no address: "
            "wait, or check the provider's console"
        )
    return machine.endpoint


def parse_host(text: str) -> Endpoint:
    """The address of the user's own machine: ``user@host``, optionally with ``:port`` and
    ``ssh://``.
    """
    user, at, place = text.removeprefix("ssh://").rpartition("@")
    host, colon, port = place.rpartition(":")
    if not colon:
        host, port = place, "22"
    if not at or not user or not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise InvalidInput(f"{text!r} is not a host: write user@host or user@host:port")
    return Endpoint(host.strip("[]"), int(port), user)


def own_machine(text: str) -> Machine:
    """The user's own host as a machine without a label, so it can never be destroyed."""
    return Machine(MachineId(text), "own", None, "running", parse_host(text))


def _end_unclaimed(opened: OpenWorkspace, lease: Lease) -> None:
    """Destroy the lease's machine until it is gone; HandedOver if it is not ours."""

    def ask() -> None:
        opened.ledger.see_unclaimed(lease.label)

    ask()
    for machine in _under(opened, lease):
        destroy_until_gone(opened, machine, never_handed_over(machine, lease.label, ask))


def _may_stand(opened: OpenWorkspace, lease: Lease) -> bool:
    try:
        return bool(_under(opened, lease))
    except ProviderError:  # unknown is not gone
        return True


def _under(opened: OpenWorkspace, lease: Lease) -> list[Machine]:
    return [machine for machine in opened.provider.list_own() if machine.label == lease.label]


def _live_machines(opened: OpenWorkspace) -> list[Machine]:
    return [
        machine
        for machine in opened.provider.list_own()
        if machine.label is not None and machine.label.workspace == opened.spec.name
    ]


def _check_lease(opened: OpenWorkspace, machine: Machine) -> None:
    lease = None if machine.label is None else opened.ledger.lease_of(machine.label)
    if lease is None:
        raise NotOurs(
            f"machine {machine.id} at {machine.provider} carries a label of workspace "
            f"{opened.spec.name}, but {opened.store.address} has no lease for it: use the store "
            "block it was created with"
        )
    if lease.state != "handed over":
        raise InvalidInput(
            f"machine {machine.id} at {machine.provider} was never handed over: the wake or "
            f"replicate of workspace {opened.spec.name} on it did not finish. Run that again to "
            "continue it; hibernating now would store half a workspace"
        )


def _wish(opened: OpenWorkspace) -> str:
    want = opened.spec.want
    wishes = msgspec.to_builtins(want)
    return ", ".join(f"{name} {value}" for name, value in wishes.items() if value) or "anything"
