"""The rows of a look of watch: one for each workspace and each of its machines."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Final

import msgspec

from tasks.runner import runner
from tasks.trouble import trouble
from tasks.watch import AllMachines, MachineLook, newest_made_unix
from tasks.workspace import OpenWorkspace
from torpor.control.reconciliation import Finding
from torpor.control.watch_report import Watched
from torpor.shared.values import Label, MachineId, WorkspaceName

_NEXT: Final = {
    "busy": "none: it works",
    "unknown": "it is kept and costs money: log in, or hibernate it yourself",
}
_STARTING: Final = (
    "its programs were not started: start them by hand, unless the run that handed it over still "
    "works"
)


def newest_snapshots(
    opened: dict[WorkspaceName, OpenWorkspace],
) -> tuple[dict[WorkspaceName, float | None], dict[WorkspaceName, str]]:
    found: dict[WorkspaceName, float | None] = {}
    troubles: dict[WorkspaceName, str] = {}
    looks = [(name, newest_made_unix.submit(one)) for name, one in opened.items()]
    for name, look in looks:
        try:
            found[name] = look.result()
        except Exception as error:  # noqa: BLE001 - the others are looked at all the same
            troubles[name] = str(trouble(error))
    return found, troubles


def in_use(
    opened: OpenWorkspace,
    finding: Finding,
    look: MachineLook,
    newest: dict[WorkspaceName, float | None],
    over: dict[Label, str],
    dry_run: bool,
    only_report: bool,
) -> Watched:
    name, machine, rental = opened.spec.name, finding.machine, finding.rental
    verdict, saves, idle_unix, use = look
    reports = "watch reports only" if only_report else "its block says report"
    hibernates = opened.spec.idle.hibernate and not only_report
    idle = verdict.kind == "idle" and hibernates
    step = _NEXT.get(verdict.kind, "hibernate it" if idle else f"none: {reports}")
    why = over.get(rental.label, "") if rental else ""
    if why:
        step = f"{why}: hibernate it"
    if (idle or why) and dry_run:
        step += ": this was a dry run"
    reason = verdict.reason
    if rental and rental.starting:
        reason += f"; {_STARTING}"
    return Watched(
        name,
        verdict.kind,
        reason,
        step,
        machine.id if machine else None,
        machine.provider if machine else "",
        rental.created_unix if rental else None,
        finding.price_usd_h or (rental.price_usd_h if rental else 0.0) or None,
        newest.get(name),
        idle,
        why,
        saves=saves.words,
        saves_fail=saves.fail,
        idle_unix=idle_unix if hibernates else None,
        use=use,
    )


def not_there(
    at_markets: AllMachines,
    opened: dict[WorkspaceName, OpenWorkspace],
    newest: dict[WorkspaceName, float | None],
    over: dict[Label, str],
) -> list[Watched]:
    """A row for each machine that was handed over and that its provider does not show."""
    rows = []
    for finding in at_markets.findings:
        rental, name = finding.rental, WorkspaceName(finding.workspace)
        if not is_missing(finding) or rental is None or name not in opened:
            continue
        reason = at_markets.silent.get(rental.provider, "") or f"its machine is {finding.kind}"
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


def kept_in_doubt(one: Watched, doubt: str) -> Watched:
    """The row with the verdict "kept" where a record of its workspace cannot be read, because that
    record may say that the machine works. ``doubt``: which record, and why; empty without one."""
    if not doubt or not (one.hibernates or one.over):
        return one
    step = f"it is kept, because not all that is on record of its workspace can be read: {doubt}"
    if one.over:
        step = f"{one.over}: {step}"
        runner().log.warning("machine %s was not hibernated: %s", one.machine, step)
    return msgspec.structs.replace(one, next_step=step, hibernates=False, over="")


def is_missing(finding: Finding) -> bool:
    return (
        finding.rental is not None
        and finding.machine is None
        and (finding.rental.state == "handed over")
    )


def asleep(
    opened: Mapping[WorkspaceName, OpenWorkspace],
    newest: Mapping[WorkspaceName, float | None],
    there: Collection[WorkspaceName],
    with_job: Collection[WorkspaceName],
) -> list[Watched]:
    """A row for each workspace that is on no machine."""
    return [
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
