"""Alerts of what a look of `watch` saw: machines, workspaces, providers, budgets, jobs."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Final

from torpor.control.alerts.delivery import Alert, Kind
from torpor.control.disk_space import full_disks
from torpor.control.money.exhaustion import BudgetsSeen
from torpor.control.overview import Overviews
from torpor.control.reconciliation import Finding
from torpor.control.rental.records import Rental
from torpor.control.reports import moment
from torpor.control.supervision import told
from torpor.control.watch_report import BACK_UP, LeftMachine, Watched, WatchedJob, WatchReport
from torpor.shared.values import Machine, WorkspaceName, owner_of

UNKNOWN_S: Final = 1800.0
"""An alert is sent once a machine could not be judged for this long."""
AWAY_S: Final = 600.0
"""An alert is sent once a store or a block could not be read for this long."""
LEFT_S: Final = 600.0
"""An alert is sent once nobody worked for this long on a machine that was not handed over."""
FORGOTTEN_S: Final = 2 * 3600.0
"""An alert is sent once something without a rental, or what outlived its machine, stood at a market
for this long: a run may be about to record or to end it."""
NOT_DRIVEN_S: Final = 900.0
"""An alert is sent once no run worked on a job with a machine for this long: each look starts
one."""
_FORGOTTEN: Final = ("without a rental", "not believed", "residue")
RESTARTED_S: Final = 3600.0
"""Seconds for which a restart is reported."""
RESTARTING_S: Final = 180.0
"""Seconds that a fault of a process must last before an alert: `make up` restarts the supervisor,
which restarts the rest."""
AWAKE_S: Final = 4 * 3600.0
"""Seconds that machines must be awake before a message says what they cost."""
FAILURES: Final = 3
"""A job is failing after this many failed runs in a row."""


def of_machines(watched: Sequence[Watched], now_unix: float) -> list[Alert]:
    """Alerts of machines that cannot be judged, and of workspaces that cannot be looked at."""
    found = []
    for entry in watched:
        if entry.differ:
            found.append(_differing(entry, now_unix))
        if entry.kind == "unknown" and entry.machine is not None:
            found.append(
                Alert(
                    kind="machine unknown",
                    subject=f"{entry.provider} {entry.machine}",
                    workspace=entry.workspace,
                    title=f"machine {entry.machine} of workspace {entry.workspace} "
                    "cannot be judged",
                    cause=f"Nobody can say whether it is idle: {entry.reason}.{_price(entry)}",
                    next_step=entry.next_step,
                    at_unix=now_unix,
                    after_s=UNKNOWN_S,
                )
            )
        elif entry.kind == "unknown":
            found.append(
                Alert(
                    kind="workspace unknown",
                    subject=entry.workspace,
                    workspace=entry.workspace,
                    title=f"workspace {entry.workspace} cannot be looked at",
                    cause=entry.reason,
                    next_step=entry.next_step,
                    at_unix=now_unix,
                    after_s=AWAY_S,
                )
            )
    return found


def of_owners(not_own: Mapping[WorkspaceName, str], now_unix: float) -> list[Alert]:
    """The workspaces for which `watch` does nothing, because another control side owns them, or
    nobody can say. ``not_own``: why, of each."""
    return [
        Alert(
            kind="only reported",
            subject=name,
            workspace=name,
            title=f"watch of this host does nothing for workspace {name}",
            cause=f"{why}. No idle machine is hibernated here, and no job continued.",
            next_step="run `torpor down` on the host that is not to own it, or delete the "
            "workspace there without its snapshots; if the owner is not known, see that the store "
            f"gives out settings/{name}",
            at_unix=now_unix,
            after_s=AWAY_S,
        )
        for name, why in not_own.items()
    ]


def of_idle(watched: Sequence[Watched], now_unix: float) -> list[Alert]:
    """Alerts of machines that are idle and stay, because `watch` or their block only reports
    them."""
    return [
        Alert(
            kind="machine idle",
            subject=f"{entry.provider} {entry.machine}",
            workspace=entry.workspace,
            title=f"machine {entry.machine} of workspace {entry.workspace} is idle and stays",
            cause=f"{entry.reason}. What watch does: {entry.next_step}.{_price(entry)}",
            next_step=f"hibernate workspace {entry.workspace}, or see what its last hibernation "
            "says",
            at_unix=now_unix,
            after_s=UNKNOWN_S,
        )
        for entry in watched
        if entry.kind == "idle" and entry.machine is not None
    ]


def of_lost(
    rental: Rental,
    newest: Mapping[WorkspaceName, float | None],
    now_unix: float,
    unverified_unix: float | None = None,
) -> list[Alert]:
    """The machine of this rental has gone without torpor. No alert for a machine that was not
    handed over, or that a hibernation has ended. ``unverified_unix``: when the store got a later
    snapshot than the newest verified one, as machines make them by themselves; None without any."""
    if rental.state != "handed over" or rental.snapshot is not None:
        return []
    name = rental.label.workspace
    saved_unix = newest.get(name)
    saved = f"of {moment(saved_unix)}" if saved_unix else "none that could be read"
    if unverified_unix is not None:
        saved += f", and what was saved last, unverified, of {moment(unverified_unix)}"
    return [
        Alert(
            kind="machine lost",
            subject=lost_subject(rental),
            workspace=name,
            title=f"machine {rental.machine} of workspace {name} has gone",
            cause=f"{rental.provider} has it no more, and torpor did not end it. The newest "
            f"snapshot is {saved}: later work was on the machine alone.",
            next_step="wake the workspace; with `save_minutes` in its block, a lost machine "
            "costs minutes",
            at_unix=now_unix,
            once=True,
        )
    ]


def lost_subject(rental: Rental) -> str:
    """The subject of the alert that the machine of this rental is lost."""
    return f"{rental.provider} {rental.label.rental}"


def of_saves(watched: Sequence[Watched], now_unix: float) -> list[Alert]:
    """Alerts of machines that should save their workspaces by themselves and cannot."""
    return [
        Alert(
            kind="saves failing",
            subject=f"{entry.provider} {entry.machine}",
            workspace=entry.workspace,
            title=f"machine {entry.machine} of workspace {entry.workspace} does not save itself",
            cause=entry.saves,
            next_step="back the workspace up, or hibernate it: if the machine vanishes, its work "
            "since the newest snapshot is lost",
            at_unix=now_unix,
            after_s=UNKNOWN_S,
        )
        for entry in watched
        if entry.saves_fail
    ]


def of_awake(seen: Overviews, now_unix: float) -> list[Alert]:
    """The alert of what awake machines cost: once a day, and after AWAKE_S at the earliest."""
    if not seen.awake:
        return []
    return [
        Alert(
            kind="awake",
            subject="machines",
            title=f"awake machines cost {seen.costs()}",
            cause="\n".join(workspace.words() for workspace in seen.awake),
            next_step="hibernate what nobody uses; work goes on",
            at_unix=now_unix,
            after_s=AWAKE_S,
        )
    ]


def of_records(seen: Overviews, told: Collection[str], now_unix: float) -> list[Alert]:
    """Alerts of workspaces with a record that cannot be trusted, and whose machines are looked at
    all the same. ``told``: blocks for which another alert already says that they cannot be looked
    at."""
    return [
        Alert(
            kind="workspace unknown",
            subject=f"{one.block}: records",
            workspace=one.block,
            title=f"not all that is on record of workspace {one.block} can be read",
            cause=one.trouble,
            next_step="see what it names; figures are shown without it, and prune deletes nothing",
            at_unix=now_unix,
            after_s=AWAY_S,
        )
        for one in seen.workspaces
        if one.trouble and one.block not in told
    ]


def of_left(left: Sequence[LeftMachine], now_unix: float) -> list[Alert]:
    """Alerts of machines that killed runs left."""
    return [
        Alert(
            kind="machine left",
            subject=f"{machine.provider} {machine.machine}",
            workspace=machine.workspace,
            title=f"machine {machine.machine} of workspace {machine.workspace} "
            "is worked on by no run",
            cause=f"{machine.who} It costs {machine.price_usd_h:.2f} $/h.",
            next_step=machine.next_step,
            at_unix=now_unix,
            after_s=LEFT_S,
        )
        for machine in left
        if machine.killed
    ]


def of_abandoned(shown: Iterable[tuple[Machine, Rental]], now_unix: float) -> list[Alert]:
    """Alerts of machines that nobody can use and that do not end, though each look tries to end
    them. While one is there, no other machine is rented for its workspace."""
    found = []
    for machine, rental in shown:
        # the market is ending the machine
        if rental.state != "abandoned" or machine.state == "stopping":
            continue
        name = owner_of(rental.label.workspace)
        price = machine.price_usd_h or rental.bound_usd_h
        found.append(
            Alert(
                kind="machine abandoned",
                subject=f"{machine.provider} {machine.id}",
                workspace=name,
                title=f"machine {machine.id} of workspace {name} can neither be used nor be ended",
                cause=f"{rental.why or 'Its run was killed'}. "
                f"It costs {f'{price:.2f} $/h' if price else 'money'} until it ends, and no other "
                "machine is rented for the workspace.",
                next_step=f"`torpor reconcile {name} --abandoned` says why; else end it in the "
                "market's console",
                at_unix=now_unix,
                after_s=LEFT_S,
            )
        )
    return found


def of_forgotten(
    findings: Sequence[Finding], silent: Collection[str], now_unix: float
) -> list[Alert]:
    """Alerts of machines and disks at a market that may cost money and belong to no open rental of
    this store. None for a market that is ``silent``, where a disk may be that of a machine in use.
    Nodes of a cluster without a machine of ours may be anybody's."""
    rented = {one.rental.label for one in findings if one.rental is not None}
    found = []
    for one in findings:
        there = one.residue or one.machine
        if one.kind not in _FORGOTTEN or one.is_free or there is None:
            continue
        if there.provider in silent or one.label in rented:
            continue
        if one.residue is not None and one.residue.kind == "node" and one.label is None:
            continue
        what = f"{one.residue.kind if one.residue else 'machine'} {there.id}"
        costs = f"{one.price_usd_h:.2f} $/h" if one.price_usd_h else "perhaps money"
        found.append(
            Alert(
                kind="machine forgotten",
                subject=f"{there.provider} {there.id}",
                workspace=owner_of(WorkspaceName(one.workspace)) if one.workspace else "",
                title=f"{what} at {there.provider} is {one.kind}",
                cause=f"It costs {costs}, and torpor leaves it alone.",
                next_step=one.next_step,
                at_unix=now_unix,
                after_s=FORGOTTEN_S,
            )
        )
    return found


