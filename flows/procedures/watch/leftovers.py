"""The machines that were never handed over: which run works on them, and what happens to those that
a killed run left."""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping, Sequence
from typing import Final, Literal

import msgspec

from flows.procedures.run_key import run_key
from flows.procedures.unfinished import ENDED, ONLY_HANDED_OVER, became_of
from flows.procedures.watch.block_differences import BlockDifferences
from flows.reconcile import reconcile
from flows.wake import wake
from tasks.alert_delivery import Delivered
from tasks.alert_server import LiveRun
from tasks.restore import NEWEST
from tasks.runner import runner
from tasks.watch import LeftLook, look_at_left, seen_left
from tasks.workspace import OpenWorkspace
from torpor.control.alerts.watch import LEFT_S
from torpor.control.reconciliation import Finding
from torpor.control.rental.records import Rental
from torpor.control.reports import moment
from torpor.control.watch_report import LeftMachine
from torpor.shared.values import (
    BENCHMARK,
    BENCHMARK_MACHINES,
    DRILL,
    RESERVED,
    Machine,
    WorkspaceName,
    names_of,
)

_WITHOUT_JOB: Final = (BENCHMARK, BENCHMARK_MACHINES, DRILL)
RENTING_S: Final = 6 * 3600.0
"""A run asks for its machines within this many seconds of its begin."""
HANDED_S: Final = 7200.0
"""A `deploy` hands its machine over at most 75 minutes after its agent's last work. A run that
Prefect shows as running for longer than this many seconds may be one from a shell that was killed:
a person is told."""


def see_left(
    findings: Sequence[Finding],
    opened: Mapping[WorkspaceName, OpenWorkspace],
    named: Mapping[WorkspaceName, Sequence[str]],
    stored: Collection[WorkspaceName],
    with_job: Collection[WorkspaceName],
    differences: Mapping[WorkspaceName, BlockDifferences],
    doubtful: Collection[WorkspaceName],
) -> list[LeftMachine]:
    """Who works on each machine that was never handed over, also on those that benchmarks, drills
    and jobs on several nodes rent beside a workspace. One that was asked for a few minutes ago is
    not looked at: its run may be installing its agent. ``stored``: the workspaces that have a
    snapshot. ``doubtful``: those of which not all records can be read; their machines are only
    reported."""
    now_unix = time.time()
    owner = {name: workspace for workspace in opened for name in names_of(workspace)}
    asked = []
    for one in findings:
        name = owner.get(WorkspaceName(one.workspace))
        if one.kind != "unfinished" or name is None:
            continue
        if one.machine is not None and one.rental is not None:
            young = now_unix - one.rental.created_unix < LEFT_S
            under = opened[name].under(WorkspaceName(one.workspace))
            look = None if young else look_at_left.submit(under, one.machine)
            asked.append((name, one.machine, one.rental, look))
    if not asked:
        return []
    live: list[LiveRun] | None
    try:
        live = runner().alerts.live_runs()
    except Exception as error:  # noqa: BLE001 - then no machine counts as left
        runner().log.warning("the runs that work now cannot be read: %s", error)
        live = None
    torn = {name for name, of in differences.items() if of.stored or of.left} | {*doubtful}
    return [
        judge_left(
            name,
            machine,
            rental,
            seen_left(look) if look else None,
            live and [run for run in live if _may_use(run, rental, (name, *named[name]))],
            opened[name].spec.when_left
            if name not in torn and (name in stored or rental.job or _holds_nothing(rental))
            else "report",
            name in with_job and not rental.label.workspace.startswith(_WITHOUT_JOB),
            is_stored=name in stored,
        )
        for name, machine, rental, look in asked
    ]


def _may_use(run: LiveRun, rental: Rental, names: Sequence[str]) -> bool:
    """Whether the run may have rented this machine. One that a person started in a shell and that
    was killed is shown as running for ever: it must not account for a machine that is rented weeks
    later."""
    return run.workspace in names and run.began_unix > rental.created_unix - RENTING_S


def act_on_left(
    one: LeftMachine,
    opened: OpenWorkspace,
    block: str,
    delivered: Delivered | None,
    faults: list[Exception],
) -> LeftMachine:
    """Start the run that ends or continues the machine, once nobody has worked on it for LEFT_S, by
    what earlier looks have remembered."""
    now_unix = time.time()
    subject = f"{one.provider} {one.machine}"
    since_unix = delivered.since_unix("machine left", subject) if delivered else None
    if not one.act or since_unix is None or now_unix - since_unix < LEFT_S:
        return one
    key = run_key(f"left-{one.machine}", now_unix)
    beside = one.label.workspace != one.workspace
    try:
        if one.act == "end":
            named = [str(one.machine)]
            left, end = ([], named) if beside else (named, [])
            runs = runner().start(reconcile, key, workspace=block, left=left, end=end)
        else:
            runs = runner().start(wake, key, workspace=block, snapshot=one.holds or NEWEST)
    except Exception as error:  # noqa: BLE001 - one that fails leaves the others to be looked at
        became = became_of(opened, one.label)
        runner().log.error("machine %s %s: %s", one.machine, became, error)
        faults.append(error)
        return msgspec.structs.replace(one, next_step=f"it {became}: {error}")
    step = _begun(one, runs, beside=beside) if runs else _done(one, opened, beside=beside)
    return msgspec.structs.replace(one, next_step=step)


