"""The metrics that `watch` writes of machines, records and queues; each panel and rule finds its
own in the file."""

from __future__ import annotations

import json
import re
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import datetime, timezone
from pathlib import Path
from threading import Event
from typing import Any, Final

import msgspec
import pytest
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from deployments.installation import CHECKOUT
from flows import backup, watch
from tasks import fleet
from tasks.fleet import look_at_fleet
from tasks.plain_runner import PlainRunner
from tasks.runs import JobRun, RunState
from tasks.workspace import OpenWorkspace
from tests.fixtures.activity import sampled
from tests.fixtures.lab import Lab
from tests.fixtures.plain_flows import run_plainly
from tests.fixtures.rentals import handed_over, standing
from tests.fixtures.waiting import PATIENCE_S
from torpor.control.jobs.records import Job, new_job_id
from torpor.control.overview import Overviews
from torpor.machine.sampler.gpu_table import write_gpu_table
from torpor.machine.sampler.ring import boot_clock_s, boot_id
from torpor.machine.supervisor.marker import MARKER
from torpor.shared.errors import StoreUnavailable
from torpor.shared.values import MachineId, ObjectKey, WorkspaceName
from torpor.shared.wire.activity import UNKNOWN, GpuFigures, GpuTable

MONITORING: Final = CHECKOUT / "deployments" / "monitoring"
OTHER: Final = WorkspaceName("other")
COSTS: Final = (
    "torpor_cost_dollars_per_hour",
    "torpor_cost_day_dollars",
    "torpor_cost_month_dollars",
)


class Queued(PlainRunner):
    """Two runs of jobs wait in the queue `high`, one of them since its retry was due, and another
    one begins in an hour; or the server does not say."""

    fault: Exception | None = None
    closed = ""
    """A workspace whose block cannot be opened."""

    def workspaces(self) -> list[str]:
        return [*super().workspaces(), *filter(None, [self.closed])]

    def job_runs(self, *states: RunState, queue: str = "", ended_unix: float = 0.0) -> list[JobRun]:
        if self.fault is not None:
            raise self.fault
        if "waiting" not in states or queue:
            return []
        due = (0.0, 2000.0, time.time() + 3600)
        return [
            JobRun(f"run {n}", "high", "waiting", 0.0, 1500.0 - n, {}, due[n]) for n in range(3)
        ]


def _watch(
    *opened: OpenWorkspace, file: Path, fault: Exception | None = None
) -> dict[str, list[Sample]]:
    """The samples of each metric that a look writes."""
    with Queued(*opened, wait_factor=0.001) as runs:
        runs.fault = fault
        watch.fn(metrics=str(file))
    return _read(file)


def _read(file: Path) -> dict[str, list[Sample]]:
    return {
        family.name: family.samples for family in text_string_to_metric_families(file.read_text())
    }


def _values(found: Mapping[str, Sequence[Sample]], name: str, *labels: str) -> dict[Any, float]:
    """By these labels; the first alone where there is one."""
    keys = [tuple(one.labels[label] for label in labels) for one in found[name]]
    return {
        key[0] if len(key) == 1 else key: one.value
        for key, one in zip(keys, found[name], strict=True)
    }


def _says(lab: Lab, machine: MachineId, *gpus: GpuFigures) -> None:
    """The machine's sampler has written this."""
    home = lab.home(machine) / ".torpor"
    home.mkdir(mode=0o700, exist_ok=True)
    (home / MARKER).touch(mode=0o600)
    sampled(home, gpus=2, gpu=90, cpu=150, network=2048, disk=10)
    write_gpu_table(home, GpuTable(boot_clock_s(), boot_id(), [*gpus]))


BUSY: Final = GpuFigures(90, 70_000, 11_559, 71, 650_000, 120, 2400)


def _installation(lab: Lab) -> list[OpenWorkspace]:
    """A machine that works and has a snapshot, one that was left, a job, and a budget of which
    more than the half is spent."""
    hour = datetime.now(timezone.utc).hour  # no month begins within the hour
    opened = lab.limited(5.0, timezone="Etc/GMT+12" if hour in (0, 23) else "UTC")
    machine, rental = handed_over(opened)
    workspace = lab.workspace(machine.id)
    workspace.mkdir()
    (workspace / "weights.bin").write_bytes(bytes(range(256)) * 100)
    run_plainly(opened, backup)
    _says(lab, machine.id, BUSY, msgspec.structs.replace(BUSY, percent=30, power_mw=UNKNOWN))
    opened.rentals.change(
        rental,
        created_unix=time.time() - 3600,
        project="research",
        fetched_bytes=10**9,
        fetched_s=4.0,
    )
    other = replace(lab.named(OTHER).opened, project="speech", budgets=opened.budgets)
    standing(other)
    job = Job(id=new_job_id("a"), workspace=OTHER, block=OTHER, command=["true"], created_unix=1.0)
    other.jobs.leave(other.jobs.take(job, "gone"), failed=False)
    return [opened, other]