def of_providers(silent: Mapping[str, str], now_unix: float) -> list[Alert]:
    """Alerts of providers that do not answer."""
    return [
        Alert(
            kind="provider silent",
            subject=identity,
            title=f"{identity} does not answer",
            cause=f"Its machines cannot be looked at: {error}",
            next_step="see the provider's status page, and its block",
            at_unix=now_unix,
            after_s=UNKNOWN_S,
        )
        for identity, error in silent.items()
    ]


def of_budgets(seen: BudgetsSeen, watched: Sequence[Watched], now_unix: float) -> list[Alert]:
    """Alerts of budgets: those of which most is spent, those that are spent, with what happens to
    their machines, and those that cannot be read."""
    found = [
        Alert(
            kind="budget reached",
            subject=f"{status.budget.name} {status.month} {status.budget.usd_month:f}",
            title=f"{100 * min(1.0, status.share):.0f} % of budget {status.budget.name} are spent",
            cause=f"{status.message()}.",
            next_step="watch hibernates its machines when it is spent: raise it, or hibernate some",
            at_unix=now_unix,
            once=True,
        )
        for status in seen.reached
    ]
    for of in seen.running_out:
        name = of.status.budget.name
        ends = [
            f"Machine {entry.machine}: {words}."
            for entry in watched
            for words in (entry.next_step, entry.reason)
            if entry.machine is not None and f"budget {name} is spent" in words
        ]
        if ends:
            found.append(
                Alert(
                    kind="budget spent",
                    subject=name,
                    title=f"budget {name} is spent",
                    cause="\n".join([f"{of.status.message()}.", *ends]),
                    next_step="raise the budget to go on, or wait for the next month",
                    at_unix=now_unix,
                )
            )
    found += [
        Alert(
            kind="budget unread",
            subject=words.partition(":")[0],
            title=words.partition(":")[0],
            cause=f"No machine is hibernated for its cost: {words}.",
            next_step="see that the block is right and that the stores of its workspaces answer",
            at_unix=now_unix,
            after_s=AWAY_S,
        )
        for words in seen.unread
    ]
    return found


