"""The steps of watch: which machines there are, and whether each is idle."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Final, NamedTuple

import msgspec

from tasks.alert_delivery import remember
from tasks.autosave import NO_SAVES, AutosaveSummary, held_and_saving, renew_autosave
from tasks.jobs import read_activity
from tasks.machines import renter, session_with
from tasks.market_look import look_at_markets
from tasks.retries import ONCE
from tasks.runner import StepFuture, runner
from tasks.step import step
from tasks.trouble import trouble
from tasks.workspace import OpenWorkspace
from torpor.control.alerts.delivery import Alert
from torpor.control.alerts.watch import of_lost
from torpor.control.idleness import (
    OWN_WORK,
    Verdict,
    forecast_idleness,
    judge_idleness,
    sampler_fault,
)
from torpor.control.machine_use import MachineUse, machine_use
from torpor.control.money.budgets import OpenBudget
from torpor.control.providers.provider import Deadlines
from torpor.control.reconciliation import Finding
from torpor.control.remote.agent import Agent
from torpor.control.rental.records import Rental, Rentals
from torpor.control.rental.sweep import close_if_gone
from torpor.control.store.manifests import newest_snapshot, snapshot_times
from torpor.control.store.patience import StorePatience
from torpor.control.store.receipts import newest_verified
from torpor.control.store.records import named
from torpor.control.store.shared_listings import SharedListings
from torpor.control.upkeep.lineage import choose_newest
from torpor.shared.errors import HandedOver, MachineInUse, TorporError
from torpor.shared.values import (
    IdleRules,
    Machine,
    SnapshotId,
    WorkspaceName,
    made_at,
    names_of,
)
from torpor.shared.wire.activity import JUPYTER_SILENT, NOBODY, PERSON, Activity

MACHINE_S: Final = 300.0
"""Seconds for the look at one machine, so that a machine that hangs does not delay the verdicts on
the others. A new agent may have to be installed within this time."""

STORE_S: Final = 300.0
"""Seconds that one store may delay a look in all. After that the look continues without the store's
workspaces. Stores are read one after the other: with five stores that never finish an answer, a
look stays within the half hour after which machines with a deadline stop."""

OWN_WORK_S: Final = 1800.0
"""Seconds that a hibernation of an idle machine waits for torpor's own work on the machine, most
often a backup. If it gave up at once, the machine would cost money until watch starts the next
hibernation."""
OWN_WORK_POLL_S: Final = 5.0

LOOK_AGAIN_S: Final = (30.0, 60.0)
"""The waits in seconds before further looks at a machine that was never handed over, where the
first look does not say who uses it. By then its sampler, which the first login may have started,
has written, and a run whose control side is gone has ended."""


class AllMachines(msgspec.Struct, frozen=True):
    """What the providers and the stores know. ``silent`` and ``unread``: the error of each provider
    that did not answer, and of each workspace whose store did not, or that has a rental record
    which cannot be trusted. ``lost``: the alerts of machines that ended without torpor, and whose
    rentals this look has closed. ``unjudged``: the machines whose rentals cannot be read."""

    findings: list[Finding]
    silent: dict[str, str]
    unread: dict[WorkspaceName, str]
    lost: list[Alert] = []
    unjudged: list[Machine] = []

    def of(self, opened: OpenWorkspace) -> list[tuple[Machine, Rental | None]]:
        """The machines of one workspace, with their rentals."""
        name = opened.spec.name
        return [(f.machine, f.rental) for f in self.findings if f.machine and f.workspace == name]


def patient(
    blocks: Mapping[str, OpenWorkspace], most_s: float = STORE_S
) -> dict[str, OpenWorkspace]:
    """The workspaces, opened again so that each of their stores may delay this look for ``most_s``
    seconds. The budgets open the stores once more."""
    patience = StorePatience(most_s)
    return {
        block: replace(
            one,
            store=patience.of(one.store),
            budgets=partial(_patient_budgets, one.budgets, patience),
        )
        for block, one in blocks.items()
    }


def _patient_budgets(
    budgets: Callable[[], Sequence[OpenBudget]], patience: StorePatience
) -> list[OpenBudget]:
    def ledgers(budget: OpenBudget) -> list[Rentals]:
        return [ledger.through(patience.of) for ledger in budget.ledgers()]

    return [msgspec.structs.replace(one, ledgers=partial(ledgers, one)) for one in budgets()]


@step("list machines")
def list_all_machines(workspaces: Sequence[OpenWorkspace], once: SharedListings) -> AllMachines:
    """All machines of the workspaces at all provider blocks, compared with their rentals, as
    reconcile does for one workspace. Changes nothing. Providers and stores that do not answer are
    left out and named. ``once``: as in look_at_markets."""
    known = {p.identity: p for opened in workspaces for p in opened.markets.named}
    closed: dict[str, str] = {}
    for opened in workspaces[:1]:  # all workspaces have the same provider blocks
        for reference, one in opened.each():
            if isinstance(one, TorporError):
                closed[reference] = str(one)
            else:
                known[one.identity] = one
    seen = look_at_markets(workspaces, [*known.values()], once)
    unread = {name: str(error) for name, error in seen.away.items()}
    unread |= {name: named(refused) for name, refused in seen.refused.items()}
    unknown = {name for one in seen.away for name in names_of(one)}
    return AllMachines(
        seen.findings,
        closed | {identity: str(error) for identity, error in seen.silent.items()},
        unread,
        unjudged=[
            *(one for one in seen.shown if one.label and one.label.workspace in unknown),
            *(one.machine for one in seen.findings if one.kind == "not believed" and one.machine),
        ],
    )


def close_gone(
    at_markets: AllMachines,
    workspaces: Sequence[OpenWorkspace],
    newest: Mapping[WorkspaceName, float | None],
) -> AllMachines:
    """Close the rentals of machines that have gone; returns the machines that remain. A machine
    that cannot be looked for keeps its rental: unknown is not gone. A loss is remembered before its
    rental is closed, so that the next look sends the alert if this one is killed. ``workspaces``:
    those whose rentals may be closed. ``newest``: when each workspace's newest snapshot was
    made."""
    of = {name: opened for opened in workspaces for name in names_of(opened.spec.name)}
    left: list[Finding] = []
    lost: list[Alert] = []
    for finding in at_markets.findings:
        closed, alerts = _close(of, finding, newest)
        lost += alerts
        if not closed:
            left.append(finding)
    return msgspec.structs.replace(at_markets, findings=left, lost=lost)


def _close(
    of: Mapping[WorkspaceName, OpenWorkspace],
    finding: Finding,
    newest: Mapping[WorkspaceName, float | None],
) -> tuple[bool, list[Alert]]:
    """Whether the rental of this finding is closed now, and the alerts of its lost machine. The
    alerts are returned also if the write failed, because it may have been done."""
    rental, machine = finding.rental, finding.machine
    if rental is None or rental.machine is None or finding.kind == "at another provider":
        return False, []
    name, alerts = rental.label.workspace, list[Alert]()
    if name not in of:
        return False, []
    try:
        first = partial(_foretell, of[name], alerts, newest)
        by = renter(of[name].under(name))
        return close_if_gone(by, rental, shown=machine, first=first), alerts
    except Exception as error:  # noqa: BLE001 - the others are looked at all the same
        why = trouble(error)
        runner().log.warning("rental %s of %s stays open: %s", rental.label.rental, name, why)
        # another run has ended the machine
        return False, [] if isinstance(error, HandedOver) else alerts


def _foretell(
    opened: OpenWorkspace,
    alerts: list[Alert],
    newest: Mapping[WorkspaceName, float | None],
    rental: Rental,
) -> None:
    """Remember the alerts of a lost machine before its rental is closed. None for the machine of an
    open job, which rents another machine by itself. A job that has ended may have left its machine
    to its user."""
    job = opened.jobs.of(rental.job) if rental.job else None
    if job is None or job.ended:
        unverified_unix = _unverified_unix(opened.under(rental.label.workspace))
        alerts += of_lost(rental, newest, time.time(), unverified_unix)
        remember(alerts)


def _unverified_unix(opened: OpenWorkspace) -> float | None:
    """When the store got the last snapshot, if that is newer than the newest verified one; None
    otherwise, and where the store does not say."""
    store, name = opened.store, opened.spec.name
    try:
        times, sure = snapshot_times(store, name), newest_verified(store, name)
    except Exception as error:  # noqa: BLE001 - the loss is told of without it
        trouble(error)
        return None
    last = max(times, key=lambda snapshot: (times[snapshot], snapshot), default=None)
    return None if last is None or sure is None or last == sure else times[last]


def has_deadline(opened: OpenWorkspace, machine: Machine) -> bool:
    """Whether a machine that runs has a deadline at its provider, which stops it unless the
    deadline is renewed."""
    if machine.state != "running":
        return False
    return opened.markets.of(machine.provider).abilities.deadline_s is not None


@step("renew deadline", run_name="renew deadline of {machine.id}", retries=ONCE)
def renew_deadline(opened: OpenWorkspace, machine: Machine) -> None:
    """Renew a machine's deadline. Raises the provider's error."""
    provider = opened.markets.of(machine.provider)
    if isinstance(provider, Deadlines):
        provider.renew(machine)


class MachineLook(NamedTuple):
    """What a look at one machine has found. ``saves``: what the machine says of its own saves.
    ``idle_unix``: when it will have been idle for long enough if nobody uses it any more; None
    where nobody can say. ``use``: what it does now, for metrics; None where it did not answer."""

    verdict: Verdict
    saves: AutosaveSummary = NO_SAVES
    idle_unix: float | None = None
    use: MachineUse | None = None


@step("look at machine", run_name="look at {machine.id}", retries=ONCE)
def look_at(
    opened: OpenWorkspace, machine: Machine, rental: Rental, saves: OpenWorkspace | None
) -> MachineLook:
    """The verdict on a machine that was handed over; Unknown, with the error, if there is no
    verdict within MACHINE_S.

    With ``saves``, a block of its workspace, the look also changes something: it gives the machine
    a new book, with which it saves its workspace by itself as this block says, where it needs one,
    and then deletes autosaves that a newer one has made superfluous (``renew_autosave``).
    """
    try:
        with session_with(opened, machine, MACHINE_S) as session:
            # closing ends an open call with AgentLost
            over = threading.Timer(MACHINE_S, session.close)
            over.start()
            try:
                activity = _read(opened, session)
                of = forecast_idleness(activity, _rules(opened, rental), _gpus(rental))
                return MachineLook(
                    of.verdict,
                    renew_autosave(saves, session, machine) if saves else NO_SAVES,
                    None if of.idle_in_s is None else time.time() + of.idle_in_s,
                    machine_use(activity, rental.gpu, rental.gpu_count),
                )
            finally:
                over.cancel()
    except Exception as error:  # noqa: BLE001 - the others are looked at all the same
        return MachineLook(Verdict("unknown", str(trouble(error))))


def seen(look: StepFuture[MachineLook]) -> MachineLook:
    """The result of a look that was submitted; Unknown also where the look itself failed."""
    try:
        return look.result()
    except Exception as error:  # noqa: BLE001 - the others are looked at all the same
        return MachineLook(Verdict("unknown", str(trouble(error))))


@step("see that it is idle", retries=ONCE)
def check_idle(
    opened: OpenWorkspace, machine: Machine, session: Agent, since_s: float | None
) -> float:
    """MachineInUse unless the machine is idle; returns the time on its boot clock. With that time
    as ``since_s``, only what happened since then is judged, and torpor's own run does not count as
    work. Without ``since_s``, waits for a run of torpor's, such as a backup."""
    rental = None if machine.label is None else opened.rentals.of(machine.label)
    ends_s = time.monotonic() + OWN_WORK_S
    while True:
        activity = _read(opened, session)
        verdict = judge_idleness(activity, _rules(opened, rental), _gpus(rental), since_s=since_s)
        if verdict.reason != OWN_WORK or time.monotonic() > ends_s:
            break
        time.sleep(OWN_WORK_POLL_S)
    if verdict.kind != "idle":
        raise MachineInUse(
            f"machine {machine.id} of workspace {opened.spec.name} is {verdict.kind}: "
            f"{verdict.reason}. It was kept: hibernate it without `only_if_idle` to end it anyway"
        )
    return activity.now_s


