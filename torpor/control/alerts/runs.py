"""Alerts of runs and schedules, as the server of the installation shows them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Final

import msgspec

from torpor.control.alerts.delivery import Alert, Key, Kind
from torpor.control.reports import ALL, moment

LOOK_BACK_S: Final = 26 * 3600.0
"""Seconds that failed runs count: a daily run that fails each day is one alert that lasts."""
OVERDUE_TIMES: Final = 3
"""A schedule is overdue after this many of its intervals, but after OVERDUE_S at the earliest."""
OVERDUE_S: Final = 600.0
"""Seconds after which a schedule is overdue at the earliest."""
BACKUP_S: Final = 2 * 3600.0
"""Seconds that a backup may take from its scheduled time."""
FROM_RUNS: Final[frozenset[Kind]] = frozenset({"run failed", "schedule stopped", "backup missed"})
"""The alerts that are unknown while the server does not answer."""

_NEXT: Final = {
    "hibernate": "its machine was kept and costs money: correct the cause and run hibernate again",
    "wake": "correct the cause and wake the workspace again; watch shows what the run left",
    "backup": "there is no new snapshot, and nothing was deleted: correct the cause and run "
    "backup again",
    "verify": "stored objects may be missing or changed: see the run's table before you prune or "
    "delete anything",
    "prune": "nothing was deleted: do what the error says, and run prune again",
    "watch": "machines may not have been hibernated, renewed or continued: correct the cause; the "
    "next look tries again",
    "job": "see job-status with the end of its log; correct the cause and submit the job again",
}


class FailedRun(msgspec.Struct, frozen=True, kw_only=True):
    """A run that failed or crashed. ``workspace``: the block that it was for; may be empty.
    ``mended``: a later run of the same deployment and workspace has completed."""

    id: str
    name: str
    flow: str
    deployment: str
    workspace: str
    state: str
    message: str
    ended_unix: float
    last_words: str = ""  # the newest errors in its log
    url: str = ""
    mended: bool = False

    @property
    def key(self) -> Key:
        """The subject of the alert: for a job the job, for other flows the deployment and the
        workspace."""
        if self.flow == "job":
            return "run failed", self.id
        return "run failed", f"{self.flow}/{self.deployment} {self.workspace}".strip()


class FlowSchedule(msgspec.Struct, frozen=True, kw_only=True):
    """The schedules of one flow's deployments. ``coming``: when runs that have not begun are to
    begin, by their workspace, earliest first; a time that has passed is one that no worker took.
    ``due_unix``: when the newest run was to begin that is past its time, by its workspace.
    ``ended_unix``: when the last run ended by itself."""

    deployment: str
    active: bool
    coming: Mapping[str, Sequence[float]]
    due_unix: Mapping[str, float]
    ended_unix: float | None

    def interval_s(self, workspace: str) -> float | None:
        """The longest time between two planned runs for the workspace; None where fewer are
        planned."""
        times = sorted({at for name in _for(workspace) for at in self.coming.get(name, ())})
        return max((b - a for a, b in pairwise(times)), default=None)

    def last_due_unix(self, workspace: str) -> float | None:
        """When the newest run for the workspace was to begin; None where none is or was planned."""
        past = [self.due_unix[name] for name in _for(workspace) if name in self.due_unix]
        planned = any(name in self.coming for name in _for(workspace))
        return max(past, default=0.0 if planned else None)

    @property
    def quiet_s(self) -> float:
        """Seconds after a run after which the next one is overdue."""
        every = [found for name in self.coming if (found := self.interval_s(name))]
        return max(OVERDUE_S, OVERDUE_TIMES * min(every, default=0.0))


def _for(workspace: str) -> tuple[str, ...]:
    """The names under which runs for a workspace are filed: its own, and the name for all
    workspaces."""
    return workspace, "", ALL


def of_failures(runs: Sequence[FailedRun], asleep: frozenset[str] = frozenset()) -> list[Alert]:
    """Alerts of failed runs: the newest failure of each deployment and workspace that no later run
    has mended, and each job's. ``asleep``: blocks of workspaces without a machine: they have
    nothing to back up."""
    newest: dict[Key, FailedRun] = {}
    for run in sorted(runs, key=lambda run: run.ended_unix):
        newest[run.key] = run
    return [
        _failed(run)
        for run in newest.values()
        if not run.mended and not (run.flow == "backup" and run.workspace in asleep)
    ]


def of_schedule(schedule: FlowSchedule, now_unix: float, *, itself: bool = False) -> list[Alert]:
    """Alerts of a schedule that is on: the server plans no run, no worker takes them, or none has
    ended for too long. ``itself``: this look is such a run."""
    if not schedule.active:
        return []
    name = schedule.deployment
    times = [time for planned in schedule.coming.values() for time in planned]
    late = [time for time in times if now_unix - time > OVERDUE_S]
    cause = ""
    if not times:
        cause = "Its schedule is on, and the server plans no run of it."
        step = "see server.log: its scheduler has ended or fails; make down, then make up"
    elif late:
        cause = f"{len(late)} of its runs wait, the first since {moment(min(late))}."
        step = "see that a worker of its pool runs, and worker.log; make up starts it"
    elif itself and schedule.ended_unix and now_unix - schedule.ended_unix > schedule.quiet_s:
        cause = f"Its last run before this one ended at {moment(schedule.ended_unix)}."
        step = (
            "idle machines and budgets were not looked at meanwhile: see server.log and worker.log "
            "for what stopped"
        )
    if not cause:
        return []
    return [
        Alert(
            kind="schedule stopped",
            subject=name,
            title=f"{name} does not run by its schedule",
            cause=cause,
            next_step=step,
            at_unix=now_unix,
            after_s=0.0 if times else OVERDUE_S,  # a schedule that was just switched on
        )
    ]


def of_backups(
    schedule: FlowSchedule,
    newest: Mapping[str, float | None],
    since: Mapping[str, float],
    now_unix: float,
) -> list[Alert]:
    """Alerts of workspaces that are on a machine and whose backup is overdue. ``newest``: when the
    newest snapshot was made, and ``since``: since when it is on a machine, both by the block's
    name."""
    found = []
    for block, on_unix in since.items() if schedule.active else ():
        due_unix = schedule.last_due_unix(block)
        if block not in newest or due_unix is None:
            continue
        made_unix = newest[block]
        known_unix = max(made_unix or 0.0, on_unix)
        interval_s = schedule.interval_s(block)
        missed = known_unix < due_unix <= now_unix - BACKUP_S
        silent = interval_s is not None and known_unix < now_unix - interval_s - BACKUP_S
        if not missed and not silent:
            continue
        made = f"was made at {moment(made_unix)}" if made_unix else "does not exist"
        found.append(
            Alert(
                kind="backup missed",
                subject=block,
                workspace=block,
                title=f"workspace {block} has missed its backup",
                cause=f"Its newest snapshot {made}. Work since then is on its machine alone.",
                next_step="see what the last run of backup says and that a worker runs; run backup",
                at_unix=now_unix,
            )
        )
    return found


def _failed(run: FailedRun) -> Alert:
    of = f" for workspace {run.workspace}" if run.workspace else ""
    killed = (
        " Its process was killed, its host went down, or its memory ran out."
        if run.state == "Crashed" and not run.last_words
        else ""
    )
    lines = [
        f"Flow: {run.flow}",
        f"Deployment: {run.flow}/{run.deployment}",
        f"Workspace: {run.workspace or 'all'}",
        f"Run: {run.name} {run.url}".rstrip(),
        f"{run.state}: {moment(run.ended_unix)}",
        f"Cause: {run.message}{killed}",
    ]
    if run.last_words and run.last_words not in run.message:
        lines.append(f"Last words: {run.last_words}")
    return Alert(
        kind="run failed",
        subject=run.key[1],
        title=f"{run.flow}{of} {run.state.lower()}",
        cause="\n".join(lines),
        next_step=_NEXT.get(run.flow, "open the run, correct the cause and run it again"),
        at_unix=run.ended_unix,
    )
