"""Watch: look at all machines and jobs, hibernate machines that are idle or whose budget is spent,
and continue jobs."""

from __future__ import annotations

import time
from typing import Final

import msgspec

from flows.continuing import JobSeen, act_on, free_slots, see_jobs
from flows.ending import hibernate_idle, hibernate_over_budget, over_budget
from flows.flow import flow
from tasks.events import MachineUnknown, emit
from tasks.opening import open_all
from tasks.runner import runner
from tasks.watching import (
    Standing,
    close_gone,
    has_deadline,
    list_all_machines,
    look_at,
    newest_made_unix,
    renew_deadline,
)
from tasks.workspace import OpenWorkspace
from torpor.control.idleness import Verdict
from torpor.control.metrics import write_metrics
from torpor.control.reconciliation import Finding
from torpor.control.rental.records import Rental
from torpor.control.watching import Watched, WatchedJob, WatchReport
from torpor.shared.errors import TorporError
from torpor.shared.values import Label, MachineId, WorkspaceName, names_of

_NEXT: Final = {
    "busy": "none: it works",
    "unknown": "it is kept and costs money: log in, or hibernate it yourself",
}


@flow("watch")
def watch(
    workspaces: list[str] = [],  # noqa: B006 - a form shows the default; it is never changed
    dry_run: bool = True,
    metrics: str = "",
) -> WatchReport:
    """Look at all machines of the installation, hibernate those that are idle or whose budget is
    spent, and continue jobs whose run has gone.

    A machine is idle by the rules of its Workspace block. One of which that cannot be said is kept,
    with a warning and its reason. A machine whose provider block sets a deadline goes on only while
    this flow renews it. When a budget will be spent by the time that hibernating takes,
    the machines that it counts are hibernated, also those that work. The rental of a machine that
    has gone without torpor is closed. Nothing else is ended: what may be forgotten is only listed.

    Args:
        workspaces: The Workspace blocks to look at. Empty: all of them.
        dry_run: Hibernate and continue nothing. The table shows what would be done.
        metrics: A file for Prometheus to write, such as torpor.prom in the folder of
            node_exporter's textfile collector. Empty: write none.
    """
    blocks, closed = open_all(workspaces or runner().workspaces())
    watched = [
        Watched(WorkspaceName(name), "unknown", str(error), "correct its Workspace block")
        for name, error in closed.items()
    ]
    opened = {one.spec.name: one for one in blocks.values()}
    named = {name: [b for b, one in blocks.items() if one.spec.name == name] for name in opened}
    standing = list_all_machines([*opened.values()])
    if not dry_run:
        standing = close_gone(standing, [*opened.values()])
    newest, troubles = _newest(opened)
    faults: list[Exception] = []
    if not dry_run:
        _free_slots(blocks, faults)  # first: a run that is stuck is not one that waits
    jobs, unread_jobs = see_jobs(opened)
    with_job = {seen.job.workspace for seen in jobs}
    for name, why in {**standing.unread, **troubles, **unread_jobs}.items():
        watched.append(Watched(name, "unknown", why, "see that its store answers"))
    used = [one for one in standing.findings if one.kind == "in use" and one.machine and one.rental]
    if not dry_run:
        _renew(standing.findings, opened, faults)
    over, unread = over_budget(_handed_over(standing, opened), dry_run)
    looks = [
        (one, look_at.submit(opened[_name(one)], one.machine, one.rental))
        for one in used
        if one.machine and one.rental
    ]
    watched += [
        _watched(opened[_name(one)], one, look.result(), newest, over, dry_run)
        for one, look in looks
    ]
    watched = [
        _undecided(one, named[one.workspace], one.workspace in with_job)
        if one.idle or one.over
        else one
        for one in watched
    ]
    watched += _not_there(standing, opened, newest, over)
    there = {one.workspace for one in watched}
    watched += [
        Watched(
            name,
            "off",
            "",
            "none: it has a job" if name in with_job else "wake it to work on it",
            newest_unix=newest.get(name),
        )
        for name in opened
        if name not in there
    ]
    _warn(watched)
    seen_jobs = [seen.watched() for seen in jobs]
    if not dry_run:
        watched = [_act(one, blocks, named.get(one.workspace, []), faults) for one in watched]
        seen_jobs = [_continue(seen, faults) for seen in jobs]
    shown = {id(one) for one in used}
    report = WatchReport(
        time.time(),
        sorted(watched, key=lambda one: (one.kind == "off", one.workspace)),
        [one for one in standing.findings if id(one) not in shown and not _is_missing(one)],
        [*standing.silent],
        seen_jobs,
        unread,
    )
    runner().log.info(report.message())
    runner().table(key="watch", rows=report.rows(), description=report.message())
    if metrics:
        write_metrics(report, metrics)
    if faults:
        raise faults[-1]
    return report


