"""Renting: attempts over offers, the machines that a run holds, and their proven ends."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Final

import msgspec

from torpor.control.providers.offers import Offer, blocks
from torpor.control.providers.provider import volumes_of
from torpor.control.rental.ending import (
    GONE_S,
    end_machine,
    wait_until_shown,
)
from torpor.control.rental.greeting import greeting_fault
from torpor.control.rental.look import Shown, look
from torpor.control.rental.markets import ask_all
from torpor.control.rental.order import host_key_of, order_for
from torpor.control.rental.records import Rental, with_host_key
from torpor.control.rental.renter import Renter
from torpor.control.rental.search import OfferOutcome
from torpor.control.rental.sweep import costs_on, end_abandoned, words_of_stuck
from torpor.control.rental.waiting import wait_until_reachable
from torpor.control.safety import Warrant
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
from torpor.shared.values import Label, Machine, MachineId

MOST_ATTEMPTS: Final = 12
RENT_S: Final = 3600.0
"""Seconds after which no further offer is tried."""
AT_ONCE_S: Final = 30.0
"""Seconds to wait for the end of a failed attempt's machine before the next offer is tried."""
_QUEUED_S: Final = 60.0  # seconds between two records that a machine waits in its provider's queue
_PAUSES: Final = 3  # waits for one offer's provider that is busy (429)
_PAUSE_S: Final = 60.0  # seconds of the longest of these waits
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

    A machine that this run rented may be ended until it is handed over. A machine that a killed run
    left (``fresh`` is false) may be ended only after its agent has said that it holds an unfinished
    restore and nothing else. The user's own machine is never ended.
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
        """Record the agent's answer that the targets were empty, or held only an unfinished
        restore."""
        if self._renting is not None and self.rental is not None:
            self._renting.claim(self.rental)

    def abandon(self, why: str) -> None:
        """End the machine after the error that follows. Its record says so at once, so that no
        other run takes it up. HandedOver if another run may have begun to use it meanwhile."""
        if self._renting is not None and self.rental is not None:
            self._renting.abandon(self.rental, why)

    def check_unclaimed(self) -> None:
        """HandedOver if another run has handed the machine over, or ended it. Two runs may take a
        machine that a killed run left."""
        if self._renting is not None and self.rental is not None:
            self._renting.check_unclaimed(self.rental.label)

    def hand_over(
        self,
        *,
        alone: bool = False,
        fetched_bytes: int = 0,
        fetched_s: float = 0.0,
        starting: bool = False,
        untaken: bool = False,
    ) -> None:
        """From now on only a verified snapshot may end the machine. ``alone``: HandedOver if
        another run has handed over a machine of the workspace since this one began.
        ``fetched_bytes``: what was read from the store in ``fetched_s``, for the record.
        ``starting``: this run starts the workspace's programs next. ``untaken``: HandedOver if
        another run may have taken the machine up since this one did."""
        if self._renting is not None and self.rental is not None:
            rental = msgspec.structs.replace(
                self.rental,
                fetched_bytes=fetched_bytes,
                fetched_s=fetched_s,
                starting=starting,
            )
            self._renting.hand_over(rental, self.machine, alone=alone, untaken=untaken)

    def __enter__(self) -> Tenancy:
        return self

    def __exit__(self, kind: object, cause: BaseException | None, trace: object) -> None:
        if cause is None or self._renting is None or self.rental is None:
            return
        if isinstance(cause, WorkspaceBusy):  # another run restores on this very machine
            self._renting.leave(self.rental)
        self._renting.end_after(cause, [self.rental])


