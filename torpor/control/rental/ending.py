"""The proven end of one rented machine, with all that belongs to it. ``sweep`` says which."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, Final

import msgspec

from torpor.control.providers.provider import FREE, Absent, Claims, Prices, Provider
from torpor.control.rental.markets import recall
from torpor.control.rental.records import Rental, Rentals
from torpor.control.rental.renter import Renter
from torpor.control.safety import Warrant, never_handed_over
from torpor.shared.errors import (
    EndUnproven,
    HandedOver,
    InvalidInput,
    MachineUnread,
    StoreError,
    TorporError,
)
from torpor.shared.transfer.retries import hurried
from torpor.shared.values import Label, Machine, SnapshotId

GONE_S: Final = 300.0
"""Seconds that a provider may take to prove an end, besides the time that it takes to settle."""
SLOW_S: Final = 30.0
"""Seconds to wait for an end that a provider has accepted and may take hours to carry out."""
ABSENCES: Final = 3
"""How many looks must miss a machine, by its id and in the list, to count as its end where the
provider keeps no proof. Each comes at least a settling time after the one before."""
NOTES: Final = 4
"""How often it is recorded that a machine shows, within the time after which its provider forgets
ended machines."""
FIRST_POLL_S: Final = 0.1
_LONGEST_POLL_S: Final = 5.0


def end_machine(
    by: Renter,
    rental: Rental,
    warrant: Warrant | None = None,
    shown: Machine | None = None,
    *,
    within_s: float = GONE_S,
) -> None:
    """Destroy the rental's machine, and what belongs to it, until its end is proven. ``shown``: the
    machine, where the caller has just seen it.

    Without ``warrant``, only a machine that was never handed over is ended; HandedOver if another
    run has handed it over meanwhile. An adopted machine ends only with a snapshot's warrant. A
    rental whose machine was never seen is abandoned until its provider has settled.
    """
    label = rental.label
    if rental.adopted and (warrant is None or warrant.snapshot is None):
        raise HandedOver(
            f"machine {rental.machine} of workspace {label.workspace} was adopted, so only a "
            "verified snapshot of it may end it: it was left alone. Hibernate the workspace"
        )
    if warrant is None:
        by.rentals.check_unclaimed(label)
    if shown is not None:
        rental = msgspec.structs.replace(rental, provider=shown.provider, machine=shown.id)
    provider = by.markets.of(rental.provider)
    recall([provider], [rental])
    shown = shown or listed(provider, label)
    seen = {} if shown is None else {"seen_unix": time.time()}
    machine = shown or last_known(provider, rental)
    if machine is None:
        close_unseen(by.rentals, provider, rental)
        return
    warrant = warrant or never_handed_over(
        machine, label, lambda: by.rentals.check_unclaimed(label)
    )
    held = partial(by.rentals.check_held, rental)
    where = {"provider": machine.provider, "machine": machine.id}
    record = partial(_record_last, by.rentals, rental, **where, **seen)
    accepts = partial(record, warrant.snapshot) if warrant.snapshot else lambda: None
    try:
        why = destroy(provider, machine, warrant, rental, within_s, held, accepts)
    except BaseException as error:
        if isinstance(error, Exception):
            accepted = isinstance(error, EndUnproven) and error.accepted
        else:
            accepted = warrant.is_accepted  # interrupted: a later run sees the end
        if warrant.snapshot and (accepted or warrant.is_accepted):
            # otherwise the machine's disk may change again
            record(warrant.snapshot if accepted else None)
        raise
    by.listener.ended(machine, warrant.reason)
    with suppress(HandedOver):  # another run has seen the end, and recorded it
        by.rentals.change(
            rental,
            state="ended",
            **where,
            why=why,
            snapshot=warrant.snapshot,
            **seen,
            **{**rental.measured, **billed(provider, rental, time.time())},
        )


def _record_last(
    rentals: Rentals, rental: Rental, snapshot: SnapshotId | None, /, **more: Any
) -> None:
    """Record which snapshot holds what the machine held to the last, so that it does not count as
    lost if this run is killed or another one sees the end first. A failure to record does not stop
    the end."""
    with suppress(HandedOver, StoreError):
        rentals.change(rental, snapshot=snapshot, **more)


def listed(provider: Provider, label: Label) -> Machine | None:
    """The machine with this label, if the provider lists one. MachineUnread where a listed machine
    that cannot be read may be it."""
    try:
        own, unread = provider.list_own(), None
    except MachineUnread as error:
        own, unread = [*error.machines], error
    found = next((machine for machine in own if machine.label == label), None)
    if found is None and unread is not None:
        raise unread
    return found


def last_known(provider: Provider, rental: Rental) -> Machine | None:
    """A machine that its provider does not list, as the rental's record knows it; None if it was
    never seen."""
    if rental.machine is None:
        return None
    return Machine(rental.machine, provider.identity, rental.label, "stopped", None)


def look_for(rentals: Rentals, provider: Provider, rental: Rental) -> tuple[Rental, str]:
    """Look for a machine that the provider's list has just not shown. The rental as it is now, and
    why the machine counts as gone; empty while it may live.

    Until the provider has settled, nothing counts. After that its proof counts; where the provider
    has none so long after an end, ``ABSENCES`` looks that miss the machine count, which the record
    keeps. The proof of an account whose name only its block claims counts as one such look, because
    any other account would say the same.
    """
    settling_s, now = provider.abilities.settling_s, time.time()
    if rental.machine is None or now < rental.created_unix + settling_s:
        return rental, ""
    found = provider.find(rental.machine)
    keeps = not _is_claimed(provider) and provider.abilities.forgets_s is None
    if isinstance(found, Absent) and (keeps or _proof_of(provider, found, shown=False)):
        return rental, found.proof
    shown = found if isinstance(found, Machine) else listed(provider, rental.label)
    if shown is not None:
        return seen_again(rentals, provider, rental, shown), ""
    known_unix = max(rental.created_unix, rental.seen_unix or 0.0)
    last_unix = rental.absent_unix[-1] if rental.absent_unix else -math.inf
    if now >= max(known_unix + (provider.abilities.forgets_s or 0.0), last_unix + settling_s):
        rental = rentals.change(rental, absent_unix=(*rental.absent_unix, now))
    return rental, _forgotten(rental)


def wait_until_shown(
    provider_of: Callable[[str], Provider],
    late: Sequence[Rental],
    warn: Callable[[str], None],
    nap: Callable[[float], None] = time.sleep,
) -> None:
    """Wait for all machines that were made a moment ago, together, until their providers show them
    or have settled. A provider that does not answer is asked again; one that refuses, or that no
    block is for, is not waited for."""
    began_unix, wait_s = time.time(), FIRST_POLL_S
    left = []
    for rental in late:
        try:
            provider = provider_of(rental.provider)
        except InvalidInput as error:
            warn(f"the machine of rental {rental.label.rental} is not waited for: {error}")
        else:
            left.append((provider, rental, min(began_unix, rental.created_unix)))
    while True:
        left = [
            (provider, rental, asked_unix)
            for provider, rental, asked_unix in left
            if time.time() < asked_unix + provider.abilities.settling_s
            and _may_show(provider, rental, warn)
        ]
        if not left:
            return
        nap(wait_s)
        wait_s = min(2 * wait_s, _LONGEST_POLL_S)


def _may_show(provider: Provider, rental: Rental, warn: Callable[[str], None]) -> bool:
    """Whether the rental's machine does not show yet, and may show in a later answer."""
    if rental.machine is None:
        return False
    try:
        return not isinstance(provider.find(rental.machine), Machine)
    except TorporError as error:
        if not error.retryable:
            warn(f"machine {rental.machine} of a run that was killed is not waited for: {error}")
        return error.retryable