def of_missed(report: WatchReport, blocks: Mapping[WorkspaceName, Sequence[str]]) -> list[Alert]:
    """Alerts of workspaces on a machine whose newest verified snapshot is too old. ``blocks``:
    those of each workspace."""
    return [
        Alert(
            kind="backup missed",
            subject=blocks[name][0],
            workspace=blocks[name][0],
            title=f"workspace {blocks[name][0]} has missed its backup",
            cause=f"{why}. Work since then is on its machine alone.",
            next_step=BACK_UP,
            at_unix=report.at_unix,
        )
        for name, why in report.missed.items()
    ]


def of_installation(folder: Path, now_unix: float) -> list[Alert]:
    """Alerts of what the supervisor of ``folder`` recorded as wrong now, what it restarted within
    RESTARTED_S, and disks that are full. Each fault of now is an alert: a new one is told while an
    older one lasts."""
    wrong = told(folder, since_unix=now_unix, now_unix=now_unix)
    both = told(folder, since_unix=now_unix - RESTARTED_S, now_unix=now_unix)
    full = full_disks([folder])
    found: list[tuple[Kind, str, Sequence[str], str, float]] = [
        (
            "disk full",
            "a disk is full",
            full,
            "make room: the server and its database need it",
            0.0,
        ),
        (
            "installation",
            "something ended or was restarted",
            [
                sentence
                for sentence in both
                if sentence not in wrong and "disk full:" not in sentence
            ],
            "see its log for why it ended",
            0.0,
        ),
    ]
    for sentence in wrong:
        if "disk full:" not in sentence:
            own = sentence.startswith(
                ("nothing restarts", "the supervisor of")
            )  # the figures change from look to look
            what = f"{'the supervisor' if own else sentence.split(':', 1)[0]} is at fault"
            step = "see supervisor.log and what the sentence names; run `make up`"
            found.append(("installation", what, [sentence], step, RESTARTING_S))
    return [
        Alert(
            kind=kind,
            subject=f"{folder}: {what}",
            title=f"{folder}: {what}",
            cause="\n".join(words),
            next_step=step,
            at_unix=now_unix,
            after_s=after_s,
        )
        for kind, what, words, step, after_s in found
        if words
    ]


