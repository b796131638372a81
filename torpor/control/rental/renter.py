"""The renter of machines, and the listener to what happens to them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import asyncssh
import msgspec

from torpor.control.providers.offers import Offer
from torpor.control.rental.markets import Markets
from torpor.control.rental.records import Rentals
from torpor.shared.values import Machine, Want


class RentalListener(Protocol):
    """Told of machines and troubles, for a run's log and events."""

    def warn(self, message: str) -> None: ...
    def asks(self, offer: Offer) -> None: ...
    def starts(self, machine: Machine) -> None: ...
    def created(self, machine: Machine) -> None: ...
    def handed_over(self, machine: Machine) -> None: ...
    def ended(self, machine: Machine, reason: str) -> None: ...


class Renter(msgspec.Struct, frozen=True):
    """What a run needs to rent machines for a workspace; the same for all of its machines."""

    rentals: Rentals
    markets: Markets
    owner: str
    want: Want
    identity: asyncssh.SSHKey
    listener: RentalListener
    project: str = ""
    job: str = ""
    afford: Callable[[float], None] = lambda usd_h: None
    """Called with the machine's price after the rental is recorded and before the machine is asked
    for. Raises BudgetExceeded if the budgets do not allow what is recorded by then."""
