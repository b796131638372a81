"""The time and the money that a job may use: asked before a machine is rented for it, and watched
while it is driven."""

from __future__ import annotations

import time

import msgspec

from tasks.budgets import newest_stored_bytes
from tasks.jobs import nodes_of
from tasks.runner import runner
from tasks.workspace import OpenWorkspace
from torpor.control.jobs.policy import Spent, why_over
from torpor.control.jobs.records import Job, Stop
from torpor.control.money.costs import costs, dollars, price, read
from torpor.control.money.exhaustion import hibernation_s, reserve_s
from torpor.control.rental.records import Rental
from torpor.control.zones import zone_named
from torpor.shared.errors import TorporError
from torpor.shared.values import SnapshotId


def spent_by(opened: OpenWorkspace, job: Job, now_unix: float) -> Spent:
    """What its rentals have cost, and those of others since its first attempt there."""
    began = {one.rental: one.began_unix for one in reversed(job.attempts)}
    ledgers = [opened.rentals] + [nodes_of(opened).rentals] * (job.nodes > 1)
    mine: list[Rental] = []
    for one in read(ledgers, job.created_unix):
        if one.job == job.id:
            mine.append(one)
        elif one.label.rental in began:
            since = max(one.created_unix, began[one.label.rental])
            mine.append(msgspec.structs.replace(one, created_unix=since, queued_unix=None))
    there = [one for one in mine if one.state != "ended"]
    return Spent(
        float(dollars(sum(cost.high for cost in costs(mine, now_unix, zone_named("UTC"))))),
        float(sum(price(one.bound_usd_h) or 0 for one in there)),
        next((one.machine for one in mine if one.machine and not price(one.price_usd_h)), ""),
    )


class Limits:
    """Asks for the stop of one job once its time or its money is spent. Unknown is not spent."""

    def __init__(self, opened: OpenWorkspace) -> None:
        self._opened = opened
        self._kept_s: dict[SnapshotId | None, float] = {}  # by the newest save: its manifest is big

    def look(self, job: Job) -> None:
        if not (job.most_hours or job.most_usd) or job.state == "hibernating":
            return
        try:
            now_unix = time.time()
            spent, kept_s = Spent(0.0), 0.0
            if job.most_usd:
                spent, kept_s = spent_by(self._opened, job, now_unix), self._kept(job)
            why = why_over(job, spent, kept_s, now_unix)
            if why:
                stop = Stop("over budget", "hibernate", why, now_unix)
                self._opened.jobs.ask_stop(job.id, stop, unless_asked=True)
        except TorporError as error:
            runner().log.warning("what job %s has used is not known: %s", job.id, error)

    def _kept(self, job: Job) -> float:
        if job.newest not in self._kept_s:
            stored_bytes = newest_stored_bytes(self._opened)
            self._kept_s = {job.newest: hibernation_s(stored_bytes)}
        return self._kept_s[job.newest]


def most_usd_h(opened: OpenWorkspace, job: Job) -> float | None:
    """What the machines that are rented for the job may cost an hour, so that its money pays for
    them as long as a budget has to; None for no limit."""
    if not job.most_usd:
        return None
    return paid_usd_h(opened, job.most_usd - spent_by(opened, job, time.time()).usd)


def paid_usd_h(opened: OpenWorkspace, left_usd: float) -> float:
    """What machines may cost an hour for which so much money is left."""
    return max(0.0, left_usd) * 3600 / reserve_s(newest_stored_bytes(opened))