@step("see that nothing began", retries=ONCE)
def check_nothing_began(
    opened: OpenWorkspace, machine: Machine, session: Agent, since_s: float
) -> None:
    """MachineInUse if the command of a job or a server that was started at most ``since_s`` seconds
    ago runs on the machine."""
    activity = _read(opened, session)
    for what, age_s in (("the command of a job", activity.job_s), ("a server", activity.served_s)):
        if age_s is not None and age_s <= since_s:
            raise MachineInUse(
                f"machine {machine.id} of workspace {opened.spec.name} was kept: {what} was "
                "started on it meanwhile. Hibernate it again when that has ended"
            )


class LeftLook(msgspec.Struct, frozen=True):
    """``works``: the agent works for a run now; None where it did not say, with the ``error``.
    ``used``: who uses the machine, or has used it: it may have been handed over, whatever its
    record says, which may be an older one that was put back in the store. ``unsure``: why nobody
    can say whether a person uses it. Both are empty if no use was seen. ``holds``: the snapshot
    that the machine has restored whole, if that is not the workspace's newest."""

    works: bool | None
    used: str = ""
    error: str = ""
    holds: SnapshotId | None = None
    unsure: str = ""


@step("look at what was left", run_name="look at {machine.id}", retries=ONCE)
def look_at_left(opened: OpenWorkspace, machine: Machine, *, again: bool = False) -> LeftLook:
    """Ask the agent of a machine that was never handed over whether a run works there: it holds
    the workspace's lock as long as that run is attached. ``again``: ask once more after each of
    LOOK_AGAIN_S while it says that one does, or does not say who uses the machine."""
    look = _look_at_left(opened, machine)
    for wait_s in LOOK_AGAIN_S if again else ():
        if look.works is False and (look.used or not look.unsure):
            break
        time.sleep(wait_s)
        look = _look_at_left(opened, machine)
    return look


