"""The time and the money that a job may use: asked before a machine is rented for it, and watched
while it is driven."""

from __future__ import annotations

import time
from dataclasses import replace

import msgspec

from tasks.budgets import newest_stored_bytes
from tasks.jobs import rentals_of
from tasks.runner import runner
from tasks.workspace import OpenWorkspace
from torpor.control.jobs.decide import is_over
from torpor.control.jobs.policy import Spent, why_over
from torpor.control.jobs.records import Approval, Job, Stop, job_id
from torpor.control.money.costs import costs, dollars, price
from torpor.control.money.exhaustion import hibernation_s, reserve_s
from torpor.control.rental.ending import billed
from torpor.control.rental.records import Rental
from torpor.control.time_zones import zone_named
from torpor.shared.errors import InvalidInput, RecordRefused, TorporError
from torpor.shared.values import SnapshotId


def spent_by(opened: OpenWorkspace, job: Job, now_unix: float, *, asks: bool = False) -> Spent:
    """What the rentals of a job have cost at most, with those of others since the job's first
    attempt on their machines. ``asks``: ask the markets whose spot prices change for the cost of
    the hours until now; without it, such hours count at the highest price that they may have."""
    mine = rentals_of(opened, job)
    there = [one for one in mine if one.state != "ended"]
    usd_h = float(sum(price(one.bound_usd_h) or 0 for one in there))
    if asks:
        mine = [
            _until_now(opened, one, now_unix) if one.job == job.id and one.state != "ended" else one
            for one in mine
        ]
    return Spent(
        float(dollars(sum(cost.high for cost in costs(mine, now_unix, zone_named("UTC"))))),
        usd_h,
        next((one.machine for one in mine if one.machine and not price(one.price_usd_h)), ""),
    )


def _until_now(opened: OpenWorkspace, rental: Rental, now_unix: float) -> Rental:
    """The record with the mean price of its hours until now; unchanged where that is unknown."""
    try:
        provider = opened.markets.of(rental.provider)
        return msgspec.structs.replace(rental, **billed(provider, rental, now_unix))
    except TorporError as error:
        runner().log.warning("what rental %s costs is not known: %s", rental.label.rental, error)
        return rental


class Limits:
    """Asks for the stop of one job once its time or its money is spent. Unknown costs do not count
    as spent."""

    def __init__(self, opened: OpenWorkspace) -> None:
        self._opened = opened
        # seconds by newest save, kept because that save's manifest is big
        self._kept_s: dict[SnapshotId | None, float] = {}

    def look(self, job: Job) -> None:
        if not (job.max_hours or job.max_usd) or _ends(job):
            return
        try:
            now_unix = time.time()
            spent, kept_s = Spent(0.0), 0.0
            if job.max_usd:
                spent, kept_s = spent_by(self._opened, job, now_unix), self._kept(job)
            why = why_over(job, spent, kept_s, now_unix)
            if why and job.max_usd:  # a changing price counts at the most that it may have been
                spent = spent_by(self._opened, job, now_unix, asks=True)
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
    """The most that the machines of the job may cost an hour, so that its money pays for as many
    hours as a budget must pay for; None for no limit."""
    if not job.max_usd:
        return None
    return paid_usd_h(opened, job.max_usd - spent_by(opened, job, time.time()).usd)


def for_job(opened: OpenWorkspace, job: str, max_usd: float) -> OpenWorkspace:
    """The opened workspace, for renting a machine on which a job begins next. ``max_usd``: what the
    job may cost; 0 for no limit. No program of the workspace is started there. Without a ``job``,
    the workspace unchanged."""
    if not job:
        if max_usd:
            raise InvalidInput("`max_usd` is the money of a job: name the `job`, too")
        return opened
    return replace(
        opened,
        spec=msgspec.structs.replace(opened.spec, programs=[]),
        job=job_id(job.strip()),
        most_usd_h=paid_usd_h(opened, max_usd) if max_usd else None,
    )


def paid_usd_h(opened: OpenWorkspace, left_usd: float) -> float:
    """The most that machines may cost an hour, given how much money is left."""
    return max(0.0, left_usd) * 3600 / reserve_s(newest_stored_bytes(opened))


def _ends(job: Job) -> bool:
    """Whether the job's last attempt is over and its machine is hibernated. False for a job on
    several nodes that has lost one: it is hibernated too, and continues after all of its nodes are
    rented again."""
    return job.state == "hibernating" and bool(job.attempts) and is_over(job)


def approve(opened: OpenWorkspace, job: Job, approval: Approval) -> Job:
    """Raise the limits of a job; returns the job with its new limits. InvalidInput where the job is
    over or about to be stopped, because no run would read the approval; it is then withdrawn. The
    approval also holds while the nodes of a job are rented again. An earlier approval that the
    job's driver has not read yet counts, too."""
    try:
        earlier = opened.jobs.approved(job.id)
    except RecordRefused as error:  # this approval replaces the one that cannot be read
        runner().log.warning("an earlier approval of job %s does not hold: %s", job.id, error)
        earlier = None
    if earlier is not None:
        approval = msgspec.structs.replace(
            approval,
            max_hours=approval.max_hours or earlier.max_hours,
            max_usd=approval.max_usd or earlier.max_usd,
            past_budgets=approval.past_budgets or earlier.past_budgets,
        )
    then = msgspec.structs.replace(job, **approval.changes(job))
    if then.past_budgets and not then.max_usd:
        raise InvalidInput(
            f"job {job.id} has no limit in USD of its own, and past its budgets nothing would end "
            f"it: add --max-usd (`max_usd`)"
        )
    opened.jobs.approve(job.id, approval)
    now = opened.jobs.of(job.id)
    if now is None or now.ended:
        opened.jobs.withdraw_approval(job.id)
        state = "is gone" if now is None else f"has ended ({now.outcome})"
        raise InvalidInput(
            f"job {job.id} {state} and uses nothing more: `torpor job run {job.workspace} -- "
            "COMMAND` begins another one"
        )
    stop = opened.jobs.stop_asked(job.id)
    if stop is not None or _ends(now):
        opened.jobs.withdraw_approval(job.id)
        why = stop.why if stop is not None else now.state
        raise InvalidInput(
            f"job {job.id} is being stopped already ({why}): its work is stored. Run it again with "
            "a higher limit to go on from there"
        )
    return then
