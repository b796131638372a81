"""Lists what is rented now, for the question of `torpor down`."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from typing import Final

from tasks.market_look import open_rentals
from tasks.runner import runner
from tasks.watch import patient
from tasks.workspace import OpenWorkspace
from tasks.workspace_blocks import open_all
from torpor.control.rental.records import OWN_HOST, Rental
from torpor.control.reports import Report, Row, moment
from torpor.control.store.records import Unread, named
from torpor.shared.errors import TorporError

_AT_ONCE: Final = 8
_STORE_S: Final = 30.0
"""Seconds that one store may delay the question."""


class RentedNow(Report, frozen=True):
    """The open rentals of all workspaces at markets, by the records in their stores. ``unknown``:
    by Workspace block, why its rentals are not known, or not all of them."""

    rentals: list[Rental]
    unknown: dict[str, str]

    @property
    def usd_h(self) -> float:
        return sum(rental.bound_usd_h for rental in self.rentals)

    def title(self) -> str:
        if not self.rentals:
            return f"Nobody can say whether machines are rented for {', '.join(self.unknown)}"
        machines = "1 machine is" if len(self.rentals) == 1 else f"{len(self.rentals)} machines are"
        least = ""
        if self.unknown or not all(rental.bound_usd_h for rental in self.rentals):
            least = "at least "
        return f"{machines} rented, {least}{self.usd_h:.3f} $/h, {self.usd_h * 24:.2f} $ a day"

    def rows(self) -> list[Row]:
        rented = [
            {
                "workspace": str(rental.label.workspace),
                "provider": rental.provider,
                "machine": rental.machine or "not named yet",
                "$/h": f"{rental.bound_usd_h:.3f}" if rental.bound_usd_h else "not known",
                "since": moment(rental.created_unix),
                "note": "" if rental.state == "handed over" else f"not finished: {rental.state}",
            }
            for rental in self.rentals
        ]
        nobody = {"provider": "", "machine": "not known", "$/h": "", "since": ""}
        return rented + [
            {"workspace": block, **nobody, "note": why} for block, why in self.unknown.items()
        ]


def rented_now() -> RentedNow:
    """What all workspaces of the installation rent at markets. No market is asked."""
    opened, closed = open_all(sorted(runner().workspaces()))
    unknown = {block: str(error) for block, error in closed.items()}
    context = copy_context()

    def read(one: OpenWorkspace) -> tuple[list[Rental], str]:
        unread: Unread = {}
        try:
            found = context.copy().run(open_rentals, one, unread)
        except TorporError as error:
            return [], str(error)
        return found, named(unread)

    found: dict[str, Rental] = {}
    with ThreadPoolExecutor(_AT_ONCE, thread_name_prefix="rented") as threads:
        asked = patient(opened, _STORE_S)
        for block, (rentals, why) in zip(asked, threads.map(read, asked.values()), strict=True):
            found |= {
                one.label.rental: one for one in rentals if not one.provider.startswith(OWN_HOST)
            }
            if why:
                unknown[block] = why
    return RentedNow(sorted(found.values(), key=lambda one: one.created_unix), unknown)
