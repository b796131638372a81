"""Watch: look at all machines and jobs, hibernate machines that are idle or whose budget is spent,
and continue jobs."""

from __future__ import annotations

import time
from typing import Annotated

import msgspec
from pydantic import Field

from flows.procedures.job.recovery import JobSeen, act_on, free_slots, see_jobs
from flows.procedures.watch.alarms import (
    Observation,
    people_hear_of,
    remember_spent,
    see_alarms,
    tell_of,
)
from flows.procedures.watch.backups import missed_backups
from flows.procedures.watch.hibernations import hibernate_idle, hibernate_over_budget, over_budget
from flows.procedures.watch.leftovers import act_on_left, reconcile_abandoned, see_left
from flows.procedures.watch.rows import (
    asleep,
    in_use,
    is_missing,
    kept_in_doubt,
    newest_snapshots,
    not_there,
)
from flows.procedures.watch.twins import block_differences, most_frequent_saves, undecided
from tasks.flow import flow
from tasks.overview import show_overview
from tasks.run_table import shown
from tasks.runner import runner
from tasks.watch import (
    AllMachines,
    close_gone,
    has_deadline,
    list_all_machines,
    look_at,
    patient,
    renew_deadline,
    seen,
)
from tasks.workspace import OpenWorkspace
from tasks.workspace_blocks import open_all
from torpor.control.metrics import write_metrics
from torpor.control.reconciliation import Finding
from torpor.control.rental.records import Rental
from torpor.control.watch_report import Watched, WatchedJob, WatchReport
from torpor.shared.errors import NotDelivered
from torpor.shared.values import WorkspaceName, names_of


@flow("watch")
def watch(
    workspaces: list[str] = [],  # noqa: B006 - a form shows the default; it is never changed
    dry_run: bool = True,
    metrics: str = "",
    notify: list[str] = [],  # noqa: B006
    only_report: bool = False,
    backup_hours: Annotated[float, Field(ge=0, le=24 * 366)] = 0,
) -> WatchReport:
    """Look at all machines of the installation, hibernate those that are idle or whose budget is
    spent, continue jobs whose run has gone, and tell people what is wrong.

    A machine is idle by the Idleness block of its workspace, or by the default rules. One of which
    that cannot be said is kept, with a warning and its reason. A machine whose provider block sets
    a deadline goes on only while this flow renews it. When a budget will be spent by the time that
    hibernating takes, the machines that it counts are hibernated, also those that work. A machine
    that a killed run left is ended or woken by the same rules (`when_left`), and that of a failed
    attempt is ended. The rental of a machine that has gone without torpor is closed. Nothing else
    is ended: what may be forgotten is only listed.

    Args:
        workspaces: The Workspace blocks to look at. Empty: all of them.
        dry_run: Hibernate, continue and tell nothing. The table shows what would be done.
        metrics: A file for Prometheus to write, such as torpor.prom in the folder of
            node_exporter's textfile collector. Empty: write none.
        notify: Notification blocks that tell of alerts, as type/name. Empty: those that
            `torpor up --notify type/name` has named.
        only_report: Hibernate no idle machine, whatever its Workspace block says: report it.
        backup_hours: The highest age of the newest verified snapshot, in hours, of a workspace that
            has had a rented machine for that long. Older is an alert. 26 suits a daily backup. 0:
            do not check.
    """
    blocks, closed = open_all(workspaces or runner().workspaces())
    blocks = patient(blocks)
    named: dict[WorkspaceName, list[str]] = {}
    for block, one in blocks.items():
        named.setdefault(one.spec.name, []).append(block)
    opened = {name: blocks[of[0]] for name, of in named.items()}  # the first stands for all
    differences = block_differences(blocks, named)
    standing = list_all_machines([*opened.values()])
    newest, troubles = newest_snapshots(opened)
    if not dry_run:
        standing = close_gone(standing, [*opened.values()], newest)
    costs = show_overview(blocks, standing.of)
    faults: list[Exception] = []
    if not dry_run:
        _free_slots(blocks, faults)  # first: a run that is stuck is not one that waits
    jobs, unread_jobs = see_jobs(opened)
    with_job = {seen.job.workspace for seen in jobs}
    in_hand = _handed_over(standing, opened)
    missed, unread_backups = missed_backups(in_hand, backup_hours)
    unread = {**standing.unread, **troubles, **unread_jobs, **unread_backups}
    used = [one for one in standing.findings if one.kind == "in use" and one.machine and one.rental]
    if not dry_run:
        _renew(standing, opened, faults)
    over, budgets = over_budget(in_hand, [*opened.values()])
    saves = {
        name: most_frequent_saves([blocks[block] for block in named[name]])
        for name in (opened.keys() - with_job if not dry_run else ())
    }
    looks = [
        (
            one,
            look_at.submit(opened[_name(one)], one.machine, one.rental, saves.get(_name(one))),
        )
        for one in used
        if one.machine and one.rental
    ]
    stored = [name for name, made_unix in newest.items() if made_unix is not None]
    doubtful = {**standing.unread, **unread_jobs}
    left = see_left(standing.findings, opened, named, stored, with_job, differences, doubtful)
    watched = [
        *(
            Watched(WorkspaceName(name), "unknown", str(error), "correct its Workspace block")
            for name, error in closed.items()
        ),
        *(
            Watched(name, "unknown", why, "do what its reason says, or see that its store answers")
            for name, why in unread.items()
        ),
        *(
            in_use(opened[_name(one)], one, seen(look), newest, over, dry_run, only_report)
            for one, look in looks
        ),
        *not_there(standing, opened, newest, over),
    ]
    watched += asleep(opened, newest, {one.workspace for one in watched}, with_job)
    watched = [
        kept_in_doubt(
            undecided(one, differences.get(one.workspace), one.workspace in with_job),
            doubtful.get(one.workspace, ""),
        )
        for one in watched
    ]
    _warn(watched)
    seen_jobs = [seen.watched() for seen in jobs]
    if not dry_run:
        remember_spent(budgets, watched)
        watched = [_act(one, blocks, named.get(one.workspace, []), faults) for one in watched]
        seen_jobs = [_continue(seen, faults) for seen in jobs]
    in_table = {id(one) for one in used}
    report = WatchReport(
        at_unix=time.time(),
        watched=sorted(watched, key=lambda one: (one.kind == "off", one.workspace)),
        findings=[
            one for one in standing.findings if id(one) not in in_table and not is_missing(one)
        ],
        silent=[*standing.silent],
        jobs=seen_jobs,
        unread=budgets.unread,
        left=left,
        missed=missed,
    )
    alarms = see_alarms(
        Observation(
            report=report,
            standing=standing,
            budgets=budgets if in_hand else None,
            newest=newest,
            named=named,
            unread=[*unread],
            some=bool(workspaces or closed),
            overview=costs,
        ),
        faults,
    )
    delivered = None if dry_run else tell_of(alarms, notify, faults)
    if not dry_run:
        sure = {name: of for name, of in named.items() if name not in doubtful}
        reconcile_abandoned(report.findings, sure, differences, faults)
        left = [act_on_left(one, named[one.workspace][0], delivered, faults) for one in left]
    titles = [one.title for one in alarms.alerts]
    report = msgspec.structs.replace(report, left=left, alerts=titles, valid_unix=alarms.valid_unix)
    runner().log.info(report.message())
    if metrics:
        write_metrics(report, people_hear_of(alarms, delivered, report.at_unix), metrics)
    if faults:
        worst = next((f for f in faults if not isinstance(f, NotDelivered)), faults[-1])
        raise shown(report, worst)
    return report