def seen_again(rentals: Rentals, provider: Provider, rental: Rental, machine: Machine) -> Rental:
    """Record that the provider shows the ``machine``. Earlier answers without it then count for
    nothing, and so does an accepted end that was not carried out, because the machine's disk may
    change again. The time is recorded only where absences are counted from it."""
    if rental.snapshot is not None and not rental.is_ending(machine):
        rental = rentals.change(rental, snapshot=None)
    forgets_s = provider.abilities.forgets_s
    noted_s = time.time() - max(rental.created_unix, rental.seen_unix or 0.0)
    late = forgets_s is not None and noted_s > forgets_s / NOTES
    return rentals.seen(rental) if late or rental.absent_unix else rental


def _forgotten(rental: Rental) -> str:
    looks = rental.absent_unix
    if len(looks) < ABSENCES:
        return ""
    return (
        f"without a proof, which {rental.provider} cannot give: {len(looks)} looks over "
        f"{(looks[-1] - looks[0]) / 60:.0f} min did not show it, neither by its id nor in the list"
    )


def destroy(
    provider: Provider,
    machine: Machine,
    warrant: Warrant,
    rental: Rental,
    within_s: float,
    check: Callable[[], None] = lambda: None,
    accepts: Callable[[], None] = lambda: None,
) -> str:
    """Destroy the machine, repeatedly, until the provider proves its end and shows nothing else of
    its label; returns the proof, or what stands for one that the provider no longer keeps.

    A provider that has not settled may claim the end of a machine that it does not show yet. Raises
    StillChanging if the warrant grows too old before the provider accepts, and EndUnproven if
    there is no proof in time: the machine may still cost money. ``check`` may raise before each
    request; ``accepts`` is called once the provider has accepted the end.
    """
    asked = _Request(provider, machine, warrant, rental, within_s, check, accepts)
    wait_s = FIRST_POLL_S
    while True:
        fault: TorporError | None = None
        try:
            if proof := asked.again(wait_s):
                return proof
        except TorporError as error:
            if not error.retryable:
                raise
            fault = error
        if time.monotonic() > asked.give_up_s:
            if isinstance(fault, StoreError):  # the store must say whether the machine may go
                raise fault
            raise _unproven(provider, machine, asked.is_accepted, within_s, fault)
        time.sleep(wait_s)
        wait_s = min(2 * wait_s, _LONGEST_POLL_S)


