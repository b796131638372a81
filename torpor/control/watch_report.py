"""What `watch` found: one row for each workspace's machine, and one for each forgotten thing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, Literal

import msgspec

from torpor.control.idleness import Kind
from torpor.control.machine_use import MachineUse
from torpor.control.reconciliation import Finding
from torpor.control.reports import Report, Row, moment
from torpor.shared.values import Label, MachineId, SnapshotId, WorkspaceName

BACK_UP: Final = "run backup, and see what its last run says and that its schedule is on"
"""The next step for a workspace that has missed its backup."""
RUNS_ON: Final = "runs on"
EXPECTED: Final = "idle at"
"""The beginning of the column in which `torpor status` finds when a machine is expected to
sleep."""
_MOST_JOBS = 5  # jobs of one workspace that its row shows
_MOST_ALERTS = 5  # alerts in the sentence; the table `alerts` has all
_SHOWN_IN_MIN = 90  # minutes; an older age is shown in hours


class WatchedJob(msgspec.Struct, frozen=True):
    """A job that has not ended. ``next_step`` is a phrase for people."""

    job: str
    workspace: WorkspaceName
    state: str
    driven: bool  # whether a flow run works on it
    next_step: str
    failures: int = 0  # how many of its runs failed in a row
    why: str = ""  # why the last run failed
    machine: MachineId | None = None  # the machine that costs money for it

    def words(self) -> str:
        return f"{self.job} is {self.state}: {self.next_step}"


class Watched(msgspec.Struct, frozen=True):
    """One machine of a workspace, with what `watch` says of it; ``kind`` is "off" for a workspace
    without a machine."""

    workspace: WorkspaceName
    kind: Kind | Literal["off"]
    reason: str
    next_step: str
    machine: MachineId | None = None
    provider: str = ""
    since_unix: float | None = None
    price_usd_h: float | None = None  # None: unknown
    newest_unix: float | None = None  # when its newest snapshot was made
    # `watch` hibernates it because it is idle
    hibernates: bool = msgspec.field(name="idle", default=False)
    over: str = ""  # which budget is spent, because of which it is hibernated whatever its verdict
    saves: str = ""  # what the machine says of its own saves
    saves_fail: bool = False
    idle_unix: float | None = None  # when it will have been idle for long enough; None: unknown
    use: MachineUse | None = None  # what its machine does now, as far as it says
    differ: str = ""  # how the blocks of its workspace differ, if that keeps the machine

    def row(self, now_unix: float, jobs: Sequence[WatchedJob] = ()) -> Row:
        price = "unknown" if self.price_usd_h is None else f"{self.price_usd_h:.2f} $/h"
        return {  # first what a person looks for first: the UI shows only a page's width of it
            "workspace": self.workspace,
            "verdict": self.kind,
            "costs": price if self.machine else "",
            "next step": self.next_step,
            "jobs": "; ".join(job.words() for job in jobs[:_MOST_JOBS]),
            "reason": "; ".join(filter(None, (self.reason, self.differ))),
            "newest snapshot": _age(self.newest_unix, now_unix),
            "own saves": self.saves,
            "since": moment(self.since_unix) if self.since_unix else "",
            EXPECTED: moment(self.idle_unix) if self.idle_unix else "",
            RUNS_ON: f"{self.machine} at {self.provider}" if self.machine else "no machine",
        }


class LeftMachine(msgspec.Struct, frozen=True, kw_only=True):
    """A machine that was never handed over. ``killed``: as far as can be told, no run works on it
    any more. ``who``: a sentence that says so. ``holds``: the snapshot that it has restored whole,
    where that is not the workspace's newest."""

    label: Label
    machine: MachineId
    workspace: WorkspaceName
    provider: str
    price_usd_h: float
    killed: bool
    who: str
    next_step: str
    act: Literal["end", "continue", ""] = ""  # what `watch` does once that has lasted long enough
    holds: SnapshotId | None = None


