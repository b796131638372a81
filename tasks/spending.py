"""Reads the records that `spend` adds up: rentals of a store's workspaces, and the bytes that they
keep there."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tasks.runner import runner
from tasks.step import step
from tasks.workspace import OpenWorkspace
from torpor.control.money.costs import read, shown_now
from torpor.control.money.months import Month
from torpor.control.money.storage import StorageUse, look, stored, workspaces
from torpor.control.rental.markets import ask_all, recall
from torpor.control.rental.records import Rental, Rentals
from torpor.control.store.records import Unread
from torpor.control.store_prices import StorePrice
from torpor.control.time_zones import zone_named
from torpor.shared.errors import MachineUnread, TorporError
from torpor.shared.values import Label, WorkspaceName


@dataclass(frozen=True)
class SpendingRecords:
    """Everything that a store knows of money. ``of``: the workspace of each name that machines were
    rented under. ``unread``: the records that were left out because they cannot be trusted."""

    rentals: Sequence[Rental]
    of: Mapping[WorkspaceName, WorkspaceName]
    stored: Sequence[StorageUse]
    store_price: StorePrice | None
    now_unix: float
    unread: Unread


@step("read rentals")
def read_spending(opened: OpenWorkspace, since: Month, timezone: str) -> SpendingRecords:
    """The rentals of all workspaces in the store, from ``since`` on, and what each workspace
    keeps. Lists the whole store; changes nothing."""
    names = look(opened.store)
    ledgers = [Rentals(opened.store, name) for name in names]
    unread: Unread = {}
    found = read(ledgers, since.begin_us(zone_named(timezone)) / 1e6, unread)
    now_unix = time.time()
    rentals = shown_now(found, _shown(opened, found), now_unix)
    price = opened.store_price()
    of = workspaces(names)
    warn_of(unread)
    return SpendingRecords(rentals, of, stored(names, price), price, now_unix, unread)


def warn_of(unread: Unread) -> None:
    """A warning for each record that the figures leave out."""
    for why in unread.values():
        runner().log.warning("the figures are without a record: %s", why)


def _shown(opened: OpenWorkspace, rentals: Sequence[Rental]) -> dict[Label, str]:
    """The labels of machines that providers show now. A provider that does not answer is a warning:
    its machines then count until they were last seen."""
    still_open = [rental for rental in rentals if rental.state != "ended"]
    try:
        providers = opened.markets.concerned(still_open) if still_open else []
    except TorporError as error:
        runner().log.warning("no provider was asked for machines: %s", error)
        return {}
    found: dict[Label, str] = {}
    recall(providers, still_open)
    answers = ask_all(providers, lambda one: one.list_own())
    for provider, answer in zip(providers, answers, strict=True):
        if isinstance(answer, TorporError):
            runner().log.warning("%s was not asked: %s", provider.identity, answer)
        shown = answer.machines if isinstance(answer, MachineUnread) else answer
        if not isinstance(shown, TorporError):
            found |= {machine.label: machine.id for machine in shown if machine.label}
    return found