def _handed_over(
    standing: AllMachines, opened: dict[WorkspaceName, OpenWorkspace]
) -> list[tuple[OpenWorkspace, Rental]]:
    rentals = [one.rental for one in standing.findings if one.rental]
    return [
        (opened[rental.label.workspace], rental)
        for rental in rentals
        if rental.state == "handed over" and rental.label.workspace in opened
    ]


def _warn(watched: list[Watched]) -> None:
    for one in watched:
        if one.kind == "unknown":
            runner().log.warning("workspace %s is unknown: %s", one.workspace, one.reason)


def _act(
    one: Watched, opened: dict[str, OpenWorkspace], blocks: list[str], faults: list[Exception]
) -> Watched:
    if one.over:
        return hibernate_over_budget(one, opened[blocks[0]], blocks[0], faults)
    return hibernate_idle(one, blocks[0], faults) if one.idle else one


def _renew(
    standing: AllMachines, opened: dict[WorkspaceName, OpenWorkspace], faults: list[Exception]
) -> None:
    """The machines that stop themselves when the control side is gone go on, also those on which a
    run works that has not handed them over: a long restore, a drill. Those of which nobody can read
    whether they are in use go on too."""
    of = {name: one for one in opened.values() for name in names_of(one.spec.name)}
    used = [one.machine for one in standing.findings if one.kind in ("in use", "unfinished")]
    for machine in (*filter(None, used), *standing.unjudged):
        if machine.label is None:
            continue
        try:
            workspace = of[machine.label.workspace]
            if has_deadline(workspace, machine):
                renew_deadline(workspace, machine)
        except Exception as error:  # noqa: BLE001 - the others are looked at all the same
            runner().log.error("the deadline of machine %s stands: %s", machine.id, error)
            faults.append(error)


def _free_slots(blocks: dict[str, OpenWorkspace], faults: list[Exception]) -> None:
    try:
        free_slots(blocks)
    except Exception as error:  # noqa: BLE001 - the jobs that are open are continued all the same
        runner().log.error("slots of lost runs were not freed: %s", error)
        faults.append(error)


def _continue(seen: JobSeen, faults: list[Exception]) -> WatchedJob:
    try:
        return act_on(seen)
    except Exception as error:  # noqa: BLE001 - one that fails leaves the others to be continued
        runner().log.error("job %s was not continued: %s", seen.job.id, error)
        faults.append(error)
        return seen.watched(f"it was not continued: {error}")


def _name(finding: Finding) -> WorkspaceName:
    return WorkspaceName(finding.workspace)