def test_what_machines_records_and_queues_say(lab: Lab, tmp_path: Path) -> None:
    opened, other = _installation(lab)
    found = _watch(opened, other, file=tmp_path / "torpor.prom")
    assert _values(found, "DCGM_FI_DEV_GPU_UTIL", "gpu") == {"0": 90, "1": 30}
    assert _values(found, "DCGM_FI_DEV_FB_FREE", "gpu") == {"0": 11_559, "1": 11_559}
    assert _values(found, "DCGM_FI_DEV_POWER_USAGE", "gpu") == {"0": 650}  # the other says none
    assert _values(found, "DCGM_FI_PROF_PCIE_RX_BYTES", "gpu")["0"] == 2_400_000
    (gpu, _) = found["DCGM_FI_DEV_GPU_TEMP"]
    assert (gpu.labels["workspace"], gpu.labels["modelName"]) == ("demo", "H100 SXM")
    assert _values(found, "torpor_machine_cpu_cores", "workspace") == {"demo": 1.5}
    assert _values(found, "torpor_machine_network_bytes_per_second", "workspace") == {
        "demo": 2048 * 1024
    }
    of = ("project", "workspace", "capacity")
    hourly = _values(found, "torpor_cost_dollars_per_hour", *of)
    assert hourly == {
        ("research", "demo", "on-demand"): 4.0,
        ("research", "demo", "spot"): 0.0,
        ("", "other", "on-demand"): 4.0,  # the record of what was left names no project
        ("speech", "other", "on-demand"): 0.0,
        ("speech", "other", "spot"): 0.0,
    }
    assert _values(found, "torpor_rented_gpus", *of)["research", "demo", "on-demand"] == 2
    spent = _values(found, "torpor_budget_spent_dollars", "budget")["lab"]
    assert 0 < spent < 5 == _values(found, "torpor_budget_dollars", "budget")["lab"]
    assert _values(found, "torpor_queue_jobs", "queue") == {
        **dict.fromkeys(("critical", "normal", "low"), 0),
        "high": 2,
    }
    assert _values(found, "torpor_queue_oldest_timestamp_seconds", "queue") == {"high": 1500}
    assert _values(found, "torpor_open_jobs", "workspace", "state") == {("other", "waiting"): 1}
    assert _values(found, "torpor_wake_fetched_bytes", "workspace") == {"demo": 1e9}
    assert _values(found, "torpor_snapshot_stored_bytes", "workspace")["demo"] > 0
    assert found["torpor_cost_unknown"] == []


