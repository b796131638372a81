"""Finding, creating, reaching and destroying machines."""

from __future__ import annotations

import math
import re
import secrets
import time
from collections.abc import Callable, Collection
from ipaddress import ip_address
from typing import Final

from tasks.budgets import check_budgets, within_budgets
from tasks.canaries import read_canaries
from tasks.events import MachineCreated, MachineDestroyed, MachineHandedOver, emit
from tasks.ownership import check_still_owner
from tasks.phases import seconds_by_phase
from tasks.progress import now
from tasks.retries import ONCE
from tasks.runner import runner
from tasks.sleep import check_not_asleep, check_not_hibernated
from tasks.step import step
from tasks.waiting import waits_of
from tasks.workspace import OpenWorkspace, StoredWorkspace, check_volumes
from torpor.control.providers.offers import Offer
from torpor.control.providers.provider import Absent
from torpor.control.remote.agent import Agent, Session
from torpor.control.remote.session import OPEN_S
from torpor.control.rental.canaries import CanaryResults
from torpor.control.rental.ending import GONE_S, end_machine
from torpor.control.rental.look import Shown, look
from torpor.control.rental.prospects import matters
from torpor.control.rental.records import Rental, with_host_key
from torpor.control.rental.renter import Renter
from torpor.control.rental.renting import AT_ONCE_S, Renting, Tenancy
from torpor.control.rental.search import Offers, find_offers
from torpor.control.rental.sweep import end_scratch
from torpor.control.safety import Warrant
from torpor.shared.errors import (
    InvalidInput,
    MachineError,
    MachineUnreachable,
    NotOurs,
    TorporError,
    WorkspaceAwake,
)
from torpor.shared.values import Endpoint, Label, Machine, MachineId, WorkspaceName
from torpor.shared.wire.brought import MakePaths, NoteMadeAgain
from torpor.shared.wire.restore import RestorePlan

PATHS_S: Final = 60.0
"""Seconds that an attached agent may take to make directories."""
MOST_REFUSED: Final = 100
"""Most refused offers in the table."""


class _RunListener:
    """Writes what happens to machines into the log and the events of this run."""

    def __init__(self, workspace: WorkspaceName) -> None:
        self._workspace = workspace

    def warn(self, message: str) -> None:
        runner().log.warning(message)

    def asks(self, offer: Offer) -> None:
        now(f"asking {offer.provider} for offer {offer.id} at {offer.bound_usd_h:.3f} $ an hour")

    def starts(self, machine: Machine) -> None:
        now(f"machine {machine.id} at {machine.provider} is starting")

    def created(self, machine: Machine) -> None:
        waits_of(runner()).stands(machine)
        emit(
            MachineCreated(
                workspace=self._workspace,
                machine=machine.id,
                provider=machine.provider,
                price_usd_h=machine.price_usd_h,
            )
        )

    def handed_over(self, machine: Machine) -> None:
        emit(
            MachineHandedOver(
                workspace=self._workspace, machine=machine.id, provider=machine.provider
            )
        )

    def ended(self, machine: Machine, reason: str) -> None:
        waits_of(runner()).ends(machine)
        runner().log.info("machine %s was destroyed: %s", machine.id, reason)
        emit(
            MachineDestroyed(
                workspace=self._workspace,
                machine=machine.id,
                provider=machine.provider,
                reason=reason,
            )
        )


def renter(opened: OpenWorkspace) -> Renter:
    """The Renter of the workspace, which rents machines for it and ends them."""
    return Renter(
        opened.rentals,
        opened.markets,
        opened.owner,
        opened.spec.want,
        opened.identity.load(),
        _RunListener(opened.spec.name),
        opened.project,
        opened.job,
        lambda usd_h: _may_rent(opened, usd_h),
    )


def _may_rent(opened: OpenWorkspace, usd_h: float) -> None:
    """Right before a machine of this price is asked for."""
    check_still_owner(opened)
    check_budgets(opened, usd_h)


def renting(opened: OpenWorkspace) -> Renting:
    """The rentals of this run, as a context that ends what was not handed over."""
    return Renting(renter(opened))


def machines_of(opened: OpenWorkspace) -> Shown:
    """The workspace's open rentals, and its live machines at all providers that it or an open
    rental names. Changes nothing."""
    return look(opened.rentals, opened.markets, runner().log.warning)


find_machines = step(
    "find machines", phase="prepare", says="looking for the machine of {opened.spec.name}"
)(machines_of)


