"""Renting: attempts over offers, the machines that a run holds, and their proven ends."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, Final

import msgspec

from torpor.control.providers.offers import Offer, blocks
from torpor.control.providers.seam import volumes_of
from torpor.control.rental.billing import billed, measured
from torpor.control.rental.ending import (
    GONE_S,
    close_lost,
    close_unseen,
    destroy,
    last_known,
    listed,
    look_for,
    seen_again,
    wait_until_shown,
)
from torpor.control.rental.greeting import greeting_fault
from torpor.control.rental.markets import ask_all, at_home, machines_at, recall
from torpor.control.rental.order import host_key_of, order_for
from torpor.control.rental.records import Rental, by_label
from torpor.control.rental.renter import Renter
from torpor.control.rental.search import Tried
from torpor.control.rental.waiting import wait_until_reachable
from torpor.control.safety import Warrant, never_handed_over
from torpor.control.store.records import Unread
from torpor.shared.errors import (
    CreateFailed,
    CreateUncertain,
    EndUnproven,
    HandedOver,
    InvalidInput,
    MachineUnreachable,
    MachineUnread,
    ProviderDenied,
    ProviderError,
    ProviderUnavailable,
    QuotaReached,
    StoreError,
    TorporError,
    WorkspaceBusy,
)
from torpor.shared.transfer.retries import hurried
from torpor.shared.values import (
    RESERVED,
    Endpoint,
    Label,
    Machine,
    MachineId,
    SnapshotId,
    owner_of,
)

MOST_ATTEMPTS: Final = 12
RENT_S: Final = 3600.0
"""After this time no further offer is tried."""
ASKED_S: Final = 900.0
"""A request that is so old and has no machine belongs to a run that was killed."""
AT_ONCE_S: Final = 30.0
"""How long a failed attempt is waited for to end before the next offer is tried."""
_QUEUED_S: Final = 60.0  # between two records that a machine waits in its provider's queue
_PAUSES: Final = 3  # waits for one offer's provider that is busy (429)
_PAUSE_S: Final = 60.0  # the longest of them
_NOTHING_RENTED: Final = (
    CreateFailed,
    ProviderDenied,
    ProviderUnavailable,
    InvalidInput,
    MachineUnread,
)
_NEXT_OFFER: Final = (ProviderError, MachineUnreachable)
_SILENT: Final = (ProviderUnavailable, CreateUncertain)


class Tenancy:
    """One machine of a run. As a context: ends the machine after an error, if that is safe.

    A machine that this run rented may be ended until it is handed over. One that a killed run left
    (``fresh`` is false) may be ended only after its agent has said that it holds an unfinished
    restore and nothing else. The user's own never.
    """

    def __init__(
        self, machine: Machine, rental: Rental | None, renting: Renting | None, *, fresh: bool
    ) -> None:
        self.machine = machine
        self.rental = rental
        self.fresh = fresh
        self.chosen = ""  # why its offer was rented before others, for people
        self._renting = renting

    def holds_nothing_else(self) -> None:
        """Record the agent's answer: the targets were empty, or an unfinished restore's."""
        if self._renting is not None and self.rental is not None:
            self._renting.claim(self.rental)

    def check_unclaimed(self) -> None:
        """HandedOver if another run has handed the machine over, or ended it. A machine that a
        killed run left may be another run's too."""
        if self._renting is not None and self.rental is not None:
            self._renting.check_unclaimed(self.rental.label)

    def hand_over(
        self,
        *,
        alone: bool = False,
        fetched_bytes: int = 0,
        fetched_s: float = 0.0,
        starting: bool = False,
    ) -> None:
        """From now on only a verified snapshot may end the machine. ``alone``: HandedOver if
        another run has handed over a machine of the workspace since this one began.
        ``fetched_bytes``: what was read from the store in ``fetched_s``, for the record.
        ``starting``: this run starts the workspace's programs next."""
        if self._renting is not None and self.rental is not None:
            rental = msgspec.structs.replace(
                self.rental,
                fetched_bytes=fetched_bytes,
                fetched_s=fetched_s,
                starting=starting,
            )
            self._renting.hand_over(rental, self.machine, alone=alone)

    def __enter__(self) -> Tenancy:
        return self

    def __exit__(self, kind: object, cause: BaseException | None, trace: object) -> None:
        if cause is None or self._renting is None or self.rental is None:
            return
        if isinstance(cause, WorkspaceBusy):  # another run brings it to this very machine
            self._renting.leave(self.rental)
        self._renting.end_after(cause, [self.rental])


