"""Reads what metrics show beside a look of `watch`: costs, budgets, queues and transfers."""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextvars import copy_context
from pathlib import Path
from threading import Event
from typing import Final

import msgspec

from tasks.job_listing import queued_jobs
from tasks.runner import runner
from tasks.runs import JOB_QUEUES
from tasks.trouble import trouble
from tasks.workspace import OpenWorkspace
from torpor.control.jobs.listing import QueuedJob
from torpor.control.metrics import Fleet, Money, StoredSnapshot
from torpor.control.money.budgets import OpenBudget, budget_status
from torpor.control.money.fleet import (
    BudgetUse,
    budget_use,
    last_wake,
    month_began_unix,
    workspace_costs,
)
from torpor.control.overview import Overviews
from torpor.control.own_server import state_folder
from torpor.control.rental.records import Rental, Rentals
from torpor.control.time_zones import zone_named
from torpor.shared.values import WorkspaceName, learned, names_of

KEPT_S: Final = 900.0
"""For this many seconds costs are shown again before their records are read again. One reading
takes ten listings for each workspace, and one object for each rental of the month: at every look,
that would cost a dollar a month for each workspace at AWS's price."""
MOST_S: Final = 60.0
"""Seconds that a look waits for records; records that were not read by then count as unknown. The
records of one workspace are read one after another, at 30 ms each: in a minute, 2,000 rentals. The
process of a run ends once the store has answered or its patience is over."""
_DAY_S: Final = 24 * 3600
_AT_ONCE: Final = 8


class _Kept(msgspec.Struct, frozen=True):
    """What was read, and which Workspace blocks it covers."""

    blocks: list[str]
    at_unix: float
    money: Money


def look_at_fleet(
    blocks: Mapping[str, OpenWorkspace], closed: Collection[str], seen: Overviews, metrics: str
) -> Fleet:
    """For metrics alone: what cannot be read has no metric, and a warning. ``closed``: the blocks
    that cannot be opened. ``seen``: what the same look has found of the others. ``metrics``: the
    file to write; looks that write the same one share the costs of one reading."""
    return Fleet(
        money=_money(blocks, closed, _file_of(metrics)),
        snapshots=_snapshots(blocks, seen),
        queued=_queued(),
        queues=JOB_QUEUES,
    )


def _money(blocks: Mapping[str, OpenWorkspace], closed: Collection[str], file: Path) -> Money:
    now_unix = time.time()
    wanted = sorted(blocks)  # a block that could not be opened then is read once it can be
    kept = _kept(file)
    if kept is None or kept.blocks != wanted or not _is_of_now(kept.at_unix, now_unix):
        kept = _Kept(wanted, now_unix, _read(blocks, now_unix))
        _keep(file, kept)
    unknown = {*kept.money.unknown, *map(WorkspaceName, closed)}
    return msgspec.structs.replace(kept.money, unknown=sorted(unknown))


def _is_of_now(at_unix: float, now_unix: float) -> bool:
    """Whether costs that were read at an earlier time still hold: not after the end of that day."""
    return 0 <= now_unix - at_unix < KEPT_S and at_unix // _DAY_S == now_unix // _DAY_S


def _read(blocks: Mapping[str, OpenWorkspace], now_unix: float) -> Money:
    budgets = _open_budgets(blocks)
    zones = {"UTC", *(one.budget.timezone for one in budgets or [])}
    since_unix = min(month_began_unix(now_unix, zone_named(zone)) for zone in zones)
    # one block stands for all blocks of its workspace
    first: dict[WorkspaceName, OpenWorkspace] = {}
    for one in blocks.values():
        first.setdefault(one.spec.name, one)
    found = _rentals(blocks, since_unix)
    unknown = [name for name in first if name not in found]
    whole = not unknown and {*runner().workspaces()} <= blocks.keys()
    return Money(
        at_unix=now_unix,
        costs=[
            cost
            for name, rentals in found.items()
            for cost in workspace_costs(name, first[name].project, rentals, now_unix)
        ],
        unknown=unknown,
        wakes=[woken for name, of in found.items() if (woken := last_wake(name, of))],
        budgets=_uses(budgets, found, now_unix, whole=whole),
    )


