"""What a person wants to know of all workspaces at one look: plain functions, without a run."""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Final
from zoneinfo import ZoneInfo

import msgspec

from tasks.machines import renting
from tasks.opening import open_workspace
from tasks.workspace import OpenWorkspace
from torpor.control.money.costs import costs, dollars, read
from torpor.control.money.months import Month, microseconds
from torpor.control.rental.records import Rental
from torpor.control.reports import Report, Row
from torpor.control.store.receipts import newest_verified
from torpor.shared.errors import TorporError
from torpor.shared.values import Machine, SnapshotId, made_at

_AT_ONCE: Final = 16


class Overview(msgspec.Struct, frozen=True):
    """One workspace. ``usd_h`` is what its machines cost now, ``month_usd`` what they cost in this
    month at most. ``trouble``: why nothing, or not all, is known of it."""

    block: str
    state: str = ""
    machines: list[str] = []
    usd_h: float = 0.0
    month_usd: float = 0.0
    newest: SnapshotId | None = None
    newest_age_s: float | None = None
    jobs: int = 0
    trouble: str = ""

    def row(self) -> Row:
        return {
            "workspace": self.block,
            "state": self.state or "not known",
            "$/h": f"{self.usd_h:.3f}" if self.machines else "",
            "$ this month": f"{self.month_usd:.2f}" if self.state else "",
            "newest snapshot": self.newest or "",
            "age": "" if self.newest_age_s is None else _age(self.newest_age_s),
            "jobs": str(self.jobs or ""),
            "machines": ", ".join(self.machines),
            "note": self.trouble,
        }


class Overviews(Report, frozen=True):
    """All workspaces of an installation."""

    workspaces: list[Overview]

    def title(self) -> str:
        awake = [one for one in self.workspaces if one.machines]
        total = sum(one.usd_h for one in awake)
        said = f"Workspaces: {len(self.workspaces)}, awake: {len(awake)}"
        return f"{said}: {total:.3f} $/h, {total * 24:.2f} $ a day" if awake else said

    def rows(self) -> list[Row]:
        return [one.row() for one in self.workspaces]


def look_at_all(blocks: Sequence[str]) -> Overviews:
    """The workspaces of these blocks, in the order of their names; all are asked at once."""
    with ThreadPoolExecutor(_AT_ONCE, thread_name_prefix="overview") as threads:
        return Overviews([*threads.map(look_at, sorted(blocks))])


def look_at(block: str) -> Overview:
    """One workspace, with the trouble instead of an error."""
    try:
        opened = open_workspace(block)
        now_unix = time.time()
        newest = newest_verified(opened.store, opened.spec.name)
        overview = Overview(
            block,
            state="asleep" if newest else "new",
            month_usd=_month_usd(opened, now_unix),
            newest=newest,
            newest_age_s=None if newest is None else now_unix - made_at(newest).timestamp(),
            jobs=len(opened.jobs.open()),
        )
        if not opened.rentals.open():
            return overview
    except TorporError as error:
        return Overview(block, trouble=str(error))
    try:
        found = renting(opened).machines()
    except TorporError as error:
        return msgspec.structs.replace(overview, state="awake?", trouble=str(error))
    there = [(machine, rental) for machine, rental in found if not _is_ending(machine, rental)]
    if not there:
        return overview
    whole = all(rental is not None and rental.state == "handed over" for _, rental in there)
    return msgspec.structs.replace(
        overview,
        state="awake" if whole else "not finished",
        machines=[f"{machine.id} at {machine.provider}" for machine, _ in there],
        usd_h=sum(machine.price_usd_h for machine, _ in there),
    )


def _month_usd(opened: OpenWorkspace, now_unix: float) -> float:
    utc = ZoneInfo("UTC")
    month = Month.of(microseconds(now_unix), utc)
    rentals = read([opened.rentals], month.begin_us(utc) / 1e6)
    found = [cost.high for cost in costs(rentals, now_unix, utc) if cost.month == month]
    return float(dollars(sum(found)))


def _is_ending(machine: Machine, rental: Rental | None) -> bool:
    return rental is not None and rental.is_ending(machine)


def _age(seconds: float) -> str:
    if seconds < 5400:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.0f} h" if seconds < 48 * 3600 else f"{seconds / 86400:.0f} days"