def _look_at_left(opened: OpenWorkspace, machine: Machine) -> LeftLook:
    if machine.state != "running" or machine.endpoint is None:
        return LeftLook(None, error=f"it is {machine.state}")
    try:
        with session_with(opened, machine, MACHINE_S) as session:
            over = threading.Timer(MACHINE_S, session.close)
            over.start()
            try:
                activity = _read(opened, session)
                used, unsure = _users(activity)
                held, saving = held_and_saving(opened, session)
            finally:
                over.cancel()
        stored = choose_newest(opened.store, opened.spec.name, opened.seal).snapshot
        if stored is not None and held == stored.snapshot:
            held = None
    except Exception as error:  # noqa: BLE001 - the others are looked at all the same
        return LeftLook(None, error=str(trouble(error)))
    if saving and not used:
        used = "it saves its workspace by itself"
    return LeftLook(activity.runs, used, holds=held, unsure=unsure)


@step("see who uses it", retries=ONCE)
def who_uses(opened: OpenWorkspace, machine: Machine, session: Agent) -> tuple[str, str]:
    """Who uses the machine, or has used it, as far as it says; and why nobody can say whether a
    person does. Both are empty if no use was seen. The workspace's programs do not count as use of
    a machine that was handed over: the hand-over has started them, and a hibernation freezes
    them."""
    activity = _read(opened, session)
    rental = None if machine.label is None else opened.rentals.of(machine.label)
    handed_over = rental is not None and rental.state == "handed over" and not rental.job
    if handed_over and opened.spec.programs:
        activity = msgspec.structs.replace(activity, served_s=None)
    return _users(activity)