class _Request:
    """The request to destroy one machine, sent again and again. ``give_up_s``: until when, on the
    monotonic clock; ``is_accepted``: whether the provider has accepted the end of the machine."""

    def __init__(
        self,
        provider: Provider,
        machine: Machine,
        warrant: Warrant,
        rental: Rental,
        within_s: float,
        check: Callable[[], None],
        accepts: Callable[[], None],
    ) -> None:
        self._provider = provider
        self._machine = machine
        self._warrant = warrant
        self._rental = rental
        self._check = check
        self._accepts = accepts
        self._settled_unix = rental.created_unix + provider.abilities.settling_s
        self._was_shown = self._has_told = False
        self.give_up_s = time.monotonic() + within_s
        self.is_accepted = False

    def again(self, wait_s: float) -> str:
        """Look at the machine, and ask for its end unless that is proven; returns the proof, or an
        empty text. ``wait_s``: seconds until the next look."""
        live = self._provider.find(self._machine.id)
        self._check()
        if isinstance(live, Machine):
            self._end_shown(live, wait_s)
            return ""
        proof = self._proof(live)
        if not proof:
            self._provider.destroy(self._machine, self._warrant)
        return proof

    def _end_shown(self, live: Machine, wait_s: float) -> None:
        """Ask for the end of a machine that the provider shows, and say so once it has accepted. An
        end that takes hours is waited for SLOW_S."""
        self._was_shown = True
        is_ending = live.state == "stopping"
        if is_ending and not self.is_accepted and self._provider.abilities.ending_s:
            self.give_up_s = min(self.give_up_s, time.monotonic() + SLOW_S)
        self.is_accepted = is_ending
        self._provider.destroy(live, self._warrant)
        self._warrant.accepted()
        if self._warrant.is_accepted and not self._has_told:
            self._has_told = True
            # without patience: the machine costs money, and its end must be seen soon
            with hurried():
                self._accepts()
            self.give_up_s = max(self.give_up_s, time.monotonic() + wait_s)  # one more look

    def _proof(self, absent: Absent) -> str:
        """Why a machine that the provider does not show counts as gone, with everything that
        belonged to it; empty while it may live, also because it may not show yet."""
        proof = _proof_of(self._provider, absent, shown=self._was_shown)
        proof = proof or _forgotten(self._rental)
        if not proof or (not self._was_shown and time.time() < self._settled_unix):
            return ""
        return "" if residue_of(self._provider, self._machine.label) else proof