def _rentals(
    blocks: Mapping[str, OpenWorkspace], since_unix: float
) -> dict[WorkspaceName, list[Rental]]:
    """The rentals of each workspace whose records can be read: open ones and those that ended
    since. A workspace whose blocks name several stores has records in each."""
    ledgers: dict[WorkspaceName, dict[tuple[str, WorkspaceName], Rentals]] = {}
    for one in blocks.values():
        of = ledgers.setdefault(one.spec.name, {})
        for name in names_of(one.spec.name):
            of.setdefault((one.store.address, name), Rentals(one.store, name))
    given_up = Event()

    def read(of: Collection[Rentals]) -> list[Rental]:
        return [
            rental for ledger in of if not given_up.is_set() for rental in ledger.since(since_unix)
        ]

    context = copy_context()
    threads = ThreadPoolExecutor(_AT_ONCE, thread_name_prefix="fleet")
    reads = {
        name: threads.submit(context.copy().run, read, of.values()) for name, of in ledgers.items()
    }
    done, _ = wait(reads.values(), MOST_S)
    given_up.set()
    threads.shutdown(wait=False, cancel_futures=True)
    found = {}
    for name, reading in reads.items():
        if reading not in done:
            why = f"its records were not read within {MOST_S:.0f} s"
            runner().log.warning("metrics lack the costs of workspace %s: %s", name, why)
            continue
        try:
            found[name] = reading.result()
        except Exception as error:  # noqa: BLE001 - the metrics of the others are written all the same
            runner().log.warning("metrics lack the costs of workspace %s: %s", name, trouble(error))
    return found


def _open_budgets(blocks: Mapping[str, OpenWorkspace]) -> Sequence[OpenBudget] | None:
    """The budgets of the installation; None where they cannot be opened."""
    try:
        for one in blocks.values():
            return one.budgets()  # all workspaces have the same budgets
    except Exception as error:  # noqa: BLE001 - the rest is written all the same
        runner().log.warning("metrics lack the budgets: %s", trouble(error))
        return None
    return []


def _uses(
    budgets: Sequence[OpenBudget] | None,
    found: Mapping[WorkspaceName, Sequence[Rental]],
    now_unix: float,
    *,
    whole: bool,
) -> list[BudgetUse]:
    """``found``: the rentals of the workspaces that were read; ``whole``: of all there are."""
    if budgets is None:
        return [BudgetUse()]
    rentals = [rental for of in found.values() for rental in of]
    uses = []
    for one in budgets:
        of = one.budget
        known = whole if of.project else {*of.workspaces} <= found.keys()
        if known and not one.trouble:
            mine = [
                rental for rental in rentals if of.covers(rental.label.workspace, rental.project)
            ]
            uses.append(budget_use(budget_status(of, mine, now_unix)))
        else:
            uses.append(BudgetUse(budget=of.name, usd_month=float(of.usd_month)))
    return uses


def _file_of(metrics: str) -> Path:
    """The file that keeps costs between looks. It is not beside the metrics, because their folder
    may be served."""
    of = hashlib.sha256(os.path.abspath(metrics).encode("utf-8", "surrogateescape")).hexdigest()
    return state_folder() / "costs" / f"{of[:16]}.json"


def _kept(file: Path) -> _Kept | None:
    try:
        return msgspec.json.decode(file.read_bytes(), type=learned(_Kept))
    except (OSError, ValueError, RecursionError, msgspec.MsgspecError):
        return None  # this is the first look, or the file is of another version


def _keep(file: Path, kept: _Kept) -> None:
    fresh = file.with_suffix(".new")
    try:
        file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        fresh.write_bytes(msgspec.json.encode(kept))
        os.replace(fresh, file)
    except OSError as error:
        runner().log.warning("the next look reads all records of rentals again: %s", error)


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