class Renting:
    """One run's rentals of one workspace. As a context: at the end, whatever of them was not handed
    over is ended. Thread-safe."""

    def __init__(self, renter: Renter) -> None:
        self._by = renter
        self._rentals = renter.rentals
        self._ours: dict[Label, Rental] = {}  # what this run may end
        self._over_before: set[Label] | None = None  # handed over when this run looked first
        self._lock = threading.Lock()
        self._first = threading.Lock()
        self._tried_to_end = False  # what earlier runs abandoned
        self._stuck: list[str] = []
        self.tried: list[Tried] = []

    def __enter__(self) -> Renting:
        return self

    def __exit__(self, kind: object, cause: BaseException | None, trace: object) -> None:
        self.end_after(cause, [*self._ours.values()])

    # -- what there is

    def machines(self, unread: Unread | None = None) -> list[tuple[Machine, Rental | None]]:
        """The workspace's live machines at all providers that it or an open rental names.
        ``unread``: as in Records.read_each; to show them, and for nothing else."""
        rentals, machines = self._look(unread)
        known = by_label(rentals)
        return [
            (machine, known.get(machine.label)) for machine in machines if machine.label is not None
        ]

    def states(self) -> dict[MachineId, str]:
        """What the workspace's providers say of all machines now; the error of one that does not
        answer, because unknown is not gone."""
        found: dict[MachineId, str] = {}
        for answer in ask_all(self._by.markets.named, lambda provider: provider.list_own()):
            if isinstance(answer, TorporError):
                raise answer
            found |= {machine.id: machine.state for machine in answer}
        return found

    def tenancy(self, machine: Machine, rental: Rental) -> Tenancy:
        """The tenancy of a machine that another run left unfinished, or works on."""
        rental = msgspec.structs.replace(rental, provider=machine.provider, machine=machine.id)
        return Tenancy(machine, rental, self, fresh=False)

    # -- a new machine

    @property
    def is_stuck(self) -> bool:
        """Whether a machine of the workspace that nobody can use cannot be ended either: whoever
        rented another one would pay for both."""
        return bool(self._stuck)

    def take_up(self, tenancy: Tenancy, nap: Callable[[float], None] = time.sleep) -> Tenancy:
        """Wait until a machine that another run left answers. It is not ended where it does not: it
        may hold that run's restore."""
        rental = tenancy.rental
        if rental is None:
            return tenancy
        host_key = rental.host_key
        provider = self._by.markets.of(rental.provider)
        self._by.told.starts(tenancy.machine)
        try:
            live = wait_until_reachable(
                provider,
                tenancy.machine.id,
                timeout_s=provider.abilities.ready_s,
                sleep=nap,
                greets=lambda endpoint: greeting_fault(endpoint, host_key, self._by.identity),
                told=self._by.told.warn,
                queued=self._record_queued(rental),
            )
        except (CreateFailed, MachineUnreachable) as error:
            raise type(error)(
                f"{error}. The machine of rental {rental.label.rental} may hold another run's "
                "restore, so it was not destroyed. Run this again; if the machine never answers, "
                "name it in `end` of reconcile, which lists it"
            ) from error
        now = self._rentals.of(rental.label)  # another run may have taken it up meanwhile
        rental = self._rentals.change(
            rental,
            state="standing",
            provider=live.provider,
            machine=live.id,
            seen_unix=time.time(),
            job=self._by.job if now is not None and now.job == self._by.job else "",
        )
        return Tenancy(self.pinned(live, rental), rental, self, fresh=False)

    def wait_for_late(self, nap: Callable[[float], None] = time.sleep) -> None:
        """Wait for the machines of killed runs that their markets do not show yet: otherwise each
        would be rented once more."""
        rentals, machines = self._look()
        shown = {machine.label for machine in machines}
        late = [r for r in rentals if r.state == "standing" and r.label not in shown]
        wait_until_shown(self._by.markets.of, late, self._by.told.warn, nap)

    def rent(self, offers: Sequence[Offer], nap: Callable[[float], None] = time.sleep) -> Tenancy:
        """A machine of the first offer that becomes one; SSH answers there.

        Each attempt is a rental of its own. A provider that does not answer is asked again after
        all others. ``nap`` sleeps between two looks, and may raise to stop waiting. CreateFailed
        names what was tried. EndUnproven where the machine of an attempt, of this run or of an
        earlier one, can neither be used nor be ended: no offer is tried while it costs money.
        """
        self._end_what_was_abandoned()
        failed: list[tuple[TorporError, Offer]] = []
        left = list(offers)
        until = time.monotonic() + RENT_S
        while left and len(failed) < MOST_ATTEMPTS and time.monotonic() <= until:
            if self.is_stuck:
                raise EndUnproven("; ".join(self._stuck))
            offer = left.pop(0)
            blocked = next((error for error, other in failed if blocks(error, other, offer)), None)
            if blocked is not None:
                self._note(offer, f"not tried: {blocked}")
                continue
            try:
                tenancy = self._rent(offer, nap, until)
            except (HandedOver, EndUnproven):
                raise
            except _NEXT_OFFER as error:
                self._by.told.warn(f"offer {offer.id} failed, trying the next: {error}")
                self._note(offer, str(error))
                failed.append((error, offer))
                if isinstance(error, _SILENT):
                    left = _last(left, offer.provider)
            else:
                self._note(offer, f"machine {tenancy.machine.id}")
                return tenancy
        words = "; ".join(f"{offer.id} at {offer.provider}: {error}" for error, offer in failed[:5])
        raise CreateFailed(
            f"none of {len(offers)} offers became a machine, {len(failed)} were tried: {words}"
        )

    def claim(self, rental: Rental) -> None:
        """From now on this run may end the rental's machine."""
        with self._lock:
            self._ours[rental.label] = rental

    def leave(self, rental: Rental) -> None:
        """From now on this run does not end the rental's machine."""
        with self._lock:
            self._ours.pop(rental.label, None)

    def hand_over(self, rental: Rental, machine: Machine, *, alone: bool) -> None:
        """Hand the machine to its user. ``alone``: HandedOver if another one has been handed over
        since this run first looked for machines."""
        others = self._rentals.open() if alone else []
        for other in others:
            if other.state == "handed over" and other.label not in (self._over_before or ()):
                raise HandedOver(
                    f"another run has handed over machine {other.machine} of workspace "
                    f"{self._rentals.workspace} meanwhile: use that one"
                )
        self.leave(rental)  # first: a write whose answer is lost may have been done
        self._rentals.change(
            rental,
            state="handed over",
            provider=machine.provider,
            machine=machine.id,
            seen_unix=time.time(),
            starting=rental.starting,
            **measured(rental),
        )
        self._by.told.handed_over(machine)

    def pin(self, label: Label, host_key: str) -> None:
        """Record the host key of the first login."""
        rental = self._rentals.of(label)
        if rental is not None and rental.host_key is None:
            self._rentals.change(rental, host_key=host_key)

    # -- the end

    def check_unclaimed(self, label: Label) -> None:
        """HandedOver unless it may still be ended; a machine under a reserved name always may."""
        if not label.workspace.startswith(RESERVED):
            self._rentals.check_unclaimed(label)

    def end(
        self,
        rental: Rental,
        warrant: Warrant | None = None,
        shown: Machine | None = None,
        *,
        within_s: float = GONE_S,
    ) -> None:
        """Destroy the rental's machine, and what belongs to it, until its end is proven. ``shown``:
        the machine, where the caller has just seen it.

        Without ``warrant``, of what was never handed over; HandedOver if another run has handed it
        over meanwhile. An adopted machine ends only with a snapshot's warrant. A rental whose
        machine was never seen is abandoned until its provider has settled.
        """
        label = rental.label
        if rental.adopted and (warrant is None or warrant.snapshot is None):
            raise HandedOver(
                f"machine {rental.machine} of workspace {label.workspace} was adopted, so only a "
                "verified snapshot of it may end it: it was left alone. Hibernate the workspace"
            )
        if warrant is None:
            self.check_unclaimed(label)
        provider = self._by.markets.of(rental.provider)
        recall([provider], [rental])
        shown = shown or listed(provider, label)
        seen = {} if shown is None else {"seen_unix": time.time()}
        machine = shown or last_known(provider, rental)
        if machine is None:
            close_unseen(self._rentals, provider, rental)
            self.leave(rental)
            return
        warrant = warrant or never_handed_over(machine, label, lambda: self.check_unclaimed(label))
        held = partial(self._rentals.check_held, rental)
        record = partial(self._record_last, rental, machine=machine.id, **seen)
        accepts = partial(record, warrant.snapshot) if warrant.snapshot else lambda: None
        try:
            why = destroy(provider, machine, warrant, rental, within_s, held, accepts)
        except BaseException as error:
            if isinstance(error, Exception):
                accepted = isinstance(error, EndUnproven) and error.accepted
            else:
                accepted = warrant.is_accepted  # interrupted: a later run sees the end
            if warrant.snapshot and (accepted or warrant.is_accepted):
                record(warrant.snapshot if accepted else None)  # else its disk may change again
            raise
        self.leave(rental)
        self._by.told.ended(machine, warrant.reason)
        with suppress(HandedOver):  # another run has seen the end, and recorded it
            self._rentals.change(
                rental,
                state="ended",
                machine=machine.id,
                why=why,
                snapshot=warrant.snapshot,
                **seen,
                **{**measured(rental), **billed(provider, rental)},
            )

    def _record_last(self, rental: Rental, snapshot: SnapshotId | None, /, **more: Any) -> None:
        """Record which snapshot holds what the machine held to the last: should this run be killed,
        or another one see the end first, it was not lost. Its end goes on also without that."""
        with suppress(HandedOver, StoreError):
            self._rentals.change(rental, snapshot=snapshot, **more)

    def end_after(self, cause: BaseException | None, rentals: Sequence[Rental]) -> None:
        """End those that this run may end. If one cannot be ended, an error of ours names both
        causes; a cancellation stays a cancellation. A failed attempt that cannot be ended fails no
        run that went well: it stays abandoned, for reconcile and the next run. No machine waits
        here, at its price, for a store that is away."""
        with hurried():
            self._end_after(cause, rentals)

    def _end_after(self, cause: BaseException | None, rentals: Sequence[Rental]) -> None:
        faults: list[TorporError] = []
        for rental in rentals:
            if rental.label not in self._ours:
                continue
            try:
                self.end(rental)
            except HandedOver as error:
                self.leave(rental)
                self._by.told.warn(str(error))
            except TorporError as error:
                self.leave(rental)  # for reconcile and the next run
                self._by.told.warn(str(error))
                if cause is not None or rental.state != "abandoned":
                    faults.append(error)
                if _costs_on(rental, error):
                    self._stuck.append(_stuck(rental, str(cause or rental.why), error))
                with suppress(TorporError):
                    self._rentals.change(rental, state="abandoned", why=str(error))
        if faults and cause is None:
            raise faults[0]
        if faults and isinstance(cause, TorporError):
            raise type(cause)(
                f"{cause}. Its machine could not be destroyed either: {faults[0]}"
            ) from cause

    def end_abandoned(self, *, within_s: float = GONE_S) -> list[Rental]:
        """End what nobody will use: abandoned rentals, old requests that never became a machine,
        and unfinished ones whose machine has provably gone. Close the rentals of machines that were
        handed over and have provably gone without us. Returns those that have ended; each may take
        ``within_s``. While one cannot be ended, ``rent`` rents none."""
        self._tried_to_end = True
        ended = []
        rentals, machines = self._look()
        shown = {machine.label: machine for machine in machines}
        for rental in rentals:
            if rental.label in self._ours:
                continue
            try:
                self._end_if_over(rental, shown.get(rental.label), within_s)
            except TorporError as error:
                self._by.told.warn(f"rental {rental.label.rental} was not ended: {error}")
                if rental.state == "abandoned" and _costs_on(rental, error):
                    self._stuck.append(_stuck(rental, rental.why, error))
            if self._rentals.of(rental.label) is None:
                ended.append(rental)
        return ended

    def close_if_gone(
        self,
        rental: Rental,
        *,
        shown: Machine | None,
        first: Callable[[Rental], None] = lambda rental: None,
    ) -> bool:
        """Close the rental of a machine that has gone without this run, right after ``first``,
        which gets its record; nothing is destroyed. Of one that its provider shows, note that."""
        provider = self._by.markets.of(rental.provider)
        if shown is not None:
            seen_again(self._rentals, provider, rental, shown)
            return False
        rental, gone = look_for(self._rentals, provider, rental)
        return close_lost(self._rentals, provider, rental, gone, self._by.told.warn, first)

    def end_scratch(self, *, before_unix: float = math.inf, spared: Collection[str] = ()) -> None:
        """Destroy the machines that killed runs left under this reserved name, at the providers
        that blocks are for, but those of the jobs ``spared``; raise the last failure after trying
        all. What cannot be ended is abandoned: `watch` ends it."""
        fault: TorporError | None = None
        rentals, _ = self._look()
        here = {provider.identity for provider in self._by.markets.concerned(rentals)}
        for rental in rentals:
            stays = rental.created_unix > before_unix or rental.job in spared
            stays = stays or rental.state == "handed over"  # from before the name was reserved
            if stays or rental.label in self._ours or rental.provider not in here:
                continue
            try:
                self.end(rental)
            except TorporError as error:
                fault = error
                with suppress(TorporError):
                    self._rentals.change(rental, state="abandoned", why=str(error)[:500])
        if fault is not None:
            raise fault

    # -- one look, one attempt

    def _look(self, unread: Unread | None = None) -> tuple[list[Rental], list[Machine]]:
        rentals = self._rentals.open(unread)
        if self._over_before is None:
            self._over_before = {
                rental.label for rental in rentals if rental.state == "handed over"
            }
        providers = self._by.markets.concerned(rentals)
        recall(providers, rentals)
        seen = machines_at(providers, rentals, self._by.told.warn)
        name = self._rentals.workspace
        mine = [machine for machine in seen if machine.label and machine.label.workspace == name]
        return at_home(self._rentals, rentals, providers, mine, self._by.told.warn), mine

    def _rent(self, offer: Offer, nap: Callable[[float], None], until: float) -> Tenancy:
        for _ in range(_PAUSES):
            try:
                return self._attempt(offer, nap, until)
            except ProviderUnavailable as error:
                if not 0 < error.retry_after_s <= _PAUSE_S:
                    raise
                nap(error.retry_after_s)
        return self._attempt(offer, nap, until)

    def _attempt(self, offer: Offer, nap: Callable[[float], None], until: float) -> Tenancy:
        provider = self._by.markets.of(offer.provider)
        able, label = provider.abilities, self._rentals.new_label(self._by.owner)
        order = order_for(offer, label, self._by.identity, self._by.want)
        own, by, volumes = able.host_key == "installed", self._by, volumes_of(provider)
        host_key = host_key_of(by.identity, label).public if own else None
        rental = self._rentals.begin(label, offer, host_key, by.project, by.job, volumes)
        self.claim(rental)
        try:
            asked = False
            try:
                self._by.afford(offer.bound_usd_h)
                by.told.asks(offer)
                asked = True
                machine = provider.create(order)
            except TorporError as error:
                if asked and not isinstance(error, _NOTHING_RENTED):
                    raise
                failed = asked and _is_failure(error)
                why = f"nothing was rented: {error}"
                self._rentals.change(rental, state="ended", why=why, failed=failed)
                self.leave(rental)
                raise
            rental = self._rentals.change(
                rental,
                state="standing",
                machine=machine.id,
                price_usd_h=machine.price_usd_h or offer.price_usd_h,
                seen_unix=time.time(),
            )
            self.claim(rental)
            by.told.starts(machine)
            left_s = max(1.0, until - time.monotonic())
            live = wait_until_reachable(
                provider,
                machine.id,
                timeout_s=able.ready_s if able.queue_s else min(able.ready_s, left_s),
                sleep=nap,
                greets=lambda endpoint: greeting_fault(endpoint, host_key, self._by.identity),
                told=self._by.told.warn,
                queued=self._record_queued(rental),
                label=label,
            )
        except BaseException as cause:
            fault = self._abandon(rental, cause)
            if fault is not None and isinstance(cause, _NEXT_OFFER):
                words = _stuck(self._ours.get(label, rental), str(cause), fault)
                self._stuck.append(words)
                raise EndUnproven(words) from cause
            raise
        rental = msgspec.structs.replace(
            rental,
            answered_unix=time.time(),
            price_usd_h=live.price_usd_h or rental.price_usd_h,  # the market's word is the bill
        )
        self.claim(rental)
        self._by.told.created(live)
        return Tenancy(self.pinned(live, rental), rental, self, fresh=True)

    def _record_queued(self, rental: Rental) -> Callable[[], None]:
        """Records, once a minute, that the provider's queue shows its machine."""
        last = -math.inf

        def see() -> None:
            nonlocal last
            if time.monotonic() - last >= _QUEUED_S:
                last = time.monotonic()
                with suppress(StoreError):  # the next look records it
                    self._rentals.change(rental, queued_unix=time.time())

        return see

    def pinned(self, machine: Machine, rental: Rental | None) -> Machine:
        """The machine with the only host key that it may show."""
        host_key = rental.host_key if rental else None
        if machine.endpoint is None or host_key is None:
            return machine
        endpoint: Endpoint = msgspec.structs.replace(machine.endpoint, host_key=host_key)
        return msgspec.structs.replace(machine, endpoint=endpoint)

    def _abandon(self, rental: Rental, cause: BaseException) -> TorporError | None:
        """Mark the rental as abandoned. End it now if its machine shows, at the end of the run if
        that takes time, or by a later run. Returns why its machine cannot be ended; None where it
        has ended, or its provider has accepted to end it, or nobody knows of a machine."""
        if rental.label not in self._ours:
            return None
        with suppress(TorporError):
            rental = self._rentals.change(
                rental,
                state="abandoned",
                why=str(cause)[:500],
                failed=_is_failure(cause),
            )
            self.claim(rental)
        try:
            self.end(rental, within_s=AT_ONCE_S)
        except HandedOver as error:
            self.leave(rental)
            self._by.told.warn(str(error))
        except TorporError as error:
            self._by.told.warn(f"rental {rental.label.rental} is not ended yet: {error}")
            return error if _costs_on(rental, error) else None
        return None

    def _end_what_was_abandoned(self) -> None:
        """Once a run, where it has not done so itself."""
        with self._first:
            if not self._tried_to_end and any(
                rental.state == "abandoned" and rental.machine and rental.label not in self._ours
                for rental in self._rentals.open()
            ):
                self.end_abandoned(within_s=AT_ONCE_S)
            self._tried_to_end = True

    def _end_if_over(self, rental: Rental, shown: Machine | None, within_s: float) -> None:
        gone = ""
        if shown is not None:
            provider = self._by.markets.of(rental.provider)
            rental = seen_again(self._rentals, provider, rental, shown)
        elif rental.machine is not None:
            provider = self._by.markets.of(rental.provider)
            rental, gone = look_for(self._rentals, provider, rental)
        if rental.state == "handed over":
            provider = self._by.markets.of(rental.provider)
            close_lost(self._rentals, provider, rental, gone, self._by.told.warn)
        elif rental.state == "abandoned":
            if gone or not rental.absent_unix:  # else no proof will come, and a later look ends it
                self.end(rental, within_s=within_s)
        elif gone or (not shown and self._is_old_request(rental)):
            self.end(rental, within_s=within_s)  # else the next run takes it up

    def _is_old_request(self, rental: Rental) -> bool:
        return rental.machine is None and time.time() - rental.created_unix > ASKED_S

    def _note(self, offer: Offer, outcome: str) -> None:
        with self._lock:
            self.tried.append(Tried.of(offer, outcome))