def _proof_of(provider: Provider, absent: Absent, shown: bool) -> str:
    """The proof in ``absent`` that counts. ``shown``: this account has shown the machine to this
    run."""
    return absent.proof if shown or not _is_claimed(provider) else ""


def _is_claimed(provider: Provider) -> bool:
    return isinstance(provider, Claims) and provider.claimed


def _unproven(
    provider: Provider,
    machine: Machine,
    accepted: bool,
    within_s: float,
    fault: TorporError | None,
) -> EndUnproven:
    ending_s = provider.abilities.ending_s
    if accepted and ending_s:
        error = EndUnproven(
            f"machine {machine.id} at {provider.identity} was told to end, which the provider has "
            f"accepted and may take up to {ending_s / 3600:.0f} h to do: do not work on it. Until "
            "then it costs money. `torpor reconcile WORKSPACE --abandoned` records its end once "
            "that is proven"
        )
    else:
        error = EndUnproven(
            f"machine {machine.id} at {provider.identity} was told to end but its end is not "
            f"proven after {within_s:.0f} s{f' ({fault})' if fault else ''}: it may still cost "
            "money; check the provider's console, then run `torpor reconcile WORKSPACE`"
        )
    error.accepted = accepted
    return error


def close_lost(
    rentals: Rentals,
    provider: Provider,
    rental: Rental,
    gone: str,
    warn: Callable[[str], None],
    first: Callable[[Rental], None] = lambda rental: None,
) -> bool:
    """Close the rental of a machine that was taken back, or ended in the console, where ``gone``
    says why it counts as gone and nothing of its label is left; ``first`` gets its record right
    before. One with a snapshot was ended by a hibernation that has not recorded it yet. Nothing is
    destroyed."""
    if not gone or residue_of(provider, rental.label):
        return False
    bill = billed(provider, rental, time.time())
    now = rentals.of(rental.label)
    if now is None:  # another run has recorded its end
        return True
    first(now)
    why = gone if now.snapshot is not None else f"it was gone: {gone}"
    rentals.change(now, state="ended", why=why, **bill)
    warn(f"machine {rental.machine} at {rental.provider} is gone: {gone}")
    return True


def close_unseen(rentals: Rentals, provider: Provider, rental: Rental) -> None:
    """Close the rental of a machine that nobody ever saw, once two listings showed none: the first
    when the provider has settled since the request, the second as long after it."""
    settling_s, now = provider.abilities.settling_s, time.time()
    unseen = rental.unseen_unix
    if now < rental.created_unix + settling_s:
        unseen = None
    elif unseen is None:
        unseen = now
    if rental.state != "abandoned" or unseen != rental.unseen_unix:
        why = rental.why or "no machine was seen"
        rental = rentals.change(rental, state="abandoned", why=why, unseen_unix=unseen)
    if unseen is None or now < unseen + settling_s:
        return
    if listed(provider, rental.label) is None and not residue_of(provider, rental.label):
        rentals.change(rental, state="ended", why="no machine was seen in two listings")


def residue_of(provider: Provider, label: Label | None) -> list[str]:
    """What exists beside or after a machine with this label, and may cost money."""
    left = [residue for residue in provider.residue() if residue.label == label]
    return [residue.id for residue in left if residue.kind not in FREE]


def billed(provider: Provider, rental: Rental, now_unix: float) -> dict[str, float]:
    """The record's fields about the price of a rental that ends now: the mean price, by its
    market's history. Without a history, the upper bound stays in the record."""
    if not rental.most_usd_h or rental.machine is None or not isinstance(provider, Prices):
        return {}
    try:
        rise = provider.rise_usd_h(rental.offer, rental.created_unix, now_unix)
    except TorporError:
        return {}
    return {"price_usd_h": min(rental.price_usd_h + rise, rental.most_usd_h), "most_usd_h": 0.0}