@step("end abandoned machines", phase="prepare", says="looking for machines of failed attempts")
def end_abandoned(held: Renting, within_s: float = GONE_S) -> list[Rental]:
    """The sweep (torpor/control/rental/sweep.py): end the machines of earlier runs that nobody will
    use, and close the rentals of those that have provably gone. Returns the rentals that have
    ended. Ending one machine may take ``within_s`` seconds. A machine that cannot be ended is a
    warning; ``held`` refuses to rent while it costs money."""
    return held.end_abandoned(within_s=within_s)


@step("end scratch machines", retries=ONCE)
def end_scratch_machines(
    opened: OpenWorkspace, before_unix: float = math.inf, spared: Collection[str] = ()
) -> None:
    """The sweep under the reserved name of ``opened``: end the machines that killed runs left,
    except those of the jobs in ``spared``. Raises the last failure after trying all."""
    end_scratch(renter(opened), before_unix=before_unix, spared=spared)


def chosen_machine(
    opened: OpenWorkspace, wanted: str, to_store: bool = False, *, sweeps: bool = True
) -> Machine:
    """The machine that the user chose: its id, user@host:port, or nothing for the workspace's only
    machine. If the look shows a machine that no run will use, or no machine at all, the sweep comes
    first, unless ``sweeps`` is False because the caller only looks. The rest is as in
    ``pick_machine``."""
    if "@" in wanted:
        return own_machine(wanted)
    shown = find_machines(opened)
    if sweeps and shown.unsettled:
        end_abandoned(renting(opened), AT_ONCE_S)
    return pick_machine(opened, shown, wanted, to_store)


def pick_machine(
    opened: OpenWorkspace, shown: Shown, wanted: str = "", to_store: bool = False
) -> Machine:
    """The workspace's live machine, or the one with that id; never one without our label, nor one
    of an abandoned rental. One that is being ended counts only ``to_store`` what somebody did there
    since, and where there is no other. WorkspaceAsleep if there is none because it was hibernated,
    InvalidInput with the next step if there is none or more than one."""
    mine = [one for one in shown.machines if one[1] is None or one[1].state != "abandoned"]
    lasting = [one for one in mine if not _is_ending(*one)]
    mine = lasting or mine if to_store else lasting
    if wanted:
        mine = [(machine, rental) for machine, rental in mine if machine.id == wanted]
    if len(mine) == 1:
        return _usable(opened, *mine[0])
    if not mine:
        opened.markets.check_reached(shown.rentals)
        check_not_asleep(opened, wanted)
    at = ", ".join(provider.identity for provider in opened.providers)
    there = ", ".join(f"{machine.id} at {machine.provider}" for machine, _ in mine)
    if mine:
        raise InvalidInput(
            f"workspace {opened.spec.name} is on {len(mine)} machines: {there}. Choose one in "
            "`machine` (`--machine ID`)"
        )
    raise InvalidInput(
        f"workspace {opened.spec.name} is on no machine at {at}"
        f"{f' called {wanted}' if wanted else ''}: `torpor status` names its machines, and "
        f"`torpor wake {opened.spec.name}` or `torpor create {opened.spec.name}` rents one. If it "
        "was rented by another account, check the provider block"
    )


def rental_of(workspace: StoredWorkspace, label: Label) -> Rental | None:
    """The open rental of the machine of this label."""
    return workspace.rentals.of(label) if label.workspace == workspace.spec.name else None


def _check_marked(opened: OpenWorkspace, shown: Shown) -> None:
    """Raise WorkspaceAwake where an adopted machine of the workspace exists whose mark is missing:
    the machine may hold the newest work."""
    marked = {machine.label for machine, _ in shown.machines}
    for rental in shown.rentals:
        if not rental.adopted or rental.machine is None or rental.label in marked:
            continue
        if isinstance(opened.markets.of(rental.provider).find(rental.machine), Machine):
            raise WorkspaceAwake(
                f"workspace {opened.spec.name} is on machine {rental.machine} at {rental.provider},"
                " which was adopted and does not carry torpor's mark: run `torpor adopt` again, or "
                "give the machine up with `torpor adopt --release`"
            )


def _is_ending(machine: Machine, rental: Rental | None) -> bool:
    return rental is not None and rental.is_ending(machine)


def _is_known(opened: OpenWorkspace, machine: Machine) -> bool:
    """Whether the machine's rental is in the store by now. Machines are listed after rentals, and a
    market may list a machine for a while after its end."""
    label = machine.label
    return label is not None and bool(
        opened.rentals.of(label) or opened.rentals.ended(label.rental)
    )


