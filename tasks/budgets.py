"""Budgets: asked before anything is rented, and watched while machines run. Budgets count records
of rentals and not what a provider bills. A record is written before its machine is asked for, so
two runs at once see each other's rentals."""

from __future__ import annotations

import time
from collections.abc import Sequence

from tasks.retries import ONCE
from tasks.runner import runner
from tasks.step import step
from tasks.trouble import trouble
from tasks.workspace import OpenWorkspace
from torpor.control.jobs.records import Job, Stop
from torpor.control.money.budgets import WARN_SHARE, BudgetStatus, budget_status, exhausted_unix
from torpor.control.money.exhaustion import MOST_S, BudgetsSeen, RunningOut, reserve_s
from torpor.control.rental.records import Rental
from torpor.control.rental.search import OfferOutcome, Offers
from torpor.control.store.manifests import newest_snapshot, open_manifest
from torpor.shared.errors import BudgetExceeded, RecordRefused, TorporError
from torpor.shared.values import MachineId


def budget_statuses(opened: OpenWorkspace) -> list[BudgetStatus]:
    """How each budget of the workspace stands now; empty for a job that a person lets go past the
    budgets. An error if a budget's records cannot be read: unknown is not unspent."""
    if opened.past_budgets:
        return []
    now_unix = time.time()
    mine = [one for one in opened.budgets() if one.budget.covers(opened.spec.name, opened.project)]
    return [one.status(now_unix) for one in mine]


def within_budgets(opened: OpenWorkspace, offers: Offers, count: int) -> Offers:
    """The offers of which the workspace's budgets allow ``count`` machines; BudgetExceeded, with
    the reason, if there is none."""
    found = budget_statuses(opened) if count else []
    for_s = reserve_s(newest_stored_bytes(opened)) if found else 0.0
    fitting, refused = [], []
    for offer in offers.fitting:
        reason = next(
            (why for one in found if (why := one.refusal(offer.bound_usd_h, count, for_s))), ""
        ) or _too_dear(opened, offer.bound_usd_h, count)
        if reason:
            refused.append(OfferOutcome.of(offer, reason))
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
    return Offers(fitting, [*refused, *offers.refused], offers.because)


def _too_dear(opened: OpenWorkspace, usd_h: float, count: int) -> str:
    """Why the job's money (``max_usd``) pays for no machine of this price; empty where it does."""
    most = opened.most_usd_h
    if most is None:
        return ""
    if not usd_h:
        return "its price is unknown, and a job with a budget takes known prices only"
    if usd_h * count <= most:
        return ""
    each = f"{count} at {usd_h:.4g} $/h each cost" if count > 1 else f"it costs {usd_h:.4g} $/h"
    return f"{each}; what is left of the job's money pays for {most:.4g} $/h: raise that limit"


def check_budgets(opened: OpenWorkspace, usd_h: float) -> None:
    """Check the budgets once more right before a machine of this price is asked for: with the
    record of that machine, and with what other runs have recorded meanwhile. Raises
    BudgetExceeded."""
    for one in budget_statuses(opened):
        if reason := one.refusal_of_price(usd_h) or one.refusal():
            raise BudgetExceeded(f"nothing was rented for workspace {opened.spec.name}: {reason}")


def what_is_left(opened: OpenWorkspace) -> list[str]:
    """For a report: one sentence for each budget of the workspace, with what is left."""
    try:
        return [one.message() for one in budget_statuses(opened)]
    except TorporError as error:  # the machine is rented already, and the work on it done
        return [f"what is left of the budgets is not known: {error}"]


@step("look at budgets", retries=ONCE)
def look_at_budgets(
    used: Sequence[tuple[OpenWorkspace, Rental]], opened: Sequence[OpenWorkspace]
) -> BudgetsSeen:
    """The budgets that count any of these rentals and will be spent within the longest lead time;
    those of which most is spent; and a sentence for each that cannot be read, because unknown is
    not spent. ``opened``: all workspaces, also those without a machine."""
    now_unix = time.time()
    found: list[RunningOut] = []
    reached: list[BudgetStatus] = []
    unread: list[str] = []
    try:
        budgets = opened[0].budgets() if opened else []  # all workspaces have the same budgets
    except Exception as error:  # noqa: BLE001 - unknown is not spent
        return BudgetsSeen([], [], [f"no budget can be read: {trouble(error)}"])
    unread += [one.trouble for one in budgets if one.trouble]
    for one in budgets:
        rents = any(one.budget.covers(of.label.workspace, of.project) for _, of in used)
        if one.trouble or not rents:
            continue
        try:
            rentals = one.rentals(now_unix)
            now = budget_status(one.budget, rentals, now_unix)
            at_unix = exhausted_unix(one.budget, rentals, now_unix)
        except Exception as error:  # noqa: BLE001 - the others are looked at all the same
            unread.append(f"budget {one.budget.name} cannot be read: {trouble(error)}")
            continue
        if now.share >= WARN_SHARE:
            reached.append(now)
        if at_unix is not None and at_unix - now_unix <= MOST_S:
            found.append(RunningOut(now, at_unix))
    return BudgetsSeen(found, reached, unread)


def newest_stored_bytes(opened: OpenWorkspace) -> int:
    """The stored bytes of the workspace's newest snapshot; 0, with a warning, if unknown."""
    try:
        newest = newest_snapshot(opened.store, opened.spec.name)
        if newest is None:
            return 0
        manifest, _ = open_manifest(opened.store, opened.spec.name, newest, opened.seal, facts=())
    except Exception as error:  # noqa: BLE001 - the others are looked at all the same
        why = trouble(error)
        runner().log.warning(
            "how long a hibernation of workspace %s takes is not known: %s", opened.spec.name, why
        )
        return 0
    return sum(chunk.stored for chunk in manifest.chunks)


estimate_hibernation = step("estimate its hibernation", retries=ONCE)(newest_stored_bytes)


@step("stop its jobs", retries=ONCE)
def stop_jobs(opened: OpenWorkspace, machine: MachineId, why: str) -> tuple[list[str], list[str]]:
    """Ask the runs that drive jobs on this machine to stop them; returns these jobs, and those that
    go on because a person lets them go past the budgets. A request that was made before, such as
    a user's, stays."""
    jobs = opened.jobs
    stopped, past = list[str](), list[str]()
    for one in jobs.open():
        if not _is_on(one, machine):
            continue
        if one.past_budgets or _may_go_past(opened, one):
            past.append(one.id)
            continue
        stop = Stop("over budget", "hibernate", why, time.time())
        jobs.ask_stop(one.id, stop, unless_asked=True)
        stopped.append(one.id)
    return stopped, past


def _may_go_past(opened: OpenWorkspace, job: Job) -> bool:
    """Whether a person has let the job go past the budgets since. A record that cannot be trusted
    does not say so."""
    try:
        approval = opened.jobs.approved(job.id)
    except RecordRefused as error:
        runner().log.warning("whether job %s may go past a budget: %s", job.id, error)
        return False
    return approval is not None and approval.past_budgets


def _is_on(job: Job, machine: MachineId) -> bool:
    """Whether the job's command is on this machine, or a run may be about to start it there."""
    if job.attempt is not None:
        return machine in (job.attempt.machine, *(node.machine for node in job.others))
    if job.driven:  # while a run drives the job, no other run may hibernate the workspace
        return True
    return any(one.machine == machine for one in job.attempts[-1:])