def _users(activity: Activity) -> tuple[str, str]:
    newest = activity.samples[-1:]
    used = unsure = ""
    if activity.job_s is not None:
        used = "the command of a job runs on it"
    elif activity.served_s is not None:
        used = "a server runs on it"
    elif any(
        (one.ssh_s, one.jupyter_s) != (NOBODY, NOBODY) or one.flags & PERSON for one in newest
    ):
        used = "somebody is or was logged in to it"
    if fault := sampler_fault(activity):
        unsure = fault
    elif newest[0].flags & JUPYTER_SILENT:
        unsure = "a Jupyter server runs and does not say what it does"
    return used, unsure


def seen_left(look: StepFuture[LeftLook]) -> LeftLook:
    """The result of a look at a machine that was left; an unknown one also where the look itself
    failed."""
    try:
        return look.result()
    except Exception as error:  # noqa: BLE001 - the others are looked at all the same
        return LeftLook(None, error=str(trouble(error)))


@step("find newest snapshot")
def newest_made_unix(opened: OpenWorkspace) -> float | None:
    """When the workspace's newest verified snapshot was made; None if it has none. If the store
    holds no receipt yet, every snapshot counts."""
    store, name = opened.store, opened.spec.name
    newest = newest_verified(store, name) or newest_snapshot(store, name)
    return None if newest is None else made_at(newest).timestamp()


def _read(opened: OpenWorkspace, session: Agent) -> Activity:
    return read_activity(session, opened.spec.idle.minutes * 60)


def _rules(opened: OpenWorkspace, rental: Rental | None) -> IdleRules:
    """The idle rules of a machine. A machine that was rented for a job that never began, because
    its run has gone, counts as unused and waits for nobody."""
    rules = opened.spec.idle
    if rental is not None and rental.job and opened.jobs.of(rental.job) is None:
        return msgspec.structs.replace(rules, unused=True)
    return rules


def _gpus(rental: Rental | None) -> int:
    return rental.gpu_count if rental is not None and rental.gpu else 0
