"""What `watch` found, for Prometheus: a text file that node_exporter's textfile collector reads.

An unknown value has no sample and is never 0. Some values come from machines and markets, so values
are checked, labels are cut, and a metric has at most MOST_SERIES series, because Prometheus keeps
each one for days. Metrics of GPUs have the names that NVIDIA's DCGM gives them.
"""

from __future__ import annotations

import math
import os
from collections import Counter
from collections.abc import Sequence
from typing import Final

import msgspec
from prometheus_client import CollectorRegistry, Gauge, write_to_textfile

from torpor.control.alerts.delivery import Remembered
from torpor.control.jobs.listing import QueuedJob
from torpor.control.machine_use import GpuUse, MachineUse
from torpor.control.money.fleet import BudgetUse, LastWake, WorkspaceCost
from torpor.control.watch_report import WatchReport
from torpor.shared.errors import InvalidInput
from torpor.shared.values import WorkspaceName

VERDICTS: Final = ("busy", "idle", "unknown")
MOST_SERIES: Final = 5000
"""Series of one metric at most: a hundred machines of sixteen GPUs, three times over."""
MOST_LABEL: Final = 128
"""Characters of a label's value at most."""
_MOST_VALUE: Final = 2.0**60
_OF_MACHINE: Final = ("workspace", "machine", "provider")
_OF_GPU: Final = (*_OF_MACHINE, "gpu", "modelName")
_OF_COST: Final = ("project", "workspace", "capacity")

_GPU_METRICS: Final = (
    ("DCGM_FI_DEV_GPU_UTIL", "GPU utilization (in %)", "percent"),
    ("DCGM_FI_DEV_FB_USED", "Frame buffer memory used (in MiB)", "used_mib"),
    ("DCGM_FI_DEV_FB_FREE", "Frame buffer memory free (in MiB)", "free_mib"),
    ("DCGM_FI_DEV_GPU_TEMP", "GPU temperature (in C)", "temperature_c"),
    ("DCGM_FI_DEV_POWER_USAGE", "Power draw (in W)", "power_w"),
    ("DCGM_FI_PROF_PCIE_TX_BYTES", "Bytes a second that it sends by PCIe", "pcie_sent_bytes_s"),
    ("DCGM_FI_PROF_PCIE_RX_BYTES", "Bytes a second that it gets by PCIe", "pcie_received_bytes_s"),
)
_COSTS: Final = (
    ("hour", "torpor_cost_dollars_per_hour", "Of what is rented now", "usd_h"),
    ("day", "torpor_cost_day_dollars", "At most, since midnight UTC", "day_usd"),
    ("month", "torpor_cost_month_dollars", "At most, since the month began in UTC", "month_usd"),
)


class StoredSnapshot(msgspec.Struct, frozen=True):
    """The newest snapshot of a workspace: what the store holds of it, and what of it was new."""

    workspace: WorkspaceName
    stored_bytes: int | None
    new_bytes: int | None


class Money(msgspec.Struct, frozen=True, kw_only=True):
    """What the records of rentals said at ``at_unix``; None: they were not read. ``unknown``: the
    workspaces whose records cannot be read."""

    at_unix: float | None = None
    costs: list[WorkspaceCost] = []
    unknown: list[WorkspaceName] = []
    wakes: list[LastWake] = []
    budgets: list[BudgetUse] = []


class Fleet(msgspec.Struct, frozen=True, kw_only=True):
    """What the records and the queues say beside a look. ``queued``: the jobs whose runs wait in
    queues; None: unknown. ``queues``: the existing queues."""

    money: Money = Money()
    snapshots: Sequence[StoredSnapshot] = ()
    queued: Sequence[QueuedJob] | None = None
    queues: Sequence[str] = ()