def check_rented(machine: Machine) -> None:
    """InvalidInput if the machine is the user's own, which is never destroyed."""
    if machine.label is None:
        raise InvalidInput(
            f"{machine.id} is your own machine, which torpor never destroys: turn `destroy` off"
        )


def session_with(
    opened: OpenWorkspace, machine: Machine, open_s: float = OPEN_S, sleeps: bool = False
) -> Session:
    """Connect to the machine, install the agent and attach to it, all within ``open_s``.

    A rented machine may show its rental's host key and no other; the user's own, the key of the
    first login at that address. Only a rented machine has a sampler: nothing that torpor starts on
    the user's own machine outlives the agent. ``sleeps``: another run may hibernate the machine
    meanwhile; WorkspaceAsleep then ends each try to connect again.
    """
    waits_of(runner()).stands(machine)
    endpoint = endpoint_of(machine)
    if machine.label is None:
        return opened.log_in(
            opened.hosts.pinned(endpoint),
            opened.identity,
            pin=lambda host_key: opened.hosts.pin(endpoint, host_key),
            open_s=open_s,
        )
    label, rentals = machine.label, opened.under(machine.label.workspace).rentals

    def check() -> None:
        if sleeps:
            check_not_hibernated(opened, machine)

    try:
        return opened.log_in(
            endpoint_of(with_host_key(machine, rentals.of(label))),
            opened.identity,
            pin=lambda host_key: rentals.pin(label, host_key),
            sampled=True,
            open_s=open_s,
            check=check,
        )
    except MachineError as error:
        check()
        if machine.state == "stopped":
            raise _stopped(machine) from error
        if not sleeps:  # otherwise the run that ends the machine may be about to record its end
            _check_alive(opened, machine)
        raise


open_session = step("open session", phase="connect", says="connecting to machine {machine.id}")(
    session_with
)


@step("make paths")
def make_paths(opened: OpenWorkspace, session: Agent) -> None:
    """Make the workspace's directories on a rented machine, in the first of which its user begins
    after a login. WorkspaceInvalid for one that cannot be made."""
    request = MakePaths(opened.spec.paths)
    made = session.call(request, request_id=secrets.token_hex(8), within_s=PATHS_S)
    if made.fault:
        runner().log.warning("a login begins in the home, not in the workspace: %s", made.fault)


def note_made_again(session: Agent, paths: list[str]) -> None:
    """Have the machine remember that a deploy fills these directories, so that files in them do not
    count as a user's."""
    session.call(NoteMadeAgain(paths), request_id=secrets.token_hex(8), within_s=PATHS_S)


def fitting_offers(opened: OpenWorkspace, count: int = 1) -> Offers:
    """The offers of all providers that fit the workspace and its budgets, best first; NoOffer or
    BudgetExceeded if there is none. ``count``: how many machines are to be rented."""
    check_volumes(opened.providers, opened.spec)
    want = opened.spec.want
    canaries = read_canaries(opened) if matters(want) else CanaryResults()
    found = find_offers(opened.providers, want, canaries=canaries)
    return within_budgets(opened, found, count)


look_for_offers = step("find offers", phase="machine", says="asking the markets for machines")(
    fitting_offers
)


