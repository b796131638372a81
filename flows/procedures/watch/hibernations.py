"""Hibernating the machines that watch found idle, or whose budget is spent."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import msgspec

from flows.hibernate import hibernate
from flows.procedures.run_key import run_key
from tasks.budgets import estimate_hibernation, look_at_budgets, stop_jobs
from tasks.events import MachineIdle, emit
from tasks.runner import runner
from tasks.trouble import trouble
from tasks.workspace import OpenWorkspace
from torpor.control.idleness import OWN_WORK
from torpor.control.money.exhaustion import BudgetsSeen
from torpor.control.rental.records import Rental
from torpor.control.watch_report import Watched
from torpor.shared.values import Label, MachineId


def over_budget(
    used: Sequence[tuple[OpenWorkspace, Rental]], opened: Sequence[OpenWorkspace]
) -> tuple[dict[Label, str], BudgetsSeen]:
    """Why machines are to be hibernated, by rental: their budget will be spent within its lead
    time. Also how the budgets stand, even where none of the ``opened`` workspaces has a machine."""
    seen = look_at_budgets(used, opened)
    running_out = seen.running_out
    for words in seen.unread:
        runner().log.warning("no machine is hibernated for its cost: %s", words)
    near = [
        (opened, rental)
        for opened, rental in used
        if any(one.counts(rental) for one in running_out)
    ]
    names = {opened.spec.name: opened for opened, _ in near}
    looks = {name: estimate_hibernation.submit(opened) for name, opened in names.items()}
    stored = {name: look.result() for name, look in looks.items()}
    now_unix = time.time()
    found: dict[Label, str] = {}
    for one in running_out:
        found |= {
            rental.label: why
            for opened, rental in near
            if (why := one.why_end(rental, stored[opened.spec.name], now_unix))
        }
    return found, seen


def hibernate_idle(one: Watched, block: str, faults: list[Exception]) -> Watched:
    """Hibernate an idle machine. The hibernation judges idleness again."""
    machine = one.machine or MachineId("")
    emit(
        MachineIdle(
            workspace=one.workspace,
            machine=machine,
            provider=one.provider,
            reason=one.reason,
        )
    )
    return _start(one, f"watch-{machine}", block, faults, only_if_idle=True)


def hibernate_over_budget(
    one: Watched, opened: OpenWorkspace, block: str, faults: list[Exception]
) -> Watched:
    """Hibernate a machine whose budget is spent, also while it works. Where a job runs on it, ask
    for the end of the job instead: whoever drives the job stops the command and hibernates."""
    machine = one.machine or MachineId("")
    runner().log.warning(
        "machine %s of workspace %s is to be hibernated: %s", machine, one.workspace, one.over
    )
    try:
        jobs, past = stop_jobs(opened, machine, one.over)
    except Exception as error:  # noqa: BLE001 - the others are looked at all the same
        faults.append(trouble(error))
        step = f"it was not hibernated: whether a job runs on it is not known: {error}"
        return msgspec.structs.replace(one, next_step=step)
    if jobs:
        step = f"{one.over}: job {', '.join(jobs)} is asked to stop, and its run hibernates it"
    elif past:
        step = f"{one.over}: job {', '.join(past)} goes on up to its own limit, as was approved"
    elif one.reason == OWN_WORK:
        step = f"{one.over}: it is hibernated when torpor's work on it has ended"
    else:
        started = _start(one, f"budget-{machine}", block, faults)
        return msgspec.structs.replace(started, next_step=f"{one.over}: {started.next_step}")
    return msgspec.structs.replace(one, next_step=step)


def _start(one: Watched, key: str, block: str, faults: list[Exception], **options: Any) -> Watched:
    try:
        runs = runner().start(
            hibernate,
            run_key(key, time.time()),
            workspace=block,
            machine=one.machine,
            **options,
        )
    except Exception as error:  # noqa: BLE001 - one that fails leaves the others to be looked at
        runner().log.error("machine %s was not hibernated: %s", one.machine, error)
        faults.append(error)
        return msgspec.structs.replace(one, next_step=f"it was not hibernated: {error}")
    step = f"{runs} hibernates it" if runs else "it was hibernated: wake it to work on it"
    return msgspec.structs.replace(one, next_step=step)