class WatchReport(Report, frozen=True):
    """``findings``: what else stands at the providers, as reconcile names it. ``silent``: the
    providers that did not answer. ``unread``: why budgets could not be looked at. ``left``: more
    about the machines among the findings that were never handed over. ``alerts``: the titles of
    what a person must hear of. ``valid_unix``: until when the report holds; None: no schedule
    renews it. ``missed``: why a workspace on a machine has no recent backup."""

    at_unix: float
    watched: list[Watched]
    findings: list[Finding]
    silent: list[str]
    jobs: list[WatchedJob] = msgspec.field(default_factory=list)
    unread: list[str] = msgspec.field(default_factory=list)
    left: list[LeftMachine] = msgspec.field(default_factory=list)
    alerts: list[str] = msgspec.field(default_factory=list)
    valid_unix: float | None = None
    missed: dict[WorkspaceName, str] = msgspec.field(default_factory=dict)

    def rows(self) -> list[Row]:
        """One row for each machine, each missed backup and each finding."""
        of: dict[WorkspaceName, list[WatchedJob]] = {}
        for job in self.jobs:
            of.setdefault(job.workspace, []).append(job)
        rows = [entry.row(self.at_unix, of.get(entry.workspace, ())) for entry in self.watched]
        rows += [self._missed(name, why) for name, why in self.missed.items()]
        left = {machine.label: machine for machine in self.left}
        for finding in self.findings:
            row = finding.row(self.at_unix)
            more = None if finding.label is None else left.get(finding.label)
            named = row["machine"] or row["rental"]
            rows.append(
                {
                    "workspace": row["workspace"],
                    "verdict": finding.kind,
                    "costs": row["costs"],
                    "next step": more.next_step if more else finding.next_step,
                    "jobs": "",
                    "reason": more.who if more else row["state"],
                    "newest snapshot": "",
                    "own saves": "",
                    "since": row["since"],
                    EXPECTED: "",
                    RUNS_ON: f"{named} at {row['provider']}",
                }
            )
        return rows

    def _missed(self, name: WorkspaceName, why: str) -> Row:
        row = Watched(name, "off", why, BACK_UP).row(self.at_unix)
        return {**row, "verdict": "backup missed", "newest snapshot": "", RUNS_ON: ""}

    def title(self) -> str:
        """The message with its time, because a table stays as it is when `watch` has stopped."""
        until = "no schedule renews it"
        if self.valid_unix is not None:
            until = f"if it is later than {moment(self.valid_unix)}, watch has stopped"
        return f"Seen at {moment(self.at_unix)}; {until}. {self.message()}"

    def message(self) -> str:
        """One sentence: how many of each kind, and what they cost together."""
        kinds = [*(entry.kind for entry in self.watched), *(entry.kind for entry in self.findings)]
        counts = ", ".join(f"{kinds.count(kind)} {kind}" for kind in dict.fromkeys(kinds))
        hourly = sum(entry.price_usd_h or 0.0 for entry in self.watched)
        hourly += sum(finding.price_usd_h for finding in self.findings)
        jobs = f"; open jobs: {len(self.jobs)}" if self.jobs else ""
        silent = f"; no answer from {', '.join(self.silent)}" if self.silent else ""
        unread = "".join(f"; {reason}" for reason in self.unread)
        alerts = f"; alerts: {', '.join(self.alerts[:_MOST_ALERTS])}" if self.alerts else ""
        return f"{counts or 'no workspace'}; {hourly:.2f} $/h in all{jobs}{silent}{unread}{alerts}"


def _age(then_unix: float | None, now_unix: float) -> str:
    if then_unix is None:
        return "none"
    minutes = max(0.0, now_unix - then_unix) / 60
    return f"{minutes:.0f} min" if minutes < _SHOWN_IN_MIN else f"{minutes / 60:.0f} h"
