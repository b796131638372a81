"""Watch: look at all machines and jobs, hibernate idle machines, and continue jobs."""

from __future__ import annotations

import time
from typing import Final

import msgspec

from flows.continuing import JobSeen, act_on, free_slots, see_jobs
from flows.flow import flow
from flows.hibernate import hibernate
from tasks.events import MachineIdle, MachineUnknown, emit
from tasks.opening import open_workspace
from tasks.runner import runner
from tasks.watching import Standing, list_all_machines, look_at, newest_made_unix
from tasks.workspace import OpenWorkspace
from torpor.control.idleness import Verdict
from torpor.control.metrics import write_metrics
from torpor.control.reconciliation import Finding
from torpor.control.watching import Watched, WatchedJob, WatchReport
from torpor.shared.errors import TorporError
from torpor.shared.values import MachineId, WorkspaceName

AGAIN_S: Final = 900
"""A hibernation that failed is started again after this time, and not at every look."""
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
    """Look at all machines of the installation, hibernate those that are idle, and continue jobs
    whose run has gone.

    A machine is idle by the rules of its Workspace block. One of which that cannot be said is kept,
    with a warning and its reason. Nothing else is ended: what may be forgotten is only listed.

    Args:
        workspaces: The Workspace blocks to look at. Empty: all of them.
        dry_run: Hibernate and continue nothing. The table shows what would be done.
        metrics: A file for Prometheus to write, such as torpor.prom in the folder of
            node_exporter's textfile collector. Empty: write none.
    """
    blocks, watched = _open_all(workspaces or runner().workspaces())
    opened = {one.spec.name: one for one in blocks.values()}
    named = {name: [b for b, one in blocks.items() if one.spec.name == name] for name in opened}
    standing = list_all_machines([*opened.values()])
    newest, troubles = _newest(opened)
    faults: list[Exception] = []
    if not dry_run:
        _free_slots(blocks, faults)  # first: a run that is stuck is not one that waits
    jobs, unread_jobs = see_jobs(opened)
    with_job = {seen.job.workspace for seen in jobs}
    for name, why in {**standing.unread, **troubles, **unread_jobs}.items():
        watched.append(Watched(name, "unknown", why, "see that its store answers"))
    used = [one for one in standing.findings if one.kind == "in use" and one.machine and one.rental]
    looks = [
        (one, look_at.submit(opened[_name(one)], one.machine, one.rental))
        for one in used
        if one.machine and one.rental
    ]
    watched += [
        _watched(opened[_name(one)], one, look.result(), newest, dry_run) for one, look in looks
    ]
    watched = [
        _undecided(one, named[one.workspace], one.workspace in with_job) if one.idle else one
        for one in watched
    ]
    watched += _not_there(standing, opened, newest)
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
        watched = [
            _act(one, named[one.workspace][0], faults) if one.idle else one for one in watched
        ]
        seen_jobs = [_continue(seen, faults) for seen in jobs]
    shown = {id(one) for one in used}
    report = WatchReport(
        time.time(),
        sorted(watched, key=lambda one: (one.kind == "off", one.workspace)),
        [one for one in standing.findings if id(one) not in shown and not _is_missing(one)],
        [*standing.silent],
        seen_jobs,
    )
    runner().log.info(report.message())
    runner().table(key="watch", rows=report.rows(), description=report.message())
    if metrics:
        write_metrics(report, metrics)
    if faults:
        raise faults[-1]
    return report


def _open_all(names: list[str]) -> tuple[dict[str, OpenWorkspace], list[Watched]]:
    """The workspaces by the names of their blocks, and a row for each that cannot be opened."""
    opened: dict[str, OpenWorkspace] = {}
    closed = []
    for name in names:
        try:
            opened[name] = open_workspace(name)
        except TorporError as error:
            closed.append(
                Watched(WorkspaceName(name), "unknown", str(error), "correct its Workspace block")
            )
    return opened, closed


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


def _watched(
    opened: OpenWorkspace,
    finding: Finding,
    verdict: Verdict,
    newest: dict[WorkspaceName, float | None],
    dry_run: bool,
) -> Watched:
    name = opened.spec.name
    idle = verdict.kind == "idle" and opened.spec.idle.hibernate
    step = _NEXT.get(verdict.kind, "hibernate it" if idle else "none: its block says report")
    if idle and dry_run:
        step = "hibernate it: this was a dry run"
    machine, rental = finding.machine, finding.rental
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
    )


def _not_there(
    standing: Standing,
    opened: dict[WorkspaceName, OpenWorkspace],
    newest: dict[WorkspaceName, float | None],
) -> list[Watched]:
    """A row for each machine that was handed over and that its provider does not show."""
    rows = []
    for finding in standing.findings:
        rental, name = finding.rental, _name(finding)
        if not _is_missing(finding) or rental is None or name not in opened:
            continue
        silence = standing.silent.get(rental.provider, "")
        rows.append(
            Watched(
                name,
                "unknown",
                silence or f"its machine is {finding.kind}",
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
    if has_job:
        step = "none: its job hibernates it when it has ended"
        return msgspec.structs.replace(one, next_step=step, idle=False)
    if len(blocks) == 1:
        return one
    step = f"hibernate it yourself: the blocks {', '.join(blocks)} are all for this workspace"
    return msgspec.structs.replace(one, next_step=step, idle=False)


def _act(one: Watched, block: str, faults: list[Exception]) -> Watched:
    """Hibernate an idle machine. The hibernation asks for the verdict again."""
    machine = one.machine or MachineId("")
    emit(
        MachineIdle(
            workspace=one.workspace,
            machine=machine,
            provider=one.provider,
            reason=one.reason,
            hibernates=True,
        )
    )
    try:
        runs = runner().start(
            hibernate,
            f"watch-{machine}-{int(time.time()) // AGAIN_S}",
            workspace=block,
            machine=machine,
            only_if_idle=True,
        )
    except Exception as error:  # noqa: BLE001 - one that fails leaves the others to be looked at
        runner().log.error("machine %s was not hibernated: %s", machine, error)
        faults.append(error)
        return msgspec.structs.replace(one, next_step=f"it was not hibernated: {error}")
    step = f"{runs} hibernates it" if runs else "it was hibernated: wake it to work on it"
    return msgspec.structs.replace(one, next_step=step)


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