@step("find what was left", phase="machine", says="looking for machines that earlier runs left")
def left_unfinished(opened: OpenWorkspace, held: Renting, alone: bool) -> list[Tenancy]:
    """The machines that earlier runs of the workspace left unfinished. Waits for each that its
    market does not show yet. Ends no machine: the sweep has run before. InvalidInput if no provider
    block reaches a machine of the workspace. ``alone``: WorkspaceAwake if the workspace is on a
    machine already; NotOurs if that machine has no rental in this store; InvalidInput if there is
    more than one."""
    shown = held.look_with_late()
    opened.markets.check_reached(shown.rentals)
    if alone:
        _check_marked(opened, shown)
    mine = [(m, r) for m, r in shown.machines if (r or alone) and not _is_ending(m, r)]
    unfinished = [(m, rental) for m, rental in mine if rental is not None and rental.unfinished]
    left = ", ".join(machine.id for machine, _ in unfinished)
    for machine, rental in mine if alone else []:
        if machine.id in opened.beside:
            continue
        if rental is None or rental.state == "handed over":
            if machine.state == "stopping":
                raise InvalidInput(
                    f"machine {machine.id} at {machine.provider}, on which workspace "
                    f"{opened.spec.name} is, is being ended: "
                    f"{machine.note or 'its provider says so'}. "
                    "Do not work there. Store what it holds with hibernate while it answers, or "
                    "wait until reconcile has recorded its end; then wake the workspace"
                )
            if rental is None and not _is_known(opened, machine):
                _usable(opened, machine, rental)
            if machine.state == "stopped":
                raise WorkspaceAwake(
                    f"workspace {opened.spec.name} is on machine {machine.id} at "
                    f"{machine.provider}, which is stopped: "
                    f"{machine.note or 'its market does not say why'}. No other machine is rented, "
                    "because that one may hold the newest work. If the account has no credit, add "
                    "some. Then start the machine in the market's console, and work there or "
                    "hibernate it. If it cannot be started, end it there and run "
                    f"`torpor reconcile {opened.spec.name}`: what is in no snapshot is lost with it"
                )
            also = f". A replicate left {left} unfinished: run it again to continue" if left else ""
            raise WorkspaceAwake(
                f"workspace {opened.spec.name} is already on machine {machine.id} at "
                f"{machine.provider}: work there, or hibernate it first{also}"
            )
    if alone and len(unfinished) > 1:
        raise InvalidInput(
            f"a replicate of workspace {opened.spec.name} that did not finish left "
            f"{len(unfinished)} machines ({left}), or still runs: run replicate again, which "
            "continues with them and destroys the surplus"
        )
    return [held.tenancy(machine, rental) for machine, rental in unfinished]


@step("create machine", retries=ONCE, phase="machine", says="renting a machine")
def create_machine(
    held: Renting,
    offers: Offers,
    left: Tenancy | None = None,
    nap: Callable[[float], None] = time.sleep,
) -> Tenancy:
    """A machine on which SSH answers: what an earlier run left, or a new one.

    Each failed offer is an attempt with a rental of its own; the machine that it made is ended.
    ``nap`` sleeps between two looks, and may raise to stop waiting.
    """
    return held.rent(offers.fitting, nap) if left is None else held.take_up(left, nap)


def say_choice(offers: Offers, rental: Rental) -> str:
    """Log and return why this offer was rented before others; empty where only its cost counted."""
    words = offers.chosen(rental.provider, rental.offer)
    if words:
        runner().log.info("offer %s at %s was chosen: %s", rental.offer, rental.provider, words)
    return words


def show_offers(opened: OpenWorkspace, held: Renting, offers: Offers) -> None:
    """Show a table of the offers that were tried and of those that were refused, with the reasons.
    None if there was only one offer."""
    rows = [one.row() for one in (*held.tried, *offers.refused[:MOST_REFUSED])]
    if len(rows) > 1:
        runner().table(
            key=f"offers-{opened.spec.name}",
            rows=rows,
            description=f"Offers for workspace {opened.spec.name}, tried and refused",
        )


@step("hand over machine", retries=ONCE)
def hand_over(
    tenancy: Tenancy,
    fetched: RestorePlan | None = None,
    *,
    alone: bool,
    starting: bool = False,
    untaken: bool = False,
) -> None:
    """Leave the machine to its user: from now on only a verified snapshot may end it. ``alone``:
    HandedOver if another run has handed over a machine of the workspace since this one began.
    ``untaken``: HandedOver if another run may have begun to use the machine meanwhile. ``fetched``:
    the whole restore came from the store, so its rate is recorded. ``starting``: this run starts
    the workspace's programs next."""
    if fetched is not None and tenancy.fresh:
        seconds, stored = seconds_by_phase().get("restore", 0.0), fetched.stored_bytes
        tenancy.hand_over(alone=alone, fetched_bytes=stored, fetched_s=seconds, starting=starting)
    else:
        tenancy.hand_over(alone=alone, starting=starting, untaken=untaken)


@step("destroy machine", phase="destroy", says="ending machine {machine.id}")
def destroy_machine(opened: OpenWorkspace, machine: Machine, warrant: Warrant) -> None:
    """Destroy the machine, with a warrant from a verified snapshot, until its end is proven."""
    rental = None if machine.label is None else opened.rentals.of(machine.label)
    if rental is None:
        raise NotOurs(f"machine {machine.id} at {machine.provider} has no rental: it was left")
    log = runner().log
    log.info("machine %s at %s is destroyed now: %s", machine.id, machine.provider, warrant.reason)
    try:
        end_machine(renter(opened), rental, warrant, machine)
    except Exception:
        raise
    except BaseException:
        log.warning(
            "interrupted while machine %s at %s was being destroyed: it may still exist and cost "
            "money. Snapshot %s is verified and has all of its work; rental %s is open until the "
            "end is proven. Hibernate again to end it, or wake the snapshot",
            machine.id, machine.provider, warrant.snapshot, rental.label.rental,
        )  # fmt: skip
        raise