class _Metrics:
    """The gauges of one file. An unknown or impossible value makes no sample."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._series: Counter[str] = Counter()
        self._gauges: dict[str, Gauge] = {}
        self._left_out = self.gauge("torpor_series_left_out", "Series over the limit of a metric")

    def gauge(self, name: str, says: str, labels: Sequence[str] = ()) -> str:
        """A new gauge; returns its name, by which values are set."""
        self._gauges[name] = Gauge(name, says, labels, registry=self.registry)
        return name

    def set(self, name: str, value: float | None, *labels: str) -> None:
        if value is None or not math.isfinite(value) or not 0 <= value <= _MOST_VALUE:
            return
        gauge = self._gauges[name]
        if not labels:
            gauge.set(value)
        elif self._series[name] < MOST_SERIES:
            self._series[name] += 1
            gauge.labels(*map(_label, labels)).set(value)
        else:
            self._gauges[self._left_out].inc()


def registry(report: WatchReport, alerts: Sequence[Remembered], fleet: Fleet) -> CollectorRegistry:
    """The report as metrics, the ``alerts`` that people are to hear of, and the fleet."""
    metrics = _Metrics()
    _of_look(metrics, report, alerts)
    _of_machines(metrics, report)
    _of_jobs(metrics, report, fleet)
    _of_money(metrics, fleet)
    _of_transfers(metrics, fleet)
    return metrics.registry


def write_metrics(
    report: WatchReport, alerts: Sequence[Remembered], fleet: Fleet, path: str
) -> None:
    """Write the file whole or not at all; a reader never sees half of it."""
    folder = os.path.dirname(os.path.abspath(path))
    try:
        os.makedirs(folder, exist_ok=True)
        write_to_textfile(path, registry(report, alerts, fleet))
    except OSError as error:
        raise InvalidInput(
            f"the metrics cannot be written to {path}: {error.strerror}. Name a file that this "
            "worker may write"
        ) from None


def _of_look(metrics: _Metrics, report: WatchReport, alerts: Sequence[Remembered]) -> None:
    looked = metrics.gauge("torpor_watch_timestamp_seconds", "When watch last looked")
    silent = metrics.gauge("torpor_providers_silent", "Providers that did not answer")
    snapshot = metrics.gauge(
        "torpor_newest_snapshot_timestamp_seconds", "When the newest snapshot was made",
        ("workspace",),
    )  # fmt: skip
    forgotten = metrics.gauge(
        "torpor_findings", "Machines, rentals and leftovers, as reconcile names them", ("kind",)
    )
    alert = metrics.gauge(
        "torpor_alert", "1 for each alert that people are to hear of",
        ("kind", "subject", "workspace"),
    )  # fmt: skip
    metrics.set(looked, report.at_unix)
    metrics.set(silent, len(report.silent))
    for entry in report.watched:
        metrics.set(snapshot, entry.newest_unix, entry.workspace)
    for kind, count in Counter(finding.kind for finding in report.findings).items():
        metrics.set(forgotten, count, kind)
    for one in alerts:
        metrics.set(alert, 1, one.kind, one.subject, one.workspace)


def _of_machines(metrics: _Metrics, report: WatchReport) -> None:
    verdict = metrics.gauge(
        "torpor_machine_verdict", "1 for the verdict on a workspace's machine",
        (*_OF_MACHINE, "verdict"),
    )  # fmt: skip
    cost = metrics.gauge("torpor_machine_cost_dollars_per_hour", "Its price", _OF_MACHINE)
    since = metrics.gauge(
        "torpor_machine_rented_timestamp_seconds", "When it was asked for", _OF_MACHINE
    )
    cpu = metrics.gauge("torpor_machine_cpu_cores", "Cores that it uses", _OF_MACHINE)
    network = metrics.gauge(
        "torpor_machine_network_bytes_per_second", "In and out, in the last minute", _OF_MACHINE
    )
    disk = metrics.gauge(
        "torpor_machine_disk_bytes_per_second", "Read and written, in the last minute", _OF_MACHINE
    )
    for name, says, _ in _GPU_METRICS:
        metrics.gauge(name, says, _OF_GPU)
    for entry in report.watched:
        if entry.machine is None:
            continue
        machine = (entry.workspace, entry.machine, entry.provider)
        for kind in VERDICTS:
            metrics.set(verdict, kind == entry.kind, *machine, kind)
        metrics.set(cost, entry.price_usd_h, *machine)
        metrics.set(since, entry.since_unix, *machine)
        use = entry.use or MachineUse()
        metrics.set(cpu, None if use.cpu_percent is None else use.cpu_percent / 100, *machine)
        metrics.set(network, use.network_bytes_s, *machine)
        metrics.set(disk, use.disk_bytes_s, *machine)
        for number, gpu in enumerate(use.gpus):
            _of_gpu(metrics, gpu, (*machine, str(number), use.model))


def _of_gpu(metrics: _Metrics, gpu: GpuUse, labels: tuple[str, ...]) -> None:
    for name, _, field in _GPU_METRICS:
        metrics.set(name, getattr(gpu, field), *labels)


def _of_jobs(metrics: _Metrics, report: WatchReport, fleet: Fleet) -> None:
    driven = metrics.gauge(
        "torpor_job_driven", "1 while a flow run works on a job that has not ended",
        ("workspace", "job"),
    )  # fmt: skip
    open_jobs = metrics.gauge(
        "torpor_open_jobs", "Jobs that have begun and not ended", ("workspace", "state")
    )
    length = metrics.gauge("torpor_queue_jobs", "Jobs that wait in a queue", ("queue",))
    oldest = metrics.gauge(
        "torpor_queue_oldest_timestamp_seconds", "Since when the oldest of them could begin",
        ("queue",),
    )  # fmt: skip
    for job in report.jobs:
        metrics.set(driven, job.driven, job.workspace, job.job)
    for (workspace, state), count in Counter(
        (job.workspace, job.state) for job in report.jobs
    ).items():
        metrics.set(open_jobs, count, workspace, state)
    if fleet.queued is None:
        return
    waiting: dict[str, list[float]] = {queue: [] for queue in fleet.queues}
    for queued in fleet.queued:
        since_unix = max(queued.since_unix, queued.due_unix)
        if since_unix <= report.at_unix:  # a later run waits for its time, and for no slot
            waiting.setdefault(queued.queue, []).append(since_unix)
    for queue, since in waiting.items():
        metrics.set(length, len(since), queue)
        metrics.set(oldest, min(since, default=None), queue)


def _of_money(metrics: _Metrics, fleet: Fleet) -> None:
    """A sum of which a part is unknown is left out: the rest of it, or a 0 for another capacity
    type, would look like the whole."""
    for _, name, says, _ in _COSTS:
        metrics.gauge(name, says, _OF_COST)
    gpus = metrics.gauge("torpor_rented_gpus", "GPUs that are rented now", _OF_COST)
    unknown = metrics.gauge(
        "torpor_cost_unknown",
        "1 where a price or a record that belongs to the cost of a workspace is not known",
        ("workspace", "period"),
    )
    limit = metrics.gauge("torpor_budget_dollars", "What a month may cost", ("budget",))
    spent = metrics.gauge("torpor_budget_spent_dollars", "At most, this month", ("budget",))
    doubtful = metrics.gauge(
        "torpor_budget_unknown", "1 where what a budget has spent is not known", ("budget",)
    )
    money = fleet.money
    if money.at_unix is not None:  # a metric without labels is 0 until it is set
        at = metrics.gauge("torpor_cost_timestamp_seconds", "When costs and budgets were read")
        metrics.set(at, money.at_unix)
    for period, name, _, field in _COSTS:
        without = {one.workspace for one in money.costs if getattr(one, field) is None}
        without |= {*money.unknown}
        for one in money.costs:
            if one.workspace not in without:
                metrics.set(name, getattr(one, field), *_of_cost(one))
        for workspace in sorted(without):
            metrics.set(unknown, 1, workspace, period)
    for one in money.costs:
        if one.workspace not in money.unknown:
            metrics.set(gpus, one.gpus, *_of_cost(one))
    for budget in money.budgets:
        metrics.set(limit, budget.usd_month, budget.budget)
        metrics.set(spent, budget.spent_usd, budget.budget)
        metrics.set(doubtful, None if budget.spent_usd is not None else 1, budget.budget)


def _of_cost(one: WorkspaceCost) -> tuple[str, str, str]:
    return one.project, one.workspace, "spot" if one.spot else "on-demand"


def _of_transfers(metrics: _Metrics, fleet: Fleet) -> None:
    held = metrics.gauge(
        "torpor_snapshot_stored_bytes", "What the store holds of the newest snapshot",
        ("workspace",),
    )  # fmt: skip
    new = metrics.gauge(
        "torpor_snapshot_new_bytes", "What was new in it, uncompressed", ("workspace",)
    )
    fetched = metrics.gauge(
        "torpor_wake_fetched_bytes", "What the newest wake read from the store", ("workspace",)
    )
    took = metrics.gauge("torpor_wake_fetched_seconds", "How long that took", ("workspace",))
    for snapshot in fleet.snapshots:
        metrics.set(held, snapshot.stored_bytes, snapshot.workspace)
        metrics.set(new, snapshot.new_bytes, snapshot.workspace)
    for wake in fleet.money.wakes:
        metrics.set(fetched, wake.bytes, wake.workspace)
        metrics.set(took, wake.seconds, wake.workspace)


def _label(text: str) -> str:
    """A label's value in valid UTF-8, cut to MOST_LABEL. The file's format escapes the rest."""
    return text.encode("utf-8", "replace").decode()[:MOST_LABEL]
