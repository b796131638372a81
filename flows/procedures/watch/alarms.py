"""The alerts of a look of watch: what is wrong, and who is told."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence

import msgspec

from tasks.alert_delivery import Delivered, remember, tell
from tasks.runner import runner
from tasks.watch import AllMachines
from torpor.control.alerts import runs, watch
from torpor.control.alerts.delivery import Alert, Doubt, Key, Remembered, lasting, newly_seen, rows
from torpor.control.alerts.runs import FlowSchedule
from torpor.control.idleness import OWN_WORK
from torpor.control.money.exhaustion import BudgetsSeen
from torpor.control.overview import Overviews
from torpor.control.supervision import installation_folder
from torpor.control.watch_report import Watched, WatchReport
from torpor.shared.errors import NotDelivered
from torpor.shared.values import WorkspaceName

_SCHEDULED = ("watch", "backup")


class Observation(msgspec.Struct, frozen=True, kw_only=True):
    """What a look saw, and what it could not see. ``budgets``: None where no machine is in use, so
    that none was read. ``named``: the blocks of each workspace. ``unread``: the workspaces whose
    store or jobs could not be read. ``some``: the look was only at some workspaces of the
    installation. ``overview``: the state and cost of each workspace. ``not_own``: why nothing is
    done for a workspace."""

    report: WatchReport
    at_markets: AllMachines
    budgets: BudgetsSeen | None
    newest: Mapping[WorkspaceName, float | None]
    named: Mapping[WorkspaceName, Sequence[str]]
    unread: Sequence[str]
    some: bool
    overview: Overviews
    not_own: Mapping[WorkspaceName, str] = msgspec.field(default_factory=dict)


class Alarms(msgspec.Struct, frozen=True):
    """The alerts, what could not be looked at, and what is ``mended`` (see plan()). ``valid_unix``:
    until when the look holds; None: no schedule renews it."""

    alerts: list[Alert]
    doubt: Doubt
    mended: list[Key]
    valid_unix: float | None


def see_alarms(look: Observation, faults: list[Exception]) -> Alarms:
    """What is wrong now."""
    report, now_unix = look.report, look.report.at_unix
    shown = [(f.machine, f.rental) for f in look.at_markets.findings if f.machine and f.rental]
    found = [
        *watch.of_machines(report.watched, now_unix),
        *watch.of_idle(report.watched, now_unix),
        *watch.of_owners(look.not_own, now_unix),
        *watch.of_saves(report.watched, now_unix),
        *look.at_markets.lost,
        *watch.of_left(report.left, now_unix),
        *watch.of_abandoned(shown, now_unix),
        *watch.of_providers(look.at_markets.silent, now_unix),
        *watch.of_jobs(report.jobs, now_unix),
        *watch.of_missed(report, look.named),
        *watch.of_records(look.overview, _blocks(look, look.unread), now_unix),
    ]
    kinds: set[str] = set()
    if look.at_markets.silent:  # the alerts of silent markets are unknown
        kinds |= {"machine left", "machine abandoned", "machine forgotten", "machine idle"}
    if look.some:  # a machine without a rental here may have one in another store
        kinds.add("machine forgotten")
    else:
        silent = look.at_markets.silent
        found += watch.of_forgotten(look.at_markets.findings, silent, now_unix)
    if look.some or look.unread or look.at_markets.silent:  # the figures would be incomplete
        kinds.add("awake")
    else:
        found += watch.of_awake(look.overview, now_unix)
    if look.budgets is None or look.budgets.unread:
        kinds |= {"budget reached", "budget spent"}
    if look.budgets is not None:
        found += watch.of_budgets(look.budgets, report.watched, now_unix)
    folder = installation_folder()
    if folder is None:
        kinds |= {"installation", "disk full"}
    else:
        found += watch.of_installation(folder, now_unix)
    mended: list[Key] = [
        ("machine lost", watch.lost_subject(one.rental))
        for one in look.at_markets.findings
        if one.rental
    ]
    valid_unix: float | None = None
    try:
        failed = runner().alerts.failed_runs(now_unix - runs.LOOK_BACK_S)
        schedules = {name: runner().alerts.schedule(name, now_unix) for name in _SCHEDULED}
    except Exception as error:  # noqa: BLE001 - machines are looked at without the server
        runner().log.error("failed runs and schedules cannot be read: %s", error)
        faults.append(error)
        kinds |= runs.FROM_RUNS
    else:
        mended += [one.key for one in failed if one.mended]
        found += runs.of_failures(failed, _asleep(look))
        for name, schedule in schedules.items():
            found += runs.of_schedule(schedule, now_unix, itself=name == "watch")
        found += _backups(look, schedules["backup"])
        if schedules["watch"].active:
            valid_unix = now_unix + schedules["watch"].quiet_s
    known = {"", *look.named, *(block for names in look.named.values() for block in names)}
    unjudged: set[Key] = {
        ("machine idle", f"{one.provider} {one.machine}")
        for one in report.watched
        if one.kind == "unknown" or one.reason == OWN_WORK
    }
    doubt = Doubt(
        frozenset(kinds),
        frozenset(look.unread),
        frozenset(known) if look.some else None,
        frozenset(unjudged),
    )
    return Alarms([*{one.key: one for one in found}.values()], doubt, mended, valid_unix)


def _blocks(look: Observation, names: Iterable[str]) -> set[str]:
    return {block for name in names for block in look.named.get(WorkspaceName(name), ())}


def remember_spent(budgets: BudgetsSeen, watched: Sequence[Watched]) -> None:
    """Remember the spent budgets whose machines this look is about to end."""
    alerts = watch.of_budgets(budgets, watched, time.time())
    remember([alert for alert in alerts if alert.kind == "budget spent"])


def tell_of(alarms: Alarms, notify: Sequence[str], faults: list[Exception]) -> Delivered | None:
    """Send the alerts that are due, and show a table; None where the memory cannot be read. If no
    block accepts a message, the error is added to ``faults`` and the run fails: a run that
    completes says that people were told, and the server's own automation reports a failed run."""
    doubt = alarms.doubt
    try:
        blocks = [*notify] or runner().alerts.notifiers()
    except Exception as error:  # noqa: BLE001 - since when an alert lasts is remembered all the same
        runner().log.error("nobody could be told of %d alerts: %s", len(alarms.alerts), error)
        faults.append(error)
        blocks, doubt = [], Doubt(known=frozenset())  # no alert may be forgotten that was not sent
    try:
        delivered = tell(alarms.alerts, blocks, doubt, alarms.mended)
    except Exception as error:  # noqa: BLE001 - a look acts all the same
        runner().log.error("nobody could be told of %d alerts: %s", len(alarms.alerts), error)
        faults.append(error)
        return None
    # if one block accepted the message, somebody was told
    if len(delivered.refused) == len(blocks):
        faults += [NotDelivered(why) for why in delivered.refused]
    listeners = (
        f"They are sent by {', '.join(blocks)}" if blocks else "No notification block is named"
    )
    refused = "".join(f". {one}" for one in delivered.refused)
    runner().table(
        key="alerts",
        rows=rows(alarms.alerts, delivered.remembered),
        description=f"{len(alarms.alerts)} alerts. {listeners}{refused}",
    )
    return delivered