def of_jobs(jobs: Sequence[WatchedJob], now_unix: float) -> list[Alert]:
    """Alerts of jobs whose runs fail one after the other, and of jobs with a machine on which no
    run works."""
    failing = [
        Alert(
            kind="job failing",
            subject=job.job,
            workspace=job.workspace,
            title=f"job {job.job} of workspace {job.workspace} fails again and again",
            cause=f"{job.failures} of its runs have failed in a row: {job.why}",
            next_step=f"its machine, if it has one, costs money: `torpor job status {job.job}` "
            f"says what fails, `torpor job cancel {job.job}` ends the job",
            at_unix=now_unix,
        )
        for job in jobs
        if job.failures >= FAILURES
    ]
    return failing + [
        Alert(
            kind="job not driven",
            subject=job.job,
            workspace=job.workspace,
            title=f"no flow run works on job {job.job} of workspace {job.workspace}",
            cause=f"Job {job.words()}. Its machine {job.machine} costs money while it is there, "
            "and is not hibernated when the command ends.",
            next_step="see that a worker of the pool torpor-jobs runs, and that neither the pool "
            "nor its queue is paused or full; or cancel the job",
            at_unix=now_unix,
            after_s=NOT_DRIVEN_S,
        )
        for job in jobs
        if not job.driven and job.machine is not None and job.failures < FAILURES
    ]


def _price(entry: Watched) -> str:
    return "" if entry.price_usd_h is None else f" It costs {entry.price_usd_h:.2f} $/h."


def _differing(entry: Watched, now_unix: float) -> Alert:
    return Alert(
        kind="blocks differ",
        subject=entry.workspace,
        workspace=entry.workspace,
        title=f"watch cannot choose between the blocks of workspace {entry.workspace}",
        cause=f"{entry.differ}.",
        next_step="make the blocks alike, or delete those that you do not need",
        at_unix=now_unix,
    )
