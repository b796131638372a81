"""Looks at all workspaces, for `torpor status` and for the page that `watch` renews."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextvars import copy_context
from functools import partial
from itertools import chain
from typing import Final, ParamSpec, TypeVar
from zoneinfo import ZoneInfo

import msgspec

from tasks.alert_server import AlertServer, ComingRun, Sleeping
from tasks.jobs import nodes_of
from tasks.machines import renting
from tasks.runner import runner
from tasks.workspace import OpenWorkspace
from tasks.workspace_blocks import open_all
from torpor.control.money.costs import dollars, spent_since
from torpor.control.money.months import Month, microseconds
from torpor.control.overview import Overview, Overviews
from torpor.control.own_server import how_to_hibernate
from torpor.control.rental.records import Rental
from torpor.control.reports import ALL, moment
from torpor.control.store.receipts import newest_receipt
from torpor.control.store.records import Unread, named
from torpor.control.store.shared_listings import SharedListings
from torpor.shared.errors import TorporError
from torpor.shared.values import Machine, made_at

RentedMachines = list[tuple[Machine, Rental | None]]

P = ParamSpec("P")
ReadT = TypeVar("ReadT")

_UTC: Final = ZoneInfo("UTC")
_AT_ONCE: Final = 8
"""Workspaces that are looked at in parallel. Each reads up to four objects in parallel, mostly of
one store, to which 32 connections are kept."""


def look_at_all(blocks: Sequence[str], server: AlertServer) -> Overviews:
    """The workspaces of these blocks, in the order of their names. All markets are asked."""
    return look_at_opened(*open_all(sorted(blocks)), server, live_machines)


def live_machines(opened: OpenWorkspace) -> RentedMachines:
    """The machines of the workspace, as their providers show them now."""
    return renting(opened).machines({})


def look_at_opened(
    opened: Mapping[str, OpenWorkspace],
    closed: Mapping[str, TorporError],
    server: AlertServer,
    machines: Callable[[OpenWorkspace], RentedMachines],
) -> Overviews:
    """Look at workspaces that are opened already, and list those that cannot be opened."""
    with _looking() as threads:
        looks = _submit(threads, opened, machines, asleep_too=True)
        # read while the workspaces are looked at
        coming, sleeping = server.coming(), server.sleeping()
        found = [_scheduled(opened[one], looks[one].result(), coming, sleeping) for one in looks]
    return with_closed(Overviews(found, watching(coming)), closed)


def with_closed(seen: Overviews, closed: Mapping[str, TorporError]) -> Overviews:
    """Add the blocks that cannot be opened."""
    lost = [Overview(block=name, trouble=str(error)) for name, error in closed.items()]
    every = sorted([*seen.workspaces, *lost], key=lambda one: one.block)
    return Overviews(every, seen.watching)


def look_once_more(
    opened: Mapping[str, OpenWorkspace], machines: Callable[[OpenWorkspace], RentedMachines]
) -> Overviews:
    """A cheaper look for callers that come every few minutes: uses the ``machines`` that the caller
    has found, and reads the month's cost only of workspaces that are awake."""
    try:
        coming: list[ComingRun] | None = runner().alerts.coming()
        sleeping: Sleeping | None = runner().alerts.sleeping()
    except Exception as error:  # noqa: BLE001 - the machines are shown without the server's schedules
        runner().log.warning("schedules cannot be read: %s", error)
        coming = sleeping = None
    found = overview(opened, machines, coming or [], sleeping, asleep_too=False)
    return Overviews(found, watching(coming))


def overview(
    opened: Mapping[str, OpenWorkspace],
    machines: Callable[[OpenWorkspace], RentedMachines],
    coming: Sequence[ComingRun],
    sleeping: Sleeping | None = None,
    *,
    asleep_too: bool = True,
) -> list[Overview]:
    """Each workspace by its block; all are looked at at once. ``sleeping``: what becomes of idle
    machines, where that is known. ``asleep_too``: read the month's cost of those that are asleep,
    too."""
    with _looking() as threads:
        looks = _submit(threads, opened, machines, asleep_too=asleep_too)
        return [_scheduled(opened[one], looks[one].result(), coming, sleeping) for one in looks]


def _looking() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(_AT_ONCE, thread_name_prefix="overview")


def _submit(
    threads: ThreadPoolExecutor,
    opened: Mapping[str, OpenWorkspace],
    machines: Callable[[OpenWorkspace], RentedMachines],
    *,
    asleep_too: bool,
) -> dict[str, Future[Overview]]:
    context, once = copy_context(), SharedListings()

    def look(block: str) -> Overview:
        try:
            seen, shown = opened[block].through(once.of), partial(machines, opened[block])
            return context.copy().run(_look_at, block, seen, shown, asleep_too)
        except Exception as error:  # noqa: BLE001 - the server may be away, and `watch` acts all the same
            return Overview(block=block, trouble=f"it cannot be looked at: {error}")

    return {block: threads.submit(look, block) for block in opened}


def _scheduled(
    opened: OpenWorkspace,
    seen: Overview,
    coming: Sequence[ComingRun],
    sleeping: Sleeping | None,
) -> Overview:
    """Add what schedules will do."""
    block = seen.block
    runs = [one for one in coming if one.flow != "watch" and one.workspace in (block, ALL)]
    first = min(runs, key=lambda one: one.at_unix, default=None)
    words = first.words() if first else ""
    sleeps = _sleeps(block, opened, seen, sleeping) if seen.machines else ""
    return msgspec.structs.replace(seen, coming=words, sleeps=sleeps)


