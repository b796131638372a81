"""The metrics of `watch`: what nobody knows has no sample, and the file is whole."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from torpor.control.alerts.delivery import Remembered
from torpor.control.metrics import MOST_LABEL, MOST_SERIES, Fleet, registry, write_metrics
from torpor.control.reconciliation import Finding
from torpor.control.watch_report import Watched, WatchedJob, WatchReport
from torpor.shared.errors import InvalidInput
from torpor.shared.values import MachineId, WorkspaceName


def _watched(**changes: Any) -> Watched:
    facts: dict[str, Any] = {
        "workspace": WorkspaceName("a"),
        "kind": "busy",
        "reason": "a GPU above 5 %",
        "next_step": "none",
        "machine": MachineId("m"),
        "provider": "p",
        "since_unix": 1000.0,
        "price_usd_h": 2.5,
        "newest_unix": 500.0,
    }
    return Watched(**facts | changes)


def _report(*watched: Watched) -> WatchReport:
    lost = Finding("residue", None, None)
    jobs = [
        WatchedJob("j", WorkspaceName("a"), "running", True, "none"),
        WatchedJob("k", WorkspaceName("a"), "waiting", False, "continue it"),
    ]
    return WatchReport(2000.0, [*watched], [lost, lost], ["q"], jobs)


def test_a_report_as_metrics() -> None:
    asleep = _watched(workspace=WorkspaceName("b"), kind="off", machine=None)
    of = {"workspace": "a", "machine": "m", "provider": "p"}
    alert = Remembered(
        kind="machine unknown", subject="p m", workspace="a", title="unknown", since_unix=0.0
    )
    found = registry(_report(_watched(), asleep), [alert], Fleet())
    value = found.get_sample_value
    assert value("torpor_machine_verdict", of | {"verdict": "busy"}) == 1
    assert value("torpor_machine_verdict", of | {"verdict": "idle"}) == 0
    assert value("torpor_machine_cost_dollars_per_hour", of) == 2.5
    assert value("torpor_machine_rented_timestamp_seconds", of) == 1000
    assert value("torpor_newest_snapshot_timestamp_seconds", {"workspace": "b"}) == 500
    assert value("torpor_findings", {"kind": "residue"}) == 2
    assert value("torpor_job_driven", {"workspace": "a", "job": "j"}) == 1
    assert value("torpor_job_driven", {"workspace": "a", "job": "k"}) == 0
    assert value("torpor_providers_silent") == 1
    named = {"kind": "machine unknown", "subject": "p m", "workspace": "a"}
    assert value("torpor_alert", named) == 1
    assert value("torpor_watch_timestamp_seconds") == 2000


def test_what_nobody_knows_has_no_sample(tmp_path: Path) -> None:
    path = tmp_path / "new" / "torpor.prom"
    unknown = _watched(price_usd_h=None, since_unix=None, newest_unix=None)
    write_metrics(_report(unknown), [], Fleet(), str(path))
    families = {
        family.name: family.samples for family in text_string_to_metric_families(path.read_text())
    }
    assert families["torpor_machine_cost_dollars_per_hour"] == []
    assert families["torpor_newest_snapshot_timestamp_seconds"] == []
    assert len(families["torpor_machine_verdict"]) == 3
    assert [found.name for found in path.parent.iterdir()] == [path.name]


def test_names_of_markets_are_escaped_and_cut_and_series_are_limited(tmp_path: Path) -> None:
    path = tmp_path / "torpor.prom"
    evil = 'm"} 1\ntorpor_watch_timestamp_seconds 0\n\\\ud800' + "x" * 10_000
    alerts = [
        Remembered(kind="machine lost", subject=f"{n}", workspace="", title="", since_unix=0.0)
        for n in range(MOST_SERIES + 7)
    ]
    watched = _watched(machine=MachineId(evil), price_usd_h=float("nan"), since_unix=-1.0)
    write_metrics(_report(watched), alerts, Fleet(), str(path))
    families = {
        family.name: family.samples for family in text_string_to_metric_families(path.read_text())
    }
    (looked,) = families["torpor_watch_timestamp_seconds"]
    assert looked.value == 2000
    for sample in families["torpor_machine_verdict"]:
        assert sample.labels["machine"] == evil.replace("\ud800", "?")[:MOST_LABEL]
    assert families["torpor_machine_cost_dollars_per_hour"] == []
    assert families["torpor_machine_rented_timestamp_seconds"] == []
    assert len(families["torpor_alert"]) == MOST_SERIES
    assert families["torpor_series_left_out"][0].value == 7


def test_a_file_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(InvalidInput, match=r"torpor\.prom"):
        write_metrics(_report(), [], Fleet(), str(tmp_path / "file" / "torpor.prom"))


def test_the_table_says_what_a_person_wants_to_know() -> None:
    report = _report(_watched(), _watched(workspace=WorkspaceName("b"), price_usd_h=None))
    first, second, forgotten, _ = report.rows()
    assert first["costs"] == "2.50 $/h" and second["costs"] == "unknown"
    assert first["newest snapshot"] == "25 min"
    assert first["jobs"] == "j is running: none; k is waiting: continue it"
    assert (second["jobs"], forgotten["jobs"]) == ("", "")
    assert forgotten["verdict"] == "residue"
    assert report.message() == "2 busy, 2 residue; 2.50 $/h in all; open jobs: 2; no answer from q"