def _newest(
    opened: dict[WorkspaceName, OpenWorkspace],
) -> tuple[dict[WorkspaceName, float | None], dict[WorkspaceName, str]]:
    found: dict[WorkspaceName, float | None] = {}
    troubles: dict[WorkspaceName, str] = {}
    looks = [(name, newest_made_unix.submit(one)) for name, one in opened.items()]
    for name, look in looks:
        try:
            found[name] = look.result()
        except TorporError as error:
            troubles[name] = str(error)
    return found, troubles


def _handed_over(
    standing: Standing, opened: dict[WorkspaceName, OpenWorkspace]
) -> list[tuple[OpenWorkspace, Rental]]:
    rentals = [one.rental for one in standing.findings if one.rental]
    return [
        (opened[rental.label.workspace], rental)
        for rental in rentals
        if rental.state == "handed over" and rental.label.workspace in opened
    ]


def _watched(
    opened: OpenWorkspace,
    finding: Finding,
    verdict: Verdict,
    newest: dict[WorkspaceName, float | None],
    over: dict[Label, str],
    dry_run: bool,
) -> Watched:
    name, machine, rental = opened.spec.name, finding.machine, finding.rental
    idle = verdict.kind == "idle" and opened.spec.idle.hibernate
    step = _NEXT.get(verdict.kind, "hibernate it" if idle else "none: its block says report")
    why = over.get(rental.label, "") if rental else ""
    if why:
        step = f"{why}: hibernate it"
    if (idle or why) and dry_run:
        step += ": this was a dry run"
    return Watched(
        name,
        verdict.kind,
        verdict.reason,
        step,
        machine.id if machine else None,
        machine.provider if machine else "",
        rental.created_unix if rental else None,
        finding.price_usd_h or (rental.price_usd_h if rental else 0.0) or None,
        newest.get(name),
        idle,
        why,
    )


def _not_there(
    standing: Standing,
    opened: dict[WorkspaceName, OpenWorkspace],
    newest: dict[WorkspaceName, float | None],
    over: dict[Label, str],
) -> list[Watched]:
    """A row for each machine that was handed over and that its provider does not show."""
    rows = []
    for finding in standing.findings:
        rental, name = finding.rental, _name(finding)
        if not _is_missing(finding) or rental is None or name not in opened:
            continue
        reason = standing.silent.get(rental.provider, "") or f"its machine is {finding.kind}"
        if why := over.get(rental.label, ""):
            reason += f"; {why}, and it cannot be hibernated now"
        rows.append(
            Watched(
                name,
                "unknown",
                reason,
                finding.next_step,
                rental.machine or MachineId("unnamed"),
                rental.provider,
                rental.created_unix,
                rental.price_usd_h or None,
                newest.get(name),
            )
        )
    return rows


def _is_missing(finding: Finding) -> bool:
    return (
        finding.rental is not None
        and finding.machine is None
        and (finding.rental.state == "handed over")
    )


def _warn(watched: list[Watched]) -> None:
    for one in watched:
        if one.kind != "unknown":
            continue
        runner().log.warning("workspace %s is unknown: %s", one.workspace, one.reason)
        if one.machine is not None:
            emit(
                MachineUnknown(
                    workspace=one.workspace,
                    machine=one.machine,
                    provider=one.provider,
                    reason=one.reason,
                    price_usd_h=one.price_usd_h or 0.0,
                )
            )


def _undecided(one: Watched, blocks: list[str], has_job: bool) -> Watched:
    """Kept, where a job hibernates the workspace when it has ended, or where several blocks are for
    the workspace: they may store different folders."""
    if has_job and not one.over:
        step = "none: its job hibernates it when it has ended"
        return msgspec.structs.replace(one, next_step=step, idle=False)
    if len(blocks) == 1:
        return one
    step = f"hibernate it yourself: the blocks {', '.join(blocks)} are all for this workspace"
    if one.over:
        step = f"{one.over}: {step}"
        runner().log.warning("machine %s was not hibernated: %s", one.machine, step)
    return msgspec.structs.replace(one, next_step=step, idle=False, over="")


def _act(
    one: Watched, opened: dict[str, OpenWorkspace], blocks: list[str], faults: list[Exception]
) -> Watched:
    if one.over:
        return hibernate_over_budget(one, opened[blocks[0]], blocks[0], faults)
    return hibernate_idle(one, blocks[0], faults) if one.idle else one


def _renew(
    findings: list[Finding], opened: dict[WorkspaceName, OpenWorkspace], faults: list[Exception]
) -> None:
    """The machines that stop themselves when the control side is gone go on, also those on which a
    run works that has not handed them over: a long restore, a drill."""
    of = {name: one for one in opened.values() for name in names_of(one.spec.name)}
    for one in findings:
        if one.kind not in ("in use", "unfinished") or one.machine is None:
            continue
        workspace = of[_name(one)]
        try:
            if has_deadline(workspace, one.machine):
                renew_deadline(workspace, one.machine)
        except TorporError as error:
            runner().log.error("the deadline of machine %s stands: %s", one.machine.id, error)
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
