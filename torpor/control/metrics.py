"""What `watch` found, for Prometheus: a text file that node_exporter's textfile collector reads."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Final

from prometheus_client import CollectorRegistry, Gauge, write_to_textfile

from torpor.control.alerts.delivery import Remembered
from torpor.control.watch_report import WatchReport
from torpor.shared.errors import InvalidInput

VERDICTS: Final = ("busy", "idle", "unknown")
_OF_MACHINE: Final = ("workspace", "machine", "provider")


def registry(report: WatchReport, alerts: Sequence[Remembered]) -> CollectorRegistry:
    """The report as metrics, and the ``alerts`` that people are to hear of. What nobody knows has
    no sample: it is not 0."""
    found = CollectorRegistry()
    looked = Gauge("torpor_watch_timestamp_seconds", "When watch last looked", registry=found)
    verdict = Gauge(
        "torpor_machine_verdict",
        "1 for the verdict on a workspace's machine",
        (*_OF_MACHINE, "verdict"),
        registry=found,
    )
    cost = Gauge("torpor_machine_cost_dollars_per_hour", "Its price", _OF_MACHINE, registry=found)
    since = Gauge(
        "torpor_machine_rented_timestamp_seconds", "When it was asked for", _OF_MACHINE,
        registry=found,
    )  # fmt: skip
    snapshot = Gauge(
        "torpor_newest_snapshot_timestamp_seconds",
        "When the newest snapshot was made",
        ("workspace",),
        registry=found,
    )
    forgotten = Gauge(
        "torpor_findings", "Machines, rentals and leftovers, as reconcile names them", ("kind",),
        registry=found,
    )  # fmt: skip
    driven = Gauge(
        "torpor_job_driven", "1 while a flow run works on a job that has not ended",
        ("workspace", "job"), registry=found,
    )  # fmt: skip
    silent = Gauge("torpor_providers_silent", "Providers that did not answer", registry=found)
    alert = Gauge(
        "torpor_alert", "1 for each alert that people are to hear of",
        ("kind", "subject", "workspace"), registry=found,
    )  # fmt: skip
    looked.set(report.at_unix)
    silent.set(len(report.silent))
    for entry in report.watched:
        if entry.newest_unix is not None:
            snapshot.labels(entry.workspace).set(entry.newest_unix)
        if entry.machine is None:
            continue
        machine = (entry.workspace, entry.machine, entry.provider)
        for kind in VERDICTS:
            verdict.labels(*machine, kind).set(kind == entry.kind)
        if entry.price_usd_h is not None:
            cost.labels(*machine).set(entry.price_usd_h)
        if entry.since_unix is not None:
            since.labels(*machine).set(entry.since_unix)
    for job in report.jobs:
        driven.labels(job.workspace, job.job).set(job.driven)
    for finding in report.findings:
        forgotten.labels(finding.kind).inc()
    for one in alerts:
        alert.labels(one.kind, one.subject, one.workspace).set(1)
    return found


def write_metrics(report: WatchReport, alerts: Sequence[Remembered], path: str) -> None:
    """Write the file whole or not at all; a reader never sees half of it."""
    folder = os.path.dirname(os.path.abspath(path))
    try:
        os.makedirs(folder, exist_ok=True)
        write_to_textfile(path, registry(report, alerts))
    except OSError as error:
        raise InvalidInput(
            f"the metrics cannot be written to {path}: {error.strerror}. Name a file that this "
            "worker may write"
        ) from None