def _costs_on(rental: Rental, error: TorporError) -> bool:
    """Whether the machine of an abandoned rental goes on after an end that failed with ``error``.
    Its provider may have accepted to end it, and nobody may know of a machine: then it is looked
    for later."""
    accepted = isinstance(error, EndUnproven) and error.accepted
    unknown = rental.machine is None and error.retryable
    return not (accepted or unknown or isinstance(error, HandedOver))


def _stuck(rental: Rental, why: str, fault: TorporError) -> str:
    """What a machine that can neither be used nor be ended costs, and how to end it."""
    which = f"machine {rental.machine}" if rental.machine else "the machine that may exist"
    costs = f"{rental.bound_usd_h:.3f} $/h" if rental.bound_usd_h else "money"
    name = owner_of(rental.label.workspace)
    return (
        f"{which} at {rental.provider} could neither be used ({why or 'its run was killed'}) nor "
        f"be ended ({fault}). It costs {costs} until it ends, so no other machine is rented. "
        f"End it with `torpor reconcile {name} --abandoned`, or in the market's console. Where no "
        f"provider block is for its account any more, end it there and name its rental: `torpor "
        f"reconcile {name} --gone {rental.label.rental}`"
    )


def _is_failure(cause: BaseException) -> bool:
    """Whether the market, and not our account or the way to it, failed to make a machine."""
    failed = isinstance(cause, (CreateFailed, MachineUnreachable))
    return failed and not isinstance(cause, QuotaReached)


def _last(offers: Sequence[Offer], provider: str) -> list[Offer]:
    return sorted(offers, key=lambda offer: offer.provider == provider)