@pytest.mark.rule(3)
def test_what_cannot_be_read_is_absent(
    lab: Lab, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = lab.limited(5.0)
    _, rental = handed_over(opened)
    opened.rentals.change(rental, price_usd_h=0.0, project="research")
    other = lab.named(OTHER).opened
    found = _watch(opened, other, file=tmp_path / "torpor.prom", fault=StoreUnavailable("away"))
    for name in COSTS:  # no 0 of another capacity type either: it would look like the whole
        assert {one.labels["workspace"] for one in found[name]} == {OTHER}, name
    assert _values(found, "torpor_cost_unknown", "workspace", "period") == {
        ("demo", period): 1 for period in ("hour", "day", "month")
    }
    assert _values(found, "torpor_budget_unknown", "budget") == {"lab": 1}
    assert _values(found, "torpor_budget_dollars", "budget") == {"lab": 5}
    for name in ("torpor_queue_jobs", "torpor_budget_spent_dollars", "DCGM_FI_DEV_GPU_UTIL"):
        assert found[name] == [], name

    listed = lab.store.list

    def away(prefix: str, *args: Any, **named: Any) -> Any:
        if "/drill--demo" in prefix:  # only the costs are read from there
            raise StoreUnavailable("the store is away")
        return listed(ObjectKey(prefix), *args, **named)

    monkeypatch.setattr(lab.store, "list", away)
    found = _watch(opened, other, file=tmp_path / "other.prom")
    assert {one.labels["workspace"] for one in found["torpor_rented_gpus"]} == {OTHER}
    assert _values(found, "torpor_cost_unknown", "workspace", "period")["demo", "month"] == 1
    assert _values(found, "torpor_budget_unknown", "budget") == {"lab": 1}
    assert len(found["torpor_watch_timestamp_seconds"]) == 1


@pytest.mark.rule(3)
def test_a_workspace_whose_block_cannot_be_opened_has_an_unknown_cost(
    lab: Lab, tmp_path: Path
) -> None:
    opened, file = lab.limited(5.0, workspaces=(), project="research"), tmp_path / "torpor.prom"
    with Queued(opened, wait_factor=0.001) as runs:
        runs.closed = "lost"
        watch.fn(metrics=str(file))
    found = _read(file)
    assert _values(found, "torpor_cost_unknown", "workspace", "period")["lost", "month"] == 1
    assert _values(found, "torpor_cost_month_dollars", "capacity") == {"on-demand": 0, "spot": 0}
    assert _values(found, "torpor_budget_unknown", "budget") == {"lab": 1}  # it may count it


@pytest.mark.rule(3)
def test_a_workspace_whose_block_can_be_opened_again_is_read_at_once(
    lab: Lab, tmp_path: Path
) -> None:
    file, seen = str(tmp_path / "torpor.prom"), Overviews([])
    with Queued(lab.opened):
        assert look_at_fleet({}, ["demo"], seen, file).money.unknown == ["demo"]
        money = look_at_fleet({"demo": lab.opened}, [], seen, file).money
    assert {one.workspace for one in money.costs} == {"demo"}


def _count_requests(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What is asked of the store from now on."""
    asked: list[str] = []

    def counted(name: str) -> None:
        method = getattr(lab.store, name)

        def ask(*args: Any, **named: Any) -> Any:
            asked.append(f"{name} {args[0]}")
            return method(*args, **named)

        monkeypatch.setattr(lab.store, name, ask)

    for name in ("list", "head", "get", "put", "delete"):
        counted(name)
    return asked


def test_costs_are_read_once_in_a_while_whatever_is_rented_and_however_many_budgets_there_are(
    lab: Lab, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened, file = lab.limited(5.0, workspaces=(), project="research"), tmp_path / "torpor.prom"
    (budget,) = opened.budgets()
    asked = _count_requests(lab, monkeypatch)

    def requests(budgets: int, file: Path | None) -> int:
        """Of a look, with so many budgets of the project."""
        asked.clear()
        with Queued(replace(opened, budgets=lambda: [budget] * budgets), wait_factor=0.001):
            watch.fn(metrics=str(file or ""))
        return len(asked)

    def hourly() -> float:
        found = _read(file)
        return sum(_values(found, "torpor_cost_dollars_per_hour", "project", "capacity").values())

    assert requests(1, file) == requests(1, None) + 10  # two listings for each of its names
    handed_over(opened)
    first = _values(_read(file), "torpor_cost_timestamp_seconds")
    requests(1, None)  # notes that it sees the new machine
    assert requests(1, file) == requests(1, None)
    assert (hourly(), _values(_read(file), "torpor_cost_timestamp_seconds")) == (0.0, first)
    monkeypatch.setattr(fleet, "KEPT_S", 0.0)
    reading = requests(0, file) - requests(0, None)
    assert requests(5, file) - requests(5, None) == reading > 10
    assert hourly() == 4.0


def test_a_store_that_does_not_answer_ends_the_reading_of_costs_alone(
    lab: Lab, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    over, listed = Event(), lab.store.list
    answered: list[bool] = []

    def hang(prefix: str) -> Any:
        answered.append(over.wait(PATIENCE_S))
        return listed(prefix)

    monkeypatch.setattr(lab.store, "list", hang)
    monkeypatch.setattr(fleet, "MOST_S", 0.0)
    with Queued(lab.opened):
        seen = look_at_fleet({"demo": lab.opened}, [], Overviews([]), str(tmp_path / "m.prom"))
    assert answered == []  # the look did not wait
    over.set()
    assert (seen.money.costs, seen.money.unknown) == ([], ["demo"])
    assert len(seen.queued or []) == 3


def test_a_look_whose_costs_cannot_be_known_at_all_is_a_look_all_the_same(
    lab: Lab, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> None:
        raise RuntimeError("no folder at all")

    monkeypatch.setattr(fleet, "state_folder", broken)
    found = _watch(lab.opened, file=tmp_path / "torpor.prom")
    assert len(found["torpor_watch_timestamp_seconds"]) == 1
    assert found["torpor_cost_dollars_per_hour"] == []
    assert "torpor_cost_timestamp_seconds" not in found


@pytest.mark.rule(3)
def test_a_hostile_machine_changes_no_metric_but_its_own(lab: Lab, tmp_path: Path) -> None:
    opened = lab.opened
    machine, _ = handed_over(opened)
    absurd = GpuFigures(101, 1 << 50, 1 << 50, 4000, 1 << 50, 1 << 50, 1 << 50)
    _says(lab, machine.id, *[BUSY] * 64)
    file = tmp_path / "torpor.prom"
    assert len(_watch(opened, file=file)["DCGM_FI_DEV_GPU_UTIL"]) == 2  # as were rented
    _says(lab, machine.id, absurd)
    found = _watch(opened, file=file)
    assert [name for name, samples in found.items() if "DCGM" in name and samples] == []
    assert _values(found, "torpor_machine_cpu_cores", "workspace") == {"demo": 1.5}
    home = lab.home(machine.id) / ".torpor"
    write_gpu_table(home, GpuTable(boot_clock_s() - 120, boot_id(), [BUSY]))  # its sampler hangs
    assert _watch(opened, file=file)["DCGM_FI_DEV_GPU_UTIL"] == []
    write_gpu_table(home, GpuTable(boot_clock_s(), "0" * 32, [BUSY]))  # of another boot
    assert _watch(opened, file=file)["DCGM_FI_DEV_GPU_UTIL"] == []


def test_each_panel_and_rule_finds_its_metrics(lab: Lab, tmp_path: Path) -> None:
    """Prometheus itself evaluates the queries of the panels, over a file that `watch` has
    written."""
    prom = tmp_path / "torpor.prom"
    opened = _installation(lab)
    found = _watch(*opened, file=prom)
    _, said = _promtool("check", "metrics", given=prom.read_text())
    assert all("'camelCase'" in line for line in said.splitlines()), said  # DCGM's modelName
    written = [sample for samples in found.values() for sample in samples]
    names = {sample.name for sample in written}
    asked = re.findall(r"\b(?:torpor|DCGM)_\w+", (MONITORING / "alerts.yaml").read_text())
    assert {*asked} - names == {"torpor_cost_unknown"}  # everything is known here
    panels = json.loads((MONITORING / "dashboard.json").read_text())["panels"]
    queries = [target["expr"] for panel in panels for target in panel["targets"]]
    nothing = [query for query in queries if query.startswith("count(count by")]
    _finds(written, [query for query in queries if query not in nothing], nothing, tmp_path)

    doubtful = lab.named("doubtful").opened
    handed = handed_over(doubtful)[1]
    doubtful.rentals.change(handed, price_usd_h=0.0)
    found = _watch(*opened, doubtful, file=tmp_path / "doubtful.prom")
    written = [sample for samples in found.values() for sample in samples]
    assert "torpor_cost_month_dollars" in {sample.name for sample in written}  # of the others
    sums = [
        one for one in queries if "sum" in one and "torpor_cost" in one and "(workspace)" not in one
    ]
    assert len(sums) == 6
    _finds(written, nothing, sums, tmp_path)


def _finds(
    written: Sequence[Sample], queries: Sequence[str], nothing: Sequence[str], folder: Path
) -> None:
    """Each of the queries has an answer over these samples, and ``nothing`` has none."""
    test = {
        "rule_files": [],
        "evaluation_interval": "1m",
        "tests": [
            {
                "interval": "1m",
                "input_series": [
                    {"series": _series(one), "values": f"{one.value:f}x5"} for one in written
                ],
                "promql_expr_test": [
                    {
                        "expr": f"count({query}) > bool 0",
                        "eval_time": "1m",
                        "exp_samples": [{"labels": "{}", "value": 1}],
                    }
                    for query in queries
                ]
                + [{"expr": query, "eval_time": "1m", "exp_samples": []} for query in nothing],
            }
        ],
    }
    file = folder / "queries.yaml"
    file.write_text(json.dumps(test))
    status, said = _promtool("test", "rules", str(file))
    assert status == 0, said


def _promtool(*words: str, given: str = "") -> tuple[int, str]:
    done = subprocess.run(
        ["promtool", *words],
        input=given,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    return done.returncode, done.stdout + done.stderr


def _series(sample: Sample) -> str:
    labels = ",".join(f"{name}={json.dumps(value)}" for name, value in sample.labels.items())
    return f"{sample.name}{{{labels}}}"
