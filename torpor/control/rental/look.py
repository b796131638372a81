"""A look at the machines of a workspace: its open rentals beside what the markets show. A look ends
no machine and changes no rental."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable

import msgspec

from torpor.control.rental.markets import Markets, machines_at, recall
from torpor.control.rental.records import Rental, Rentals, by_label
from torpor.control.store.records import Unread
from torpor.shared.values import Machine


class Shown(msgspec.Struct, frozen=True):
    """``rentals``: the open ones. ``machines``: what the markets show of the workspace, each with
    its open rental, if the store has one. ``moved``: the rentals of machines that another account
    shows than their records name; here they are at that account."""

    rentals: list[Rental]
    machines: list[tuple[Machine, Rental | None]]
    moved: list[Rental]

    @property
    def unsettled(self) -> bool:
        """Whether the sweep comes before a machine is chosen: the markets show a machine that no
        run will use, or show none at all although a rental is open."""
        if not self.machines:
            return bool(self.rentals)
        return any(rental and rental.state == "abandoned" for _, rental in self.machines)


def look(
    ledger: Rentals,
    markets: Markets,
    warn: Callable[[str], None],
    unread: Unread | None = None,
) -> Shown:
    """The machines and rentals of the workspace, at all providers that it or an open rental names.
    ``unread``: as in Records.read_each; only for a caller that shows them."""
    rentals = ledger.open(unread)
    providers = markets.concerned(rentals)
    recall(providers, rentals)
    seen = machines_at(providers, rentals, warn)
    mine = [one for one in seen if one.label and one.label.workspace == ledger.workspace]
    known = {provider.identity for provider in providers}
    found = [moved_to(mine, rental, known) or rental for rental in rentals]
    of = by_label(found)
    machines = [(one, of.get(one.label)) for one in mine if one.label is not None]
    return Shown(found, machines, [rental for rental in found if rental not in rentals])


def moved_to(shown: Iterable[Machine], rental: Rental, known: Collection[str]) -> Rental | None:
    """The rental at the account that shows its machine, where the one of its record is not
    ``known``: its API key was changed, and with it its name. A label is of one machine alone."""
    if rental.provider in known:
        return None
    for machine in shown:
        if machine.label == rental.label:
            return msgspec.structs.replace(rental, provider=machine.provider, machine=machine.id)
    return None


def record_account(ledger: Rentals, moved: Rental, warn: Callable[[str], None]) -> None:
    """Record the account that shows the machine of this rental."""
    warn(
        f"rental {moved.label.rental} goes over to {moved.provider}, which shows its machine: no "
        "provider block is for the account of its record"
    )
    ledger.change(moved, provider=moved.provider, machine=moved.machine)
