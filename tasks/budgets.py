"""Budgets, asked before anything is rented.

Budgets count records of rentals, not what a provider bills. A record is written before its machine
is asked for, so two runs at once see each other's.
"""

from __future__ import annotations

import time

import msgspec

from tasks.events import BudgetReached, emit
from tasks.runner import runner
from tasks.workspace import OpenWorkspace
from torpor.control.money.budgets import WARN_SHARE, Standing
from torpor.control.rental.search import Offers, Tried
from torpor.shared.errors import BudgetExceeded, StoreError, TorporError
from torpor.shared.values import ObjectKey


def standings(opened: OpenWorkspace) -> list[Standing]:
    """How each budget of the workspace stands now. An error if a budget's records cannot be read:
    unknown is not unspent."""
    now_unix = time.time()
    mine = [one for one in opened.budgets() if one.budget.covers(opened.spec.name, opened.project)]
    found = [one.standing(now_unix) for one in mine]
    for one in found:
        if one.share >= WARN_SHARE:
            _tell_once(opened, one)
    return found


def within_budgets(opened: OpenWorkspace, offers: Offers, count: int) -> Offers:
    """The offers of which the workspace's budgets allow ``count`` machines; BudgetExceeded, with
    the reason, if there is none."""
    found = standings(opened) if count else []
    fitting, refused = [], []
    for offer in offers.fitting:
        reason = next((why for one in found if (why := one.refusal(offer.price_usd_h, count))), "")
        if reason:
            refused.append(Tried.of(offer, reason))
        else:
            fitting.append(offer)
    for one in found:
        runner().log.info(one.message())
    if refused and not fitting:
        first = refused[0]
        raise BudgetExceeded(
            f"nothing was rented for workspace {opened.spec.name}: offer {first.offer} at "
            f"{first.provider}, the best of {len(refused)}: {first.outcome}"
        )
    return Offers(fitting, [*refused, *offers.refused])


def see_that_budgets_allow(opened: OpenWorkspace, usd_h: float) -> None:
    """Check once more what is recorded by now, with what other runs recorded meanwhile, right
    before a machine of this price is asked for, which is recorded too; raises BudgetExceeded."""
    for one in standings(opened):
        if reason := one.refusal_of_price(usd_h) or one.refusal():
            raise BudgetExceeded(f"nothing was rented for workspace {opened.spec.name}: {reason}")


def what_is_left(opened: OpenWorkspace) -> list[str]:
    """For a report: a sentence for each budget of the workspace."""
    try:
        return [one.message() for one in standings(opened)]
    except TorporError as error:  # the machine is rented, and the work on it done
        return [f"what is left of the budgets is not known: {error}"]


def _tell_once(opened: OpenWorkspace, standing: Standing) -> None:
    """Send the event, the first time in this month that it is true of a budget of this size."""
    of, month = standing.budget, str(standing.month)
    key = ObjectKey(f"budgets/{of.name}/{month}-{of.usd_month:f}")
    try:
        if opened.store.head(key) is not None:
            return
        opened.store.put(key, msgspec.json.encode({"message": standing.message()}))
    except StoreError as error:
        runner().log.warning(
            "whether the event of budget %s was sent before is not known: %s", of.name, error
        )
    emit(
        BudgetReached(
            workspace=opened.spec.name,
            budget=of.name,
            percent=round(100 * WARN_SHARE),
            month=month,
            message=standing.message(),
        )
    )