def people_hear_of(
    alarms: Alarms, delivered: Delivered | None, now_unix: float
) -> list[Remembered]:
    """The alerts that people should have been told of by now. If nobody can say since when they
    last, all of them."""
    try:
        remembered = delivered.remembered if delivered else runner().alerts.remembered()
    except Exception as error:  # noqa: BLE001 - the server's client raises any
        runner().log.warning("since when alerts last is not known: %s", error)
        return [newly_seen(one, now_unix) for one in alarms.alerts]
    return lasting(alarms.alerts, remembered, alarms.doubt, now_unix)


def _asleep(look: Observation) -> frozenset[str]:
    """The blocks of workspaces that are on no machine and have a snapshot."""
    off = {one.workspace for one in look.report.watched if one.kind == "off"}
    return frozenset(
        block
        for name, blocks in look.named.items()
        if name in off and look.newest.get(name)
        for block in blocks
    )


def _backups(look: Observation, schedule: FlowSchedule) -> list[Alert]:
    since = {
        block: one.since_unix
        for one in look.report.watched
        if one.machine is not None and one.since_unix is not None
        for block in look.named.get(one.workspace, ())
    }
    newest = {block: look.newest[name] for name in look.newest for block in look.named[name]}
    return runs.of_backups(schedule, newest, since, look.report.at_unix)
