"""The sweep: destroys the machines of earlier runs that nobody will use.

A machine is also ended by its own run after a failure (``Renting``, ``Tenancy``), by a hibernation
with the warrant of its snapshot, by a job whose machine does not start again, and by its user's
word in ``reconcile``. All of them call ``ending.end_machine``.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection
from contextlib import suppress
from typing import Final

from torpor.control.rental.ending import GONE_S, close_lost, end_machine, look_for, seen_again
from torpor.control.rental.look import Shown, look, moved_to, record_account
from torpor.control.rental.records import Rental
from torpor.control.rental.renter import Renter
from torpor.shared.errors import EndUnproven, HandedOver, TorporError
from torpor.shared.values import Label, Machine, owner_of

ASKED_S: Final = 900.0
"""Seconds after which a request without a machine belongs to a killed run."""


def end_abandoned(
    by: Renter, shown: Shown, ours: Collection[Label] = (), *, within_s: float = GONE_S
) -> tuple[list[Rental], list[str]]:
    """End what nobody will use: abandoned rentals, old requests that never became a machine, and
    unfinished ones whose machine has provably gone. Close the rentals of machines that were handed
    over and have provably gone without us. Each end may take ``within_s``; a machine that cannot be
    ended is a warning. ``ours``: the rentals of this run, which stay. Returns the ended rentals,
    and for each machine that can neither be used nor be ended, what it costs and how to end it."""
    machines = {machine.label: machine for machine, _ in shown.machines}
    ended, stuck = list[Rental](), list[str]()
    for rental in shown.rentals:
        if rental.label in ours:
            continue
        try:
            if rental in shown.moved:
                record_account(by.rentals, rental, by.listener.warn)
            _end_if_over(by, rental, machines.get(rental.label), within_s)
        except TorporError as error:
            by.listener.warn(f"rental {rental.label.rental} was not ended: {error}")
            if rental.state == "abandoned" and costs_on(rental, error):
                stuck.append(words_of_stuck(rental, rental.why, error))
        if by.rentals.of(rental.label) is None:
            ended.append(rental)
    return ended, stuck


def end_scratch(by: Renter, *, before_unix: float = math.inf, spared: Collection[str] = ()) -> None:
    """End the machines that killed runs left under a reserved name, at the providers that blocks
    are for, except those of the jobs in ``spared``; raise the last failure after trying all. A
    machine that cannot be ended is abandoned, and `watch` ends it."""
    fault: TorporError | None = None
    shown = look(by.rentals, by.markets, by.listener.warn)
    here = {provider.identity for provider in by.markets.concerned(shown.rentals)}
    for rental in shown.rentals:
        stays = rental.created_unix > before_unix or rental.job in spared
        stays = stays or rental.state == "handed over"  # from before the name was reserved
        if stays or rental.provider not in here:
            continue
        try:
            end_machine(by, rental)
        except TorporError as error:
            fault = error
            with suppress(TorporError):
                by.rentals.change(rental, state="abandoned", why=str(error)[:500])
    if fault is not None:
        raise fault


def close_if_gone(
    by: Renter,
    rental: Rental,
    *,
    shown: Machine | None,
    first: Callable[[Rental], None] = lambda rental: None,
) -> bool:
    """Close the rental of a machine that has ended without torpor, right after calling ``first``
    with its record; nothing is destroyed. For a machine that its provider shows, record that, and
    its account."""
    if shown is not None and shown.provider != rental.provider:
        known = {provider.identity for provider in by.markets.every()}
        if moved := moved_to([shown], rental, known):
            record_account(by.rentals, moved, by.listener.warn)
        return False
    provider = by.markets.of(rental.provider)
    if shown is not None:
        seen_again(by.rentals, provider, rental, shown)
        return False
    rental, gone = look_for(by.rentals, provider, rental)
    return close_lost(by.rentals, provider, rental, gone, by.listener.warn, first)


def costs_on(rental: Rental, error: TorporError) -> bool:
    """Whether the machine of an abandoned rental goes on after an end that failed with ``error``.
    False where its provider has accepted the end, or where no machine is known: then a later look
    finds out."""
    accepted = isinstance(error, EndUnproven) and error.accepted
    unknown = rental.machine is None and error.retryable
    return not (accepted or unknown or isinstance(error, HandedOver))


def words_of_stuck(rental: Rental, why: str, fault: TorporError) -> str:
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


def _end_if_over(by: Renter, rental: Rental, shown: Machine | None, within_s: float) -> None:
    gone = ""
    if shown is not None:
        provider = by.markets.of(rental.provider)
        rental = seen_again(by.rentals, provider, rental, shown)
    elif rental.machine is not None:
        provider = by.markets.of(rental.provider)
        rental, gone = look_for(by.rentals, provider, rental)
    if rental.state == "handed over":
        provider = by.markets.of(rental.provider)
        close_lost(by.rentals, provider, rental, gone, by.listener.warn)
    elif rental.state == "abandoned":
        if gone or not rental.absent_unix:  # otherwise no proof will come, and a later look ends it
            end_machine(by, rental, within_s=within_s)
    elif gone or (not shown and _is_old_request(rental)):
        end_machine(by, rental, within_s=within_s)  # otherwise the next run continues with it


def _is_old_request(rental: Rental) -> bool:
    return rental.machine is None and time.time() - rental.created_unix > ASKED_S