class Renting:
    """One run's rentals of one workspace. As a context: machines that were not handed over are
    ended at the end. Thread-safe."""

    def __init__(self, renter: Renter) -> None:
        self._by = renter
        self._rentals = renter.rentals
        self._ours: dict[Label, Rental] = {}  # the rentals whose machines this run may end
        # the labels that were handed over when this run first looked
        self._over_before: set[Label] | None = None
        self._lock = threading.Lock()
        self._first = threading.Lock()
        self._swept = False
        self._stuck: list[str] = []
        self.tried: list[OfferOutcome] = []

    def __enter__(self) -> Renting:
        return self

    def __exit__(self, kind: object, cause: BaseException | None, trace: object) -> None:
        self.end_after(cause, [*self._ours.values()])

    # -- what there is

    def machines(self, unread: Unread | None = None) -> list[tuple[Machine, Rental | None]]:
        """The workspace's live machines at all providers that it or an open rental names.
        ``unread``: as in Records.read_each; to show them, and for nothing else."""
        return self.look(unread).machines

    def look(self, unread: Unread | None = None) -> Shown:
        """``look.look``; the first look of this run notes which machines were handed over
        before."""
        shown = look(self._rentals, self._by.markets, self._by.listener.warn, unread)
        if self._over_before is None:
            self._over_before = {r.label for r in shown.rentals if r.state == "handed over"}
        return shown

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
        """Whether a machine of the workspace can neither be used nor be ended, so that a further
        machine would cost money beside it."""
        return bool(self._stuck)

    def take_up(
        self,
        tenancy: Tenancy,
        nap: Callable[[float], None] = time.sleep,
        *,
        untaken: bool = False,
    ) -> Tenancy:
        """Wait until a machine that another run left answers. If it does not answer, it is not
        ended, because it may hold that run's restore. ``untaken``: HandedOver if another run has
        written its record since the record was read."""
        rental = tenancy.rental
        if rental is None:
            return tenancy
        host_key = rental.host_key
        provider = self._by.markets.of(rental.provider)
        self._by.listener.starts(tenancy.machine)
        try:
            live = wait_until_reachable(
                provider,
                tenancy.machine.id,
                timeout_s=provider.abilities.ready_s,
                sleep=nap,
                greets=lambda endpoint: greeting_fault(endpoint, host_key, self._by.identity),
                told=self._by.listener.warn,
                queued=self._record_queued(rental),
            )
        except (CreateFailed, MachineUnreachable) as error:
            raise type(error)(
                f"{error}. The machine of rental {rental.label.rental} may hold another run's "
                "restore, so it was not destroyed. Run this again; if the machine never answers, "
                "name it in `end` of reconcile, which lists it"
            ) from error
        shows = {"state": "standing", "provider": live.provider, "machine": live.id}
        seen_unix, job = time.time(), self._by.job
        try:
            rental = self._rentals.change_untaken(rental, **shows, seen_unix=seen_unix, job=job)
        except HandedOver:  # if another run uses it meanwhile, that run's job stays on record
            if untaken:
                raise
            rental = self._rentals.change(rental, **shows, seen_unix=seen_unix)
        return Tenancy(with_host_key(live, rental), rental, self, fresh=False)

    def look_with_late(self, nap: Callable[[float], None] = time.sleep) -> Shown:
        """Look after waiting for the machines of killed runs that their markets do not show yet:
        otherwise each of them would be rented once more."""
        shown = self.look()
        there = {machine.label for machine, _ in shown.machines}
        late = [r for r in shown.rentals if r.state == "standing" and r.label not in there]
        wait_until_shown(self._by.markets.of, late, self._by.listener.warn, nap)
        return self.look() if late else shown

    def rent(self, offers: Sequence[Offer], nap: Callable[[float], None] = time.sleep) -> Tenancy:
        """A machine of the first offer that becomes one; SSH answers there.

        Each attempt is a rental of its own. A provider that does not answer is asked again after
        all others. ``nap`` sleeps between two looks, and may raise to stop waiting. CreateFailed
        names what was tried. EndUnproven where the machine of an attempt, of this run or of an
        earlier one, can neither be used nor be ended: no offer is tried while it costs money.
        """
        self._end_abandoned_once()
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
                self._by.listener.warn(f"offer {offer.id} failed, trying the next: {error}")
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

    def abandon(self, rental: Rental, why: str) -> None:
        """Abandon the rental; see Tenancy.abandon."""
        self._rentals.change_untaken(rental, state="abandoned", why=why)
        self.claim(rental)

    def leave(self, rental: Rental) -> None:
        """From now on this run does not end the rental's machine."""
        with self._lock:
            self._ours.pop(rental.label, None)

    def hand_over(
        self, rental: Rental, machine: Machine, *, alone: bool, untaken: bool = False
    ) -> None:
        """Hand the machine to its user. ``alone``: HandedOver if another one has been handed over
        since this run first looked for machines. ``untaken``: HandedOver if another run has written
        the record since it was ``rental``."""
        others = self._rentals.open() if alone else []
        for other in others:
            if other.state == "handed over" and other.label not in (self._over_before or ()):
                raise HandedOver(
                    f"another run has handed over machine {other.machine} of workspace "
                    f"{self._rentals.workspace} meanwhile: use that one"
                )
        self.leave(rental)  # first, because a write whose answer is lost may have been done
        change = self._rentals.change_untaken if untaken else self._rentals.change
        change(
            rental,
            state="handed over",
            provider=machine.provider,
            machine=machine.id,
            seen_unix=time.time(),
            job=self._by.job,
            starting=rental.starting,
            **rental.measured,
        )
        self._by.listener.handed_over(machine)

    # -- the end

    def check_unclaimed(self, label: Label) -> None:
        """Raise as Rentals.check_unclaimed does."""
        self._rentals.check_unclaimed(label)

    def end(
        self,
        rental: Rental,
        warrant: Warrant | None = None,
        shown: Machine | None = None,
        *,
        within_s: float = GONE_S,
    ) -> None:
        """End the rental's machine (``ending.end_machine``); afterwards this run has nothing to end
        of it."""
        end_machine(self._by, rental, warrant, shown, within_s=within_s)
        self.leave(rental)

    def end_after(self, cause: BaseException | None, rentals: Sequence[Rental]) -> None:
        """End the machines that this run may end. If one cannot be ended, the error names both
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
                self._by.listener.warn(str(error))
            except TorporError as error:
                self.leave(rental)  # left for reconcile and the next run
                self._by.listener.warn(str(error))
                if cause is not None or rental.state != "abandoned":
                    faults.append(error)
                if costs_on(rental, error):
                    self._stuck.append(words_of_stuck(rental, str(cause or rental.why), error))
                with suppress(TorporError):
                    self._rentals.change(rental, state="abandoned", why=str(error))
        if faults and cause is None:
            raise faults[0]
        if faults and isinstance(cause, TorporError):
            raise type(cause)(
                f"{cause}. Its machine could not be destroyed either: {faults[0]}"
            ) from cause

    def end_abandoned(self, *, within_s: float = GONE_S) -> list[Rental]:
        """Run ``sweep.end_abandoned``; returns the ended rentals. While a machine cannot be ended,
        ``rent`` rents none."""
        self._swept = True
        ended, stuck = end_abandoned(self._by, self.look(), self._ours, within_s=within_s)
        self._stuck += stuck
        return ended

    # -- one attempt

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
                by.listener.asks(offer)
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
            by.listener.starts(machine)
            left_s = max(1.0, until - time.monotonic())
            live = wait_until_reachable(
                provider,
                machine.id,
                timeout_s=able.ready_s if able.queue_s else min(able.ready_s, left_s),
                sleep=nap,
                greets=lambda endpoint: greeting_fault(endpoint, host_key, self._by.identity),
                told=self._by.listener.warn,
                queued=self._record_queued(rental),
                label=label,
            )
        except BaseException as cause:
            fault = self._abandon(rental, cause)
            if fault is not None and isinstance(cause, _NEXT_OFFER):
                words = words_of_stuck(self._ours.get(label, rental), str(cause), fault)
                self._stuck.append(words)
                raise EndUnproven(words) from cause
            raise
        rental = msgspec.structs.replace(
            rental,
            answered_unix=time.time(),
            # the market's price is the one that is billed
            price_usd_h=live.price_usd_h or rental.price_usd_h,
        )
        self.claim(rental)
        self._by.listener.created(live)
        return Tenancy(with_host_key(live, rental), rental, self, fresh=True)

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

    def _abandon(self, rental: Rental, cause: BaseException) -> TorporError | None:
        """Mark the rental as abandoned. Its machine is ended now if it shows, at the end of the run
        if that takes time, or by a later run. Returns why its machine cannot be ended; None where
        it has ended, or its provider has accepted to end it, or nobody knows of a machine."""
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
            self._by.listener.warn(str(error))
        except TorporError as error:
            self._by.listener.warn(f"rental {rental.label.rental} is not ended yet: {error}")
            return error if costs_on(rental, error) else None
        return None

    def _end_abandoned_once(self) -> None:
        """Run the sweep, unless this run has done so before."""
        with self._first:
            if not self._swept and any(
                rental.state == "abandoned" and rental.machine and rental.label not in self._ours
                for rental in self._rentals.open()
            ):
                self.end_abandoned(within_s=AT_ONCE_S)
            self._swept = True

    def _note(self, offer: Offer, outcome: str) -> None:
        with self._lock:
            self.tried.append(OfferOutcome.of(offer, outcome))


def _is_failure(cause: BaseException) -> bool:
    """Whether the market failed to make a machine, and not our account or the connection to the
    market."""
    failed = isinstance(cause, (CreateFailed, MachineUnreachable))
    return failed and not isinstance(cause, QuotaReached)


def _last(offers: Sequence[Offer], provider: str) -> list[Offer]:
    return sorted(offers, key=lambda offer: offer.provider == provider)