def _check_alive(opened: OpenWorkspace, machine: Machine) -> None:
    """Raise MachineError where the provider proves that the machine has gone, or is ending it, so
    that no further login is tried. An unknown machine is not gone, and a stopped one may start
    again."""
    try:
        live = opened.markets.of(machine.provider).find(machine.id)
    except TorporError:
        return
    words = live.proof if isinstance(live, Absent) else "it is being ended"
    if words and (isinstance(live, Absent) or live.state == "stopping"):
        raise MachineError(
            f"machine {machine.id} at {machine.provider} cannot be reached any more: {words}"
        )


def endpoint_of(machine: Machine) -> Endpoint:
    """The SSH address; MachineUnreachable if the provider does not know it yet."""
    if machine.endpoint is None and machine.state == "stopped":
        raise _stopped(machine)
    if machine.endpoint is None:
        raise MachineUnreachable(
            f"machine {machine.id} at {machine.provider} is {machine.state} and has no address: "
            "wait, or check the provider's console"
        )
    return machine.endpoint


def _stopped(machine: Machine) -> MachineUnreachable:
    return MachineUnreachable(
        f"machine {machine.id} at {machine.provider} is stopped: "
        f"{machine.note or 'its market does not say why'}. If the account has no credit, add some. "
        "Then start the machine in the market's console, and try again. If it cannot be started, "
        "end it there and run `torpor reconcile`: what is in no snapshot is lost with it"
    )


def parse_host(text: str) -> Endpoint:
    """The address of the user's own machine: ``user@host``, optionally with ``:port`` and
    ``ssh://``. IPv6 may be in brackets, and must be where a port follows."""
    user, at, place = text.strip().removeprefix("ssh://").rpartition("@")
    host, colon, port = place.rpartition(":")
    if not colon or _is_ipv6(place):
        host, port = place, "22"
    bare = host.removeprefix("[").removesuffix("]")
    is_host = (
        host == bare if ":" not in bare else _is_ipv6(bare) and (host != bare or place == bare)
    )
    if not (at and is_host and _NAME.fullmatch(user) and _HOST.fullmatch(bare)):
        raise _no_host(text)
    if not port.isdecimal() or not 0 < int(port) < 65536:
        raise _no_host(text)
    return Endpoint(bare, int(port), user)


# a bastion may expect user@domain or user:target as the user's name
_NAME: Final = re.compile(r"[^\s@:/-][^\s/]*")
_HOST: Final = re.compile(r"[^\s@/\[\]-][^\s@/\[\]]*")
_PASTED: Final = re.compile(r"ssh\b.*?\s(?P<login>[^\s@]+@[^\s@]+)", re.DOTALL)
_PORT: Final = re.compile(r"\s-p\s*(\d{1,5})\b")


def _is_ipv6(text: str) -> bool:
    try:
        return ip_address(text.partition("%")[0].strip("[]")).version == 6
    except ValueError:
        return False


def _no_host(text: str) -> InvalidInput:
    words = f"{text!r} is not a host: write user@host or user@host:port; IPv6 as user@[::1]:22"
    if pasted := _PASTED.match(text.strip()):
        port = _PORT.search(text)
        words += f". Of that command: {pasted['login']}{f':{port[1]}' if port else ''}"
    return InvalidInput(words)


def own_machine(text: str) -> Machine:
    """The user's own host as a machine without a label, so it can never be destroyed."""
    return Machine(MachineId(text), "own", None, "running", parse_host(text))


def _usable(opened: OpenWorkspace, machine: Machine, rental: Rental | None) -> Machine:
    if rental is None:
        raise NotOurs(
            f"machine {machine.id} at {machine.provider} carries a label of workspace "
            f"{opened.spec.name}, but {opened.store.address} has no rental for it: use the store "
            "block it was created with"
        )
    if rental.state != "handed over":
        raise InvalidInput(
            f"machine {machine.id} at {machine.provider} was never handed over: the wake or "
            f"replicate of workspace {opened.spec.name} on it still runs, or did not finish. Wait, "
            "or run it again to continue; hibernating now would store half a workspace"
        )
    return machine
