"""Reads what metrics show beside a look of `watch`: costs, budgets, queues and transfers."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from pathlib import Path
from typing import Final, NamedTuple

import msgspec

from tasks.job_listing import queued_jobs
from tasks.runner import runner
from tasks.runs import JOB_QUEUES
from tasks.trouble import trouble
from tasks.workspace import OpenWorkspace
from torpor.control.jobs.listing import QueuedJob
from torpor.control.metrics import Fleet, Money, StoredSnapshot
from torpor.control.money.costs import read
from torpor.control.money.fleet import (
    BudgetUse,
    LastWake,
    WorkspaceCost,
    budget_use,
    last_wake,
    month_began_unix,
    workspace_costs,
)
from torpor.control.overview import Overviews
from torpor.control.rental.records import Rentals
from torpor.shared.values import WorkspaceName, learned, names_of

KEPT_S: Final = 900.0
"""How long what was read of records is shown again while the same machines are rented. Reading them
is ten listings for each workspace, which at AWS's price and at every look would cost a dollar a
month for each."""
_AT_ONCE: Final = 4


class _Records(NamedTuple):
    costs: list[WorkspaceCost]
    wake: LastWake | None


class _Kept(msgspec.Struct, frozen=True):
    """What was read, when, and which machines each workspace had."""

    at_unix: float
    machines: dict[WorkspaceName, list[str]]
    money: Money


def look_at_fleet(blocks: Mapping[str, OpenWorkspace], seen: Overviews, metrics: str) -> Fleet:
    """For metrics alone: what cannot be read has no metric, and a warning. ``seen``: what the same
    look has found of these workspaces. ``metrics``: the file to write; what was read of records is
    kept beside it for the next look."""
    return Fleet(
        money=_money(blocks, seen, Path(metrics).with_suffix(".records")),
        snapshots=_snapshots(blocks, seen),
        queued=_queued(),
        queues=JOB_QUEUES,
    )


def _money(blocks: Mapping[str, OpenWorkspace], seen: Overviews, file: Path) -> Money:
    now_unix = time.time()
    opened = {one.spec.name: one for one in blocks.values()}
    shown = {one.block: one.machines for one in seen.workspaces}
    machines = {one.spec.name: shown.get(block, []) for block, one in blocks.items()}
    kept = _kept(file)
    if kept is not None and kept.machines == machines and 0 <= now_unix - kept.at_unix < KEPT_S:
        return kept.money
    money = _read(opened, now_unix)
    if not money.unknown:
        _keep(file, _Kept(now_unix, machines, money))
    return money


def _read(opened: Mapping[WorkspaceName, OpenWorkspace], now_unix: float) -> Money:
    context = copy_context()
    with ThreadPoolExecutor(_AT_ONCE, thread_name_prefix="fleet") as threads:
        reads = {
            name: threads.submit(context.copy().run, _records, one, now_unix)
            for name, one in opened.items()
        }
        found = {name: answer for name, one in reads.items() if (answer := one.result())}
    return Money(
        costs=[cost for one in found.values() for cost in one.costs],
        unknown=[name for name in opened if name not in found],
        wakes=[one.wake for one in found.values() if one.wake],
        budgets=_budgets([*opened.values()], now_unix),
    )


def _records(opened: OpenWorkspace, now_unix: float) -> _Records | None:
    name = opened.spec.name
    try:
        ledgers = [Rentals(opened.store, each) for each in names_of(name)]
        rentals = read(ledgers, month_began_unix(now_unix))
        costs = workspace_costs(name, opened.project, rentals, now_unix)
        return _Records(costs, last_wake(name, rentals))
    except Exception as error:  # noqa: BLE001 - the metrics of the others are written all the same
        runner().log.warning("metrics lack the costs of workspace %s: %s", name, trouble(error))
        return None


def _budgets(opened: Sequence[OpenWorkspace], now_unix: float) -> list[BudgetUse]:
    found = []
    try:
        budgets = opened[0].budgets() if opened else []  # the same ones for every workspace
    except Exception as error:  # noqa: BLE001 - the rest is written all the same
        runner().log.warning("metrics lack the budgets: %s", trouble(error))
        return []
    for one in budgets:
        try:
            found.append(budget_use(one.status(now_unix)))
        except Exception as error:  # noqa: BLE001 - the others are written all the same
            runner().log.warning("metrics lack budget %s: %s", one.budget.name, trouble(error))
    return found


def _kept(file: Path) -> _Kept | None:
    try:
        return msgspec.json.decode(file.read_bytes(), type=learned(_Kept))
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError):
        return None  # the first look, or another version


def _keep(file: Path, kept: _Kept) -> None:
    fresh = file.with_suffix(".new")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        fresh.write_bytes(msgspec.json.encode(kept))
        os.replace(fresh, file)
    except OSError as error:  # the metrics go into the same folder, and say it
        runner().log.warning("the next look reads all records again: %s", error)


def _snapshots(blocks: Mapping[str, OpenWorkspace], seen: Overviews) -> list[StoredSnapshot]:
    found: dict[WorkspaceName, StoredSnapshot] = {}
    for one in seen.workspaces:
        if one.newest is not None and one.block in blocks:
            name = blocks[one.block].spec.name
            found[name] = StoredSnapshot(name, one.stored_bytes, one.new_bytes)
    return [*found.values()]


def _queued() -> list[QueuedJob] | None:
    try:
        return queued_jobs()
    except Exception as error:  # noqa: BLE001 - the server may be away
        runner().log.warning("metrics lack the queues: %s", trouble(error))
        return None
