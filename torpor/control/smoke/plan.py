"""What a smoke test will rent, and what it can cost at most. Nothing is rented here."""

from __future__ import annotations

from typing import Final, Literal

import msgspec

from torpor.control.providers.offers import Offer, asked, misfit
from torpor.control.providers.provider import Account, Provider
from torpor.control.rental.ending import GONE_S
from torpor.control.rental.search import billed_s, sold
from torpor.control.reports import Report, Row
from torpor.shared.errors import BudgetExceeded, InvalidInput, NoOffer
from torpor.shared.values import Want

MINUTES: Final = 10.0
"""Minutes that the machine may live until it is ended."""
MAX_USD: Final = 0.50
_LEAST_MINUTES: Final = 1.0
_MOST_MINUTES: Final = 24 * 60.0
_DISK_GIB: Final = 10.0


class SmokePlan(Report, frozen=True, kw_only=True):
    """The cheapest machine that fits, and its worst case: each lives for ``minutes``, its market
    shows it as late as it may, and takes the longest time to prove its end."""

    provider: str
    account: Account
    want: Want
    offer: Offer
    minutes: float
    machines: int = 1  # one after the other, each for as long
    worst_usd: float
    lifetime_s: float | None  # seconds after which ``ender`` ends it; None: nothing does
    ender: Literal["", "the market", "the machine"] = ""

    def without_account(self) -> SmokePlan:
        """The plan without the account, as a recording may hold it."""
        return msgspec.structs.replace(self, account=Account(name=""))

    def title(self) -> str:
        machines = "One machine" if self.machines == 1 else f"{self.machines} machines in turn"
        return f"{machines} at {self.provider} for at most {self.minutes:g} min each"

    @property
    def last_end(self) -> str:
        """What ends the machine where neither the command nor its watchdog can."""
        if self.lifetime_s is None:
            return "the next `torpor up` on this host ends it: until then, watch its console"
        after = f"after {self.lifetime_s / 60:g} min"
        if self.ender == "the machine":
            return f"its start script tries to end it {after}, if it has begun by then"
        return f"the market ends it {after}"

    def rows(self) -> list[Row]:
        offer, balance = self.offer, self.account.balance_usd
        gpu = f"{offer.gpu_count} x {offer.gpu}" if offer.gpu else "no GPU"
        said = {
            "account": self.account.name,
            "balance": "not stated" if balance is None else f"{balance:.2f} $",
            **{f"note {number}": note for number, note in enumerate(self.account.notes, 1)},
            "offer": f"{offer.id}, {gpu}, {offer.region}",
            "price": f"{offer.bound_usd_h:.4f} $/h with {self.want.disk_gib:g} GiB of disk",
            "worst case": f"{self.worst_usd:.4f} $",
            "if all else fails": self.last_end,
        }
        return [{"what": what, "value": value} for what, value in said.items()]


def make_plan(
    provider: Provider,
    *,
    max_usd: float = MAX_USD,
    minutes: float = MINUTES,
    gpu: str = "",
    machines: int = 1,
) -> SmokePlan:
    """The plan for the cheapest offer, with a GPU where the market has such. BudgetExceeded if its
    worst case is over ``max_usd`` or over the account's balance."""
    if not _LEAST_MINUTES <= minutes <= _MOST_MINUTES:
        raise InvalidInput(
            f"a machine for {minutes:g} minutes: give {_LEAST_MINUTES:g} to {_MOST_MINUTES:g}"
        )
    if not max_usd >= 0:
        raise InvalidInput(f"--max-usd is {max_usd:g}: give an amount in $")
    able = provider.abilities
    account = provider.check()
    want = Want(gpu=gpu or None, disk_gib=max(_DISK_GIB, able.min_disk_gib))
    fitting = [offer for offer in sold(provider, asked(want)) if not misfit(offer, want)]
    if not fitting:
        raise NoOffer(f"{provider.identity} has no offer for {gpu or 'any GPU'} now: try later")
    lifetime_s = minutes * 60 + GONE_S
    offer = min(
        [offer for offer in fitting if offer.gpu is not None] or fitting,
        key=lambda offer: offer.bound_usd_h,
    )
    each_s = billed_s((lifetime_s + able.settling_s) / 3600, able)
    worst_usd = machines * offer.bound_usd_h * each_s / 3600
    held = [f"--max-usd is {max_usd:.2f} $"] if not worst_usd <= max_usd else []
    if account.balance_usd is not None and account.balance_usd < worst_usd:
        held.append(f"the account has {account.balance_usd:.2f} $")
    if held:
        raise BudgetExceeded(
            f"the cheapest machine at {provider.identity} is {offer.id} at "
            f"{offer.bound_usd_h:.4f} $/h. The test can cost {worst_usd:.2f} $, and "
            f"{' and '.join(held)}: nothing was rented"
        )
    return SmokePlan(
        provider=provider.identity,
        account=account,
        want=want,
        offer=offer,
        minutes=minutes,
        machines=machines,
        worst_usd=worst_usd,
        lifetime_s=lifetime_s if able.ends_machines else None,
        ender=able.ends_machines,
    )
