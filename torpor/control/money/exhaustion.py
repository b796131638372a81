"""When machines must be hibernated, so that their budget is not exceeded.

A machine's lead time is what may pass between one look of `watch` and the end of a hibernation
that the next look starts: ``START_S``, plus ``LEAST_S``, plus the stored bytes of the workspace's
newest snapshot at ``STORED_BYTES_S``, as if all of them had changed. A machine is hibernated at the
first look that finds its budget spent within that time. So the budget is exceeded by no more than
each machine's price for the time that its hibernation ends after its lead time.
"""

from __future__ import annotations

from typing import Final

import msgspec

from torpor.control.money.budgets import RESERVE_S, BudgetStatus
from torpor.control.rental.records import Rental
from torpor.shared.values import MIB

START_S: Final = 300.0
"""Seconds until a hibernation begins: the two minutes of `watch`'s schedule, its look, and a worker
that starts the next run."""
LEAST_S: Final = 600.0
"""Seconds of a hibernation that stores next to nothing: connect, scan, quiesce, verify, destroy."""
STORED_BYTES_S: Final = 25 * MIB
"""Bytes a second of the slowest line that is expected: 200 Mbit/s."""
WORK_S: Final = 1800.0
"""Seconds that a machine must be able to work before its lead time begins; otherwise it is not
rented."""
MOST_S: Final = 24 * 3600.0
"""Seconds of the longest lead time."""


class RunningOut(msgspec.Struct, frozen=True):
    """A budget whose cost reaches 100 % at ``at_unix``, if all that runs goes on."""

    status: BudgetStatus
    at_unix: float

    def counts(self, rental: Rental) -> bool:
        return self.status.budget.covers(rental.label.workspace, rental.project)

    def why_end(self, rental: Rental, stored_bytes: int, now_unix: float) -> str:
        """Why the rental's machine is to be hibernated now; empty if it is not."""
        left_s = self.at_unix - now_unix
        if not self.counts(rental) or left_s > lead_s(stored_bytes):
            return ""
        name = self.status.budget.name
        return f"budget {name} is spent" + (f" in {left_s / 60:.0f} min" if left_s > 0 else "")


class BudgetsSeen(msgspec.Struct, frozen=True):
    """How budgets stand that count machines in use. ``running_out``: spent within the longest lead
    time. ``reached``: most is spent. ``unread``: a sentence for each that cannot be read."""

    running_out: list[RunningOut]
    reached: list[BudgetStatus]
    unread: list[str]


def lead_s(stored_bytes: int) -> float:
    """The lead time in seconds of a machine whose workspace's newest snapshot has this many stored
    bytes."""
    return min(MOST_S, START_S + hibernation_s(stored_bytes))


def hibernation_s(stored_bytes: int) -> float:
    """Seconds that the machine's hibernation may take, as if all stored bytes had changed."""
    return LEAST_S + stored_bytes / STORED_BYTES_S


def reserve_s(stored_bytes: int) -> float:
    """Seconds for which a budget must pay for a machine of such a workspace, or it is not
    rented."""
    return max(RESERVE_S, lead_s(stored_bytes) + WORK_S)