def _begun(one: LeftMachine, runs: str, *, beside: bool) -> str:
    """What the run that was started does with the machine."""
    if one.act == "continue":
        return f"{runs} continues with it, and hands it over"
    if beside:
        return f"{runs} ends it"
    return f"{runs} ends it, and stores it before where its restore is whole, unless it is in use"


def _done(one: LeftMachine, opened: OpenWorkspace, *, beside: bool) -> str:
    """What this run itself has done with the machine."""
    became = became_of(opened, one.label)
    if became == ENDED:
        return "it was ended" if beside else "it was ended, or hibernated"
    if became == ONLY_HANDED_OVER and one.act == "continue":
        return "it was woken"
    if became == ONLY_HANDED_OVER:
        return (
            "it was handed over, and not hibernated: somebody uses it, or nobody can say so. "
            f"`torpor hibernate {one.workspace} --machine {one.machine}` stores and ends it"
        )
    return f"it {became}"


def reconcile_abandoned(
    findings: Sequence[Finding],
    named: Mapping[WorkspaceName, Sequence[str]],
    differences: Mapping[WorkspaceName, BlockDifferences],
    faults: list[Exception],
) -> None:
    """Start a run that ends failed attempts and what they rented: they are never handed over. Where
    the workspace's blocks differ in their store, the table shows the machines, and a person
    chooses."""
    names = {one.workspace for one in findings if one.kind == "abandoned"}
    for name, blocks in named.items():
        torn = name in differences and "the store" in differences[name].stored
        if torn or names.isdisjoint(names_of(name)):
            continue
        key = run_key(f"abandoned-{name}", time.time())
        try:
            runner().start(reconcile, key, workspace=blocks[0], abandoned=True)
        except Exception as error:  # noqa: BLE001 - the others are ended all the same
            runner().log.error("abandoned machines of workspace %s stay: %s", name, error)
            faults.append(error)


def _holds_nothing(rental: Rental) -> bool:
    """Whether the machine was rented beside a workspace, for a benchmark, a drill or a job's node:
    it holds no work of its own."""
    return rental.label.workspace.startswith(RESERVED)


def judge_left(
    workspace: WorkspaceName,
    machine: Machine,
    rental: Rental,
    look: LeftLook | None,
    live: Sequence[LiveRun] | None,
    rule: Literal["end", "continue", "report"],
    has_job: bool,
    *,
    is_stored: bool = True,
) -> LeftMachine:
    """Whether the machine's run was killed, and what should happen to the machine by the block's
    ``rule``. ``live``: the runs that the server shows at work on the workspace; None: the server
    did not say. ``is_stored``: the workspace has a snapshot, with which a wake can continue."""
    killed, who = _who(look, live, rental.created_unix)
    act: Literal["end", "continue", ""] = ""
    if not killed:
        step = _wait(look, live)
    elif has_job:
        killed, step = False, "none: the job of its workspace continues with it, or ends it"
    elif live:
        step = "see whether that run works; if its process is gone, cancel it in the UI"
    elif _holds_nothing(rental):
        act = "" if rule == "report" else "end"
        step = "a run of reconcile ends it" if act else "name its id in `end` of reconcile"
    elif look is None or look.works is None:
        step = "if it never answers again, name its id in `end` of reconcile"
    elif rule == "report" and not is_stored:
        step = (
            "run reconcile with it in `left`, which hands it over, and hibernates it if nobody "
            "uses it"
        )
    elif rule == "report":
        step = "wake its workspace, which continues with it, or run reconcile with it in `left`"
    elif not is_stored:
        act, step = "end", "a run of reconcile hands it over, and hibernates it if nobody uses it"
    elif rule == "continue" or look.used:
        act, step = "continue", "a run of wake continues with it and hands it over"
    else:
        act = "end"
        step = (
            "a run of reconcile ends it; a whole restore is hibernated instead, unless somebody "
            "uses it by then"
        )
    return LeftMachine(
        label=rental.label,
        machine=machine.id,
        workspace=workspace,
        provider=machine.provider,
        price_usd_h=machine.price_usd_h,
        killed=killed,
        who=who,
        next_step=step,
        act=act,
        holds=look.holds if look is not None else None,
    )


def _wait(look: LeftLook | None, live: Sequence[LiveRun] | None) -> str:
    """The next step where the machine's run may still live."""
    if look is None:
        return "none: wait for the run that has just asked for it"
    if look.works or live:
        return "none: wait for that run"
    return "none: the next watch asks the server again"


def _who(
    look: LeftLook | None, live: Sequence[LiveRun] | None, asked_unix: float
) -> tuple[bool, str]:
    """Whether the machine's run was killed, and a sentence about it. A run counts as killed only if
    the server shows no run of the workspace: `deploy` gives the agent back when its restore has
    ended, and hands the machine over much later. The server does not show a run for long whose
    process is gone (deployments/lost_runs.py)."""
    if look is None:
        return False, f"It was asked for at {moment(asked_unix)}: its run may still begin on it."
    named = " and ".join(f"run {run.name}" for run in live or ())
    if look.works:
        return False, f"{named or 'A run'} works on it now."
    agent = (
        "Its agent works for no run"
        if look.works is False
        else f"Whether a run works on it is not known ({look.error})"
    )
    if live is None:
        return False, f"{agent}, and the server does not say which runs there are."
    if named:
        overdue = time.time() - asked_unix > HANDED_S
        return overdue, f"{agent}, and {named} has not ended: it may still work with the machine."
    return True, f"{agent}, and no run of its workspace goes on: the one that rented it was killed."
