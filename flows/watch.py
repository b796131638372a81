"""Watch: look at all machines and jobs, hibernate machines that are idle or whose budget is spent,
and continue jobs."""

from __future__ import annotations

import time
from collections.abc import Collection
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from typing import Annotated, Final, NamedTuple

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
from flows.procedures.watch.block_differences import (
    BlockDifferences,
    block_differences,
    most_frequent_saves,
    undecided,
)
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
from tasks.fleet import look_at_fleet
from tasks.flow import flow
from tasks.overview import look_once_more, with_closed
from tasks.ownership import why_only_reported
from tasks.run_table import shown
from tasks.runner import StepFuture, runner
from tasks.trouble import trouble
from tasks.watch import (
    AllMachines,
    MachineLook,
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
from torpor.control.front_page import front_page
from torpor.control.metrics import Fleet, write_metrics
from torpor.control.money.exhaustion import BudgetsSeen
from torpor.control.overview import Overviews
from torpor.control.reconciliation import Finding
from torpor.control.rental.records import Rental
from torpor.control.store.shared_listings import SharedListings
from torpor.control.watch_report import LeftMachine, Watched, WatchedJob, WatchReport
from torpor.shared.errors import NotDelivered, TorporError
from torpor.shared.values import Label, WorkspaceName, names_of

OWNERS_AT_ONCE: Final = 8


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

    Returns:
        In `watched`, each machine with its verdict, its cost and the next step, and each workspace
        that is asleep; in `alerts`, what a person must hear of.

    Raises:
        NotDelivered: A notification block did not accept an alert.
        TorporError: What stopped the look at one workspace, store or budget. The other workspaces
            were looked at all the same.

    Example:
        A dry run, which changes nothing:
        ```python
        from flows import watch

        print(watch().rows())
        ```
    """
    asked = _open(workspaces)
    faults: list[Exception] = []
    look = _look(asked, backup_hours, faults, dry_run=dry_run)
    watched = _rows(asked, look, dry_run=dry_run, only_report=only_report)
    for one in watched:
        if one.kind == "unknown":
            runner().log.warning("workspace %s is unknown: %s", one.workspace, one.reason)
    jobs = [one.watched() for one in look.jobs]
    if not dry_run:
        remember_spent(look.budgets, watched)
        watched = [_hibernate(one, asked, faults) for one in watched]
        jobs = [_continue(one, asked, faults) for one in look.jobs]
    report = _report(look, watched, jobs)
    observation = Observation(
        report=report,
        at_markets=look.at_markets,
        budgets=look.budgets if look.handed_over else None,
        newest=look.newest,
        named=asked.named,
        unread=[*look.unread],
        some=bool(workspaces or asked.closed),
        overview=look.costs,
        not_own=asked.not_own,
    )
    alarms = see_alarms(observation, faults)
    delivered = None if dry_run else tell_of(alarms, notify, faults)
    left = look.left
    if not dry_run:  # machines that were left are acted on once it is remembered since when
        sure = {name: asked.named[name] for name in asked.own if name not in look.doubtful}
        reconcile_abandoned(report.findings, sure, asked.differences, faults)
        left = [
            act_on_left(
                one,
                asked.workspaces[one.workspace],
                asked.named[one.workspace][0],
                delivered,
                faults,
            )
            if one.workspace in asked.own
            else one
            for one in left
        ]
    titles = [one.title for one in alarms.alerts]
    report = msgspec.structs.replace(report, left=left, alerts=titles, valid_unix=alarms.valid_unix)
    runner().log.info(report.message())
    if not workspaces:
        every = with_closed(look.costs, asked.closed)
        all_seen = not (alarms.doubt.kinds or alarms.doubt.workspaces)
        page = front_page(every, alarms.alerts, jobs, report.at_unix, sure=all_seen)
        runner().front_page(page)
    if metrics:
        hear_of = people_hear_of(alarms, delivered, report.at_unix)
        write_metrics(report, hear_of, _fleet(asked, look, metrics), metrics)
    if faults:
        worst = next((f for f in faults if not isinstance(f, NotDelivered)), faults[-1])
        raise shown(report, worst)
    return report


class _Opened(NamedTuple):
    """The workspaces of a look. ``blocks``: each Workspace block, opened; ``closed``: those that
    cannot be opened, and why. ``named``: the blocks of each workspace; ``workspaces``: the first of
    them, which stands for all; ``differences``: what they differ in. ``not_own``: why nothing is
    done for a workspace, such as that another control side owns it."""

    blocks: dict[str, OpenWorkspace]
    closed: dict[str, TorporError]
    named: dict[WorkspaceName, list[str]]
    workspaces: dict[WorkspaceName, OpenWorkspace]
    differences: dict[WorkspaceName, BlockDifferences]
    not_own: dict[WorkspaceName, str]

    @property
    def own(self) -> dict[WorkspaceName, OpenWorkspace]:
        """The workspaces for which something may be done."""
        return {name: one for name, one in self.workspaces.items() if name not in self.not_own}


class _Look(NamedTuple):
    """What a look has seen. ``newest``: when each workspace's newest snapshot was made.
    ``handed_over``: the machines that were handed over. ``used``: those of them that their
    providers show, each with its verdict. ``over``: why a machine is to be hibernated for its
    budget. ``left``: the machines that were never handed over. ``missed``: the backups that are too
    old. ``unread``: of which workspaces something could not be read; ``doubtful``: those of which
    that may have said that a machine works."""

    at_markets: AllMachines
    newest: dict[WorkspaceName, float | None]
    costs: Overviews
    jobs: list[JobSeen]
    handed_over: list[tuple[OpenWorkspace, Rental]]
    missed: dict[WorkspaceName, str]
    budgets: BudgetsSeen
    over: dict[Label, str]
    used: list[tuple[Finding, MachineLook]]
    left: list[LeftMachine]
    unread: dict[WorkspaceName, str]
    doubtful: dict[WorkspaceName, str]

    @property
    def with_job(self) -> set[WorkspaceName]:
        """The workspaces that have a job."""
        return {one.job.workspace for one in self.jobs}


def _open(wanted: list[str]) -> _Opened:
    """Open the ``wanted`` blocks; without any, all blocks of the installation."""
    blocks, closed = open_all(wanted or runner().workspaces())
    blocks = patient(blocks)
    named: dict[WorkspaceName, list[str]] = {}
    for block, one in blocks.items():
        named.setdefault(one.spec.name, []).append(block)
    workspaces = {name: blocks[of[0]] for name, of in named.items()}
    not_own = {name: why for name, why in _why_not_own(workspaces).items() if why}
    for why in not_own.values():
        runner().log.warning("only reported: %s", why)
    return _Opened(blocks, closed, named, workspaces, block_differences(blocks, named), not_own)


def _why_not_own(workspaces: dict[WorkspaceName, OpenWorkspace]) -> dict[WorkspaceName, str]:
    """Several at once: a store that is slow must not use up the patience of the look."""
    with ThreadPoolExecutor(OWNERS_AT_ONCE, thread_name_prefix="owners") as threads:
        looks = {
            name: threads.submit(copy_context().run, why_only_reported, one)
            for name, one in workspaces.items()
        }
    return {name: look.result() for name, look in looks.items()}


def _look(asked: _Opened, backup_hours: float, faults: list[Exception], *, dry_run: bool) -> _Look:
    """Look at providers, stores and machines. Unless it is a ``dry_run``, close the rentals of
    machines that have gone, free the slots of lost runs, renew deadlines, and give machines what
    they need to save by themselves."""
    opened = asked.workspaces
    once = SharedListings()
    at_markets = list_all_machines([*opened.values()], once)
    newest, troubles = newest_snapshots({of: one.through(once.of) for of, one in opened.items()})
    if not dry_run:
        at_markets = close_gone(at_markets, [*asked.own.values()], newest)
    shared = {of: one.through(once.of) for of, one in asked.blocks.items()}
    costs = look_once_more(shared, at_markets.of)
    if not dry_run:
        own = {of: one for of, one in asked.blocks.items() if one.spec.name in asked.own}
        # first, because a run that is stuck does not count as waiting
        _free_slots(own, faults)
    jobs, unread_jobs = see_jobs(opened, once)
    with_job = {one.job.workspace for one in jobs}
    handed_over = _handed_over(at_markets, opened)
    missed, unread_backups = missed_backups(handed_over, backup_hours)
    if not dry_run:
        _renew(at_markets, opened, faults)
    over, budgets = over_budget(handed_over, [*opened.values()])
    looks = _submit_looks(asked, at_markets, asked.own.keys() - with_job if not dry_run else ())
    stored = [name for name, made_unix in newest.items() if made_unix is not None]
    doubtful = {**at_markets.unread, **unread_jobs}
    left = see_left(
        at_markets.findings, opened, asked.named, stored, with_job, asked.differences, doubtful
    )
    return _Look(
        at_markets,
        newest,
        costs,
        jobs,
        handed_over,
        missed,
        budgets,
        over,
        [(one, seen(look)) for one, look in looks],
        left,
        {**at_markets.unread, **troubles, **unread_jobs, **unread_backups},
        doubtful,
    )


def _submit_looks(
    asked: _Opened, at_markets: AllMachines, saving: Collection[WorkspaceName]
) -> list[tuple[Finding, StepFuture[MachineLook]]]:
    """Begin to look at the machines in use, which takes minutes for a machine that hangs. Machines
    of the workspaces in ``saving`` get what they need to save by themselves."""
    saves = {
        name: most_frequent_saves([asked.blocks[of] for of in asked.named[name]]) for name in saving
    }
    looks = []
    for one in at_markets.findings:
        if one.kind == "in use" and one.machine and one.rental:
            name = _name(one)
            look = look_at.submit(asked.workspaces[name], one.machine, one.rental, saves.get(name))
            looks.append((one, look))
    return looks


def _rows(asked: _Opened, look: _Look, *, dry_run: bool, only_report: bool) -> list[Watched]:
    """A row for each machine and each workspace: whether it is idle, and what happens next. A
    machine in doubt is kept."""
    opened = asked.workspaces
    watched = [
        *(
            Watched(WorkspaceName(name), "unknown", str(error), "correct its Workspace block")
            for name, error in asked.closed.items()
        ),
        *(
            Watched(name, "unknown", why, "do what its reason says, or see that its store answers")
            for name, why in look.unread.items()
        ),
        *(
            in_use(opened[_name(one)], one, found, look.newest, look.over, dry_run, only_report)
            for one, found in look.used
        ),
        *not_there(look.at_markets, opened, look.newest, look.over),
    ]
    watched += asleep(opened, look.newest, {one.workspace for one in watched}, look.with_job)
    return [
        kept_in_doubt(
            undecided(one, asked.differences.get(one.workspace), one.workspace in look.with_job),
            look.doubtful.get(one.workspace, ""),
        )
        for one in watched
    ]


def _report(look: _Look, watched: list[Watched], jobs: list[WatchedJob]) -> WatchReport:
    """The tables of this look. A finding about a machine in use is shown in the row of the machine,
    without a row of its own."""
    in_table = {id(one) for one, _ in look.used}
    findings = [
        one for one in look.at_markets.findings if id(one) not in in_table and not is_missing(one)
    ]
    return WatchReport(
        at_unix=time.time(),
        watched=sorted(watched, key=lambda one: (one.kind == "off", one.workspace)),
        findings=findings,
        silent=[*look.at_markets.silent],
        jobs=jobs,
        unread=look.budgets.unread,
        left=look.left,
        missed=look.missed,
    )


def _fleet(asked: _Opened, look: _Look, metrics: str) -> Fleet:
    """What metrics show beside this look. The look is done, and neither its faults nor its table
    depend on this."""
    try:
        return look_at_fleet(asked.blocks, asked.closed, look.costs, metrics)
    except Exception as error:  # noqa: BLE001 - the other metrics are written all the same
        runner().log.warning("metrics lack costs, queues and transfers: %s", trouble(error))
        return Fleet()


def _handed_over(
    at_markets: AllMachines, opened: dict[WorkspaceName, OpenWorkspace]
) -> list[tuple[OpenWorkspace, Rental]]:
    rentals = [one.rental for one in at_markets.findings if one.rental]
    return [
        (opened[rental.label.workspace], rental)
        for rental in rentals
        if rental.state == "handed over" and rental.label.workspace in opened
    ]


def _hibernate(one: Watched, asked: _Opened, faults: list[Exception]) -> Watched:
    """Begin to hibernate the machine of this row, if the row says so."""
    if not (one.over or one.hibernates):
        return one
    if why := asked.not_own.get(one.workspace):
        return msgspec.structs.replace(one, next_step=f"none: {why}")
    block = asked.named[one.workspace][0]
    if one.over:
        return hibernate_over_budget(one, asked.blocks[block], block, faults)
    return hibernate_idle(one, block, faults)


def _renew(
    at_markets: AllMachines, opened: dict[WorkspaceName, OpenWorkspace], faults: list[Exception]
) -> None:
    """Renew the deadlines of machines that stop themselves when the control side is gone. Included
    are machines on which a run works that has not handed them over (a long restore, a drill), and
    machines whose use cannot be read."""
    of = {name: one for one in opened.values() for name in names_of(one.spec.name)}
    used = [one.machine for one in at_markets.findings if one.kind in ("in use", "unfinished")]
    for machine in (*filter(None, used), *at_markets.unjudged):
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


def _continue(seen: JobSeen, asked: _Opened, faults: list[Exception]) -> WatchedJob:
    if why := asked.not_own.get(seen.job.workspace):
        return seen.watched(f"it was not continued: {why}")
    try:
        return act_on(seen)
    except Exception as error:  # noqa: BLE001 - one that fails leaves the others to be continued
        runner().log.error("job %s was not continued: %s", seen.job.id, error)
        faults.append(error)
        return seen.watched(f"it was not continued: {error}")


def _name(finding: Finding) -> WorkspaceName:
    return WorkspaceName(finding.workspace)
