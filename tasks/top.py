"""Reads what `torpor top` shows: the table of `torpor status`, what each machine does now, and open
jobs."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from typing import Final, NamedTuple

import msgspec

from tasks.alert_server import AlertServer
from tasks.jobs import cost_of, read_activity
from tasks.machines import session_with
from tasks.overview import RentedMachines, live_machines, look_at_opened
from tasks.trouble import trouble
from tasks.workspace import OpenWorkspace
from tasks.workspace_blocks import open_all
from torpor.control.jobs.listing import JobList
from torpor.control.jobs.records import Job
from torpor.control.overview import Overviews
from torpor.control.rental.records import Rental
from torpor.control.reports import Report, Row, moment
from torpor.control.store.records import Unread, named
from torpor.shared.errors import TorporError
from torpor.shared.values import Machine
from torpor.shared.wire.activity import GPU_LOST, NO_GPU, UNKNOWN, Sample

LOOK_S: Final = 20.0
"""Seconds for the look at one machine; a machine that has not answered by then is shown as
silent."""
AGAIN_S: Final = 60.0
"""Seconds between two logins to one machine. Each login is a second of its CPU, and work in a
twentieth of the seconds would keep the machine from counting as idle."""
_RECENT_S: Final = 30.0
_AT_ONCE: Final = 16


class MachineNow(msgspec.Struct, frozen=True, kw_only=True):
    """One machine and what it does now, by the last seconds of its sampler; None: unknown. ``gpu``
    is percent of the busiest GPU, ``cpu`` of one core, ``network`` and ``disk`` KiB/s."""

    workspace: str
    machine: str
    provider: str
    usd_h: float
    gpus: int = 0
    gpu_name: str = ""
    gpu: int | None = None
    cpu: int | None = None
    network: int | None = None
    disk: int | None = None
    trouble: str = ""
    read_unix: float = 0.0  # when the machine was asked

    def row(self) -> Row:
        busy = "" if self.gpus == 0 else "?" if self.gpu is None else f"{self.gpu} %"
        model = f"{self.gpus}x {self.gpu_name}" if self.gpu_name else ""
        return {
            "machine": self.machine,
            "workspace": self.workspace,
            "$/h": f"{self.usd_h:.3f}" if self.usd_h else "?",
            "GPU": busy,
            "CPU": "" if self.cpu is None else f"{self.cpu} %",
            "net MB/s": _megabytes(self.network),
            "disk MB/s": _megabytes(self.disk),
            "GPUs": model,
            "market": self.provider,
            "note": self.trouble,
        }


class Top(Report, frozen=True):
    """What one refresh of the screen shows. ``jobs``: those that have not ended."""

    at_unix: float
    overviews: Overviews
    machines: list[MachineNow]
    jobs: JobList

    def title(self) -> str:
        return f"{moment(self.at_unix)}  {self.overviews.title()}"

    def tables(self) -> list[list[Row]]:
        """The tables of workspaces, machines and jobs; empty tables are left out."""
        jobs = self.jobs.rows() if self.jobs.open or self.jobs.unread else []
        names = ("job", "workspace", "state", "used", "runs on", "command", "saves")
        shown = [{name: row.get(name, "") for name in names} for row in jobs]
        machines = [one.row() for one in self.machines]
        return [rows for rows in (self.overviews.rows(), machines, shown) if rows]


class _There(NamedTuple):
    """A machine that is shown, and what the last refresh showed of it."""

    opened: OpenWorkspace
    machine: Machine
    rental: Rental | None
    last: MachineNow | None


def look_at_top(blocks: Sequence[str], server: AlertServer, last: Top | None = None) -> Top:
    """Everything that the screen shows, read once. Changes nothing. ``last``: the result of an
    earlier look; a machine that was asked less than AGAIN_S before is not asked again."""
    known = {one.machine: one for one in last.machines} if last is not None else {}
    opened, closed = open_all(sorted(blocks))
    there: dict[str, _There] = {}

    def machines(of: OpenWorkspace) -> RentedMachines:
        found = live_machines(of)
        for machine, rental in found:
            there[machine.id] = _There(of, machine, rental, known.get(machine.id))
        return found

    overviews = look_at_opened(opened, closed, server, machines)
    context = copy_context()
    with ThreadPoolExecutor(_AT_ONCE, thread_name_prefix="top") as threads:
        jobs = threads.submit(context.copy().run, _open_jobs, opened)
        uses = threads.map(lambda one: context.copy().run(_now, one), [*there.values()])
        return Top(time.time(), overviews, [*uses], jobs.result())


def _open_jobs(opened: Mapping[str, OpenWorkspace]) -> JobList:
    jobs: dict[str, Job] = {}
    usd: dict[str, float] = {}
    troubles: dict[str, str] = {}
    for block, of in opened.items():
        unread: Unread = {}
        try:
            for job in of.jobs.open(unread):
                jobs[job.id] = job
                spent = cost_of(of, job).usd if job.max_usd else None
                usd |= {} if spent is None else {job.id: spent}
        except TorporError as error:
            troubles[block] = str(error)
        if unread:
            troubles[block] = named(unread)
    return JobList([*jobs.values()], [], [], troubles, usd)


def _now(there: _There) -> MachineNow:
    opened, machine, rental, last = there
    now_unix = time.time()
    if last is not None and now_unix - last.read_unix < AGAIN_S:
        return last
    seen = MachineNow(
        workspace=opened.spec.name,
        machine=machine.id,
        provider=machine.provider,
        usd_h=machine.price_usd_h or (rental.price_usd_h if rental else 0.0),
        gpus=rental.gpu_count if rental is not None and rental.gpu else 0,
        gpu_name=rental.gpu if rental is not None else "",
    )
    if rental is None or rental.state != "handed over" or machine.state != "running":
        state = rental.state if rental is not None else "without a rental"
        return msgspec.structs.replace(seen, trouble=f"it is {machine.state}, {state}")
    seen = msgspec.structs.replace(seen, read_unix=now_unix)
    try:
        with session_with(opened, machine, LOOK_S) as session:
            samples = read_activity(session, _RECENT_S).samples
    except Exception as error:  # noqa: BLE001 - the others are looked at all the same
        return msgspec.structs.replace(seen, trouble=str(trouble(error)))
    return _using(seen, samples)


def _using(seen: MachineNow, samples: Sequence[Sample]) -> MachineNow:
    if not samples:
        return msgspec.structs.replace(seen, trouble="no sampler has written anything")
    newest = samples[-1]
    return msgspec.structs.replace(
        seen,
        gpus=seen.gpus if newest.gpu_state == NO_GPU else max(newest.gpus, seen.gpus),
        gpu=_mean([one.gpu for one in samples]),
        cpu=_mean([one.cpu for one in samples]),
        network=_mean([one.network for one in samples]),
        disk=_mean([one.disk for one in samples]),
        trouble="a GPU is lost" if newest.gpu_state == GPU_LOST else "",
    )


def _mean(figures: Sequence[int]) -> int | None:
    known = [one for one in figures if one != UNKNOWN]
    return round(sum(known) / len(known)) if known else None


def _megabytes(kib: int | None) -> str:
    return "" if kib is None else f"{kib * 1024 / 1e6:.1f}"