def _look_at(
    block: str,
    opened: OpenWorkspace,
    machines: Callable[[], RentedMachines],
    asleep_too: bool,
) -> Overview:
    """One workspace with the other nodes of its jobs; an error becomes the ``trouble`` of its
    row."""
    unread: Unread = {}
    try:
        now_unix = time.time()
        with ThreadPoolExecutor(2, thread_name_prefix="records") as threads:
            newest_of = _in(threads, newest_receipt, opened.store, opened.spec.name)
            jobs_of = _in(threads, opened.jobs.open, unread)
            rentals = _rentals(opened, now_unix, unread) if asleep_too else None
            mine = opened.rentals.open(unread) if rentals is None else rentals[0]
            jobs = jobs_of.result()
            newest, receipt = newest_of.result()
        mine = [one for one in mine if one.state != "ended"]
        # a machine may belong to a record that cannot be read
        rented = bool(mine) or any("/open/" in key for key in unread)
        nodes = list[Rental]()
        if any(job.nodes > 1 for job in jobs):
            nodes = nodes_of(opened).rentals.open(unread) if rentals is None else rentals[1]
            nodes = [one for one in nodes if one.state != "ended" and one.machine]
        if rentals is None and (rented or nodes):
            rentals = _rentals(opened, now_unix, unread)
        month_usd = None if rentals is None else _month_usd(rentals, now_unix)
        price = opened.store_price()
        stored = receipt.stored_bytes if receipt else None
        seen = Overview(
            block=block,
            state="asleep" if newest else "new",
            month_usd=None if unread else month_usd,
            newest=newest,
            newest_age_s=None if newest is None else now_unix - made_at(newest).timestamp(),
            asleep_usd_day=None if price is None or stored is None else price.usd_day(stored),
            stored_bytes=stored,
            new_bytes=receipt.new_bytes if receipt else None,
            jobs=len(jobs),
            machines=[f"{one.machine} at {one.provider}, a node of a job" for one in nodes],
            usd_h=sum(one.price_usd_h for one in nodes),
            trouble=named(unread),
        )
        if not rented:
            return seen
    except TorporError as error:
        return Overview(block=block, trouble=str(error))
    try:
        found = machines()
    except TorporError as error:
        return msgspec.structs.replace(seen, state="awake?", unseen=str(error))
    there = [(machine, rental) for machine, rental in found if not _is_ending(machine, rental)]
    doubtful = any("/rentals/open/" in key for key in unread)
    if not there:
        try:
            opened.markets.check_reached(mine)
        except TorporError as error:
            return msgspec.structs.replace(seen, state="awake?", unseen=str(error))
        return msgspec.structs.replace(seen, state="awake?" if doubtful else seen.state)
    whole = all(rental is not None and rental.state == "handed over" for _, rental in there)
    return msgspec.structs.replace(
        seen,
        state="awake" if whole else "awake?" if doubtful else "not finished",
        machines=[f"{machine.id} at {machine.provider}" for machine, _ in there] + seen.machines,
        usd_h=sum(machine.price_usd_h for machine, _ in there) + seen.usd_h,
    )


def _sleeps(block: str, opened: OpenWorkspace, seen: Overview, sleeping: Sleeping | None) -> str:
    """When `watch` will hibernate the workspace's machines, in words; empty where that is
    unknown."""
    if sleeping is None:
        return ""
    if sleeping.never(block) or not opened.spec.idle.hibernate:
        return "never"
    last_unix = max(sleeping.at_unix.get(machine, 0.0) for machine in seen.machines)
    at = f", {moment(last_unix).split()[1]} UTC" if last_unix > time.time() else ""
    return f"{opened.spec.idle.minutes:g} min idle{at}"


def watching(coming: Sequence[ComingRun] | None) -> str:
    """When `watch` looks next, by the runs that schedules start; empty where that is unknown."""
    if coming is None:
        return ""
    looks = [one.at_unix for one in coming if one.flow == "watch"]
    if not looks:
        return (
            "The schedule of watch is off: nobody notices an idle machine, and machines save "
            f"themselves for an hour only. {how_to_hibernate()} switches it on"
        )
    return f"watch looks next at {moment(min(looks))}"


def _in(
    threads: ThreadPoolExecutor, read: Callable[P, ReadT], *args: P.args, **named: P.kwargs
) -> Future[ReadT]:
    context = copy_context()
    return threads.submit(lambda: context.run(read, *args, **named))


def _rentals(
    opened: OpenWorkspace, now_unix: float, unread: Unread
) -> tuple[list[Rental], list[Rental]]:
    """The rentals of the workspace and of its nodes that are open, or ended this month."""
    since_unix = Month.of(microseconds(now_unix), _UTC).begin_us(_UTC) / 1e6
    with ThreadPoolExecutor(1, thread_name_prefix="nodes") as threads:
        nodes = _in(threads, nodes_of(opened).rentals.since, since_unix, unread)
        return opened.rentals.since(since_unix, unread), nodes.result()


def _month_usd(rentals: tuple[list[Rental], list[Rental]], now_unix: float) -> float:
    begin_us = Month.of(microseconds(now_unix), _UTC).begin_us(_UTC)
    return float(dollars(sum(spent_since(one, begin_us, now_unix) for one in chain(*rentals))))


def _is_ending(machine: Machine, rental: Rental | None) -> bool:
    return rental is not None and rental.is_ending(machine)
