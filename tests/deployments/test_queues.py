"""Jobs in Prefect's queues, with a real server and a real worker that is killed.

TORPOR_TEST_WAITING=300 has 300 jobs wait instead of 30.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from functools import cache, partial
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest

from blocks import Workspace
from deployments.installation import Installation
from deployments.processes import flow_runs, running
from deployments.server import Server
from flows import (
    cancel_job,
    create,
    job_status,
    jobs,
    list_machines,
    list_snapshots,
    watch,
)
from flows.procedures.job import recovery
from tasks.workspace import OpenWorkspace
from tasks.workspace_blocks import open_workspace
from tests.fixtures.deployed import Deployed, place_of
from tests.fixtures.own_installation import kill_all
from tests.fixtures.prefect_api import ask
from tests.fixtures.records import put_record, read_record
from tests.fixtures.waiting import until
from torpor.control.jobs.records import Job, Jobs, new_job_id
from torpor.control.supervision import children_of
from torpor.shared.values import ObjectKey

pytestmark = pytest.mark.together("automations and make up")

NAME = "queues"
WAITING = int(os.environ.get("TORPOR_TEST_WAITING", "30"))
UNTIL_GO = ["sh", "-c", "echo started; until test -e go; do sleep 0.2; done; echo done"]
POOL = "work_pools/torpor-jobs"


@pytest.fixture
def one_at_once(torpor_up: Server) -> Iterator[None]:
    """The pool runs one job at a time."""
    pool = f"{torpor_up.api_url}/{POOL}"
    usual = ask("GET", pool)["concurrency_limit"]
    assert usual == 8
    ask("PATCH", pool, {"concurrency_limit": 1})
    yield
    ask("PATCH", pool, {"concurrency_limit": usual})


@pytest.fixture
def place(installation: Installation) -> Path:
    """The workspace on its machine."""
    Workspace(name=NAME).save(NAME, overwrite=True)
    create(NAME)
    place = place_of(installation, NAME)
    (place / "notes").write_text("a workspace without a file keeps its machine")
    return place


@cache
def _opened() -> OpenWorkspace:
    """Opened once: each time, its blocks are asked for one by one."""
    return open_workspace(NAME)


def _jobs() -> Jobs:
    return _opened().jobs


def _record(run: str) -> Job:
    return until(lambda: _jobs().of(new_job_id(run)), f"run {run} has begun its job", every_s=0.5)


def _works(run: str) -> bool:
    return "started" in _log(new_job_id(run))


def _log(job: str) -> str:
    log = job_status(NAME, job, lines=200).log
    return log.text if log else ""


def _ended_job() -> str:
    """A run that continues it ends at once."""
    records = _jobs()
    facts: dict[str, Any] = {"workspace": records.workspace, "block": NAME, "command": ["true"]}
    begun = records.take(Job(id="e" * 12, created_unix=0.0, **facts), "a run")
    return records.end(msgspec.structs.replace(begun, state="succeeded")).id


def _silent(run: str) -> None:
    """Nothing was heard of the job's driver for long enough; the test does not wait for that."""
    records = _jobs()
    key = ObjectKey(f"workspaces/{records.workspace}/jobs/open/{new_job_id(run)}")
    store = _opened().store
    record = read_record(store, key)
    put_record(store, key, {**record, "process": "", "driven_unix": 0.0})


def _run(deployed: Deployed, run: str) -> dict[str, Any]:
    (found,) = deployed.ask("flow_runs/filter", {"flow_runs": {"id": {"any_": [run]}}})
    return dict(found)


def _block(server: Server) -> str:
    """The id of the Workspace block, by which a form names it."""
    url = f"{server.api_url}/block_types/slug/workspace/block_documents/name/{NAME}"
    return str(ask("GET", url)["id"])


@pytest.mark.rule(16)
@pytest.mark.usefixtures("one_at_once")
def test_a_worker_that_is_killed_and_a_critical_job_behind_many_low_ones(
    deployed: Deployed,
    installation: Installation,
    torpor_up: Server,
    place: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ended = {"workspace": NAME, "job": _ended_job()}
    first = deployed.start("job", {"workspace": NAME, "command": UNTIL_GO}, "low")
    until(lambda: _record(first).attempts, "its command was started", every_s=0.5)
    until(partial(_works, first), "its command works", every_s=0.5)
    low = [deployed.start("job", ended, "low") for _ in range(WAITING)]
    deployed.take(low[0])  # as a worker does that is lost before it starts it

    killed, *its_runs = sorted(
        running(installation, "job-worker"), key=lambda process: process.create_time()
    )
    (its_run,) = its_runs  # one process, which no signal to the group of its worker reaches
    assert its_run.cmdline()[1:] == ["-m", "prefect.engine"]
    assert os.getsid(its_run.pid) == its_run.pid
    kill_all([killed])  # and restarted by the supervisor, though a run of it is still there
    until(
        lambda: children_of(installation.folder).get("job-worker", killed.pid) != killed.pid,
        "it is restarted",
        every_s=0.5,
    )
    kill_all([its_run])
    assert _run(deployed, first)["state_type"] == "RUNNING"  # Prefect does not know, and waits
    _silent(first)
    monkeypatch.setattr(recovery, "STUCK_S", 0.0)
    (seen,) = watch([NAME], dry_run=False).jobs
    assert seen.next_step.endswith("continued it")
    assert _run(deployed, first)["state_type"] == "CRASHED"
    until(
        lambda: _run(deployed, low[0])["state_type"] != "PENDING",
        "the run that its worker never started waits again, or is started",
        every_s=0.5,
    )
    again = until(
        lambda: record.driver if (record := _record(first)).driven else "",
        "another run drives the job",
        every_s=0.5,
    )
    assert again != first
    critical = deployed.start("job", ended, "critical")
    by_form = {"$ref": {"block_document_id": _block(torpor_up)}}
    late = deployed.start("job", {"workspace": by_form, "command": ["true"]}, "low")
    queued = {job.run: job for job in jobs([NAME]).queued}
    assert queued.keys() | {low[0]} == {critical, late, *low}  # which may have ended by now
    assert (queued[late].workspace, queued[late].queue) == (NAME, "low")
    assert cancel_job(NAME, new_job_id(late)).answer["now"] == "taken out of its queue"
    assert deployed.end(late)["state_type"] == "CANCELLED"

    (place / "go").touch()
    assert deployed.end(again)["state_type"] == "COMPLETED"
    assert deployed.end(critical)["state_type"] == "COMPLETED"
    assert deployed.end(low[0])["state_type"] == "COMPLETED"
    for run in reversed(low):
        if _run(deployed, run)["state_type"] == "SCHEDULED":
            deployed.cancel_waiting(run)
    runs = [_run(deployed, run) for run in (first, again, critical, *low)]
    began = [run for run in runs if run["run_count"]]  # Prefect gives cancelled ones a start too
    order = [run["id"] for run in sorted(began, key=lambda run: str(run["start_time"]))]
    order.remove(low[0])  # a worker had taken it: it may go on before all others
    assert order[:3] == [first, again, critical]
    assert order[3:] == low[1 : len(order) - 2]  # in the order of submission

    record = _record(first)
    assert (record.state, len(record.attempts)) == ("succeeded", 1)
    said = [line for line in _log(record.id).splitlines() if "torpor:" not in line]
    assert said == ["started", "done"]  # the command was started once
    assert list_machines(NAME) == []


def test_a_run_that_is_killed_before_its_job_is_on_record_starts_again(
    deployed: Deployed, installation: Installation, place: Path
) -> None:
    def its_process() -> list[psutil.Process]:
        found = flow_runs(installation, "job-worker")
        return [one for one in found if one.environ().get("PREFECT__FLOW_RUN_ID") == run]

    run = deployed.start("job", {"workspace": NAME, "command": ["touch", "done"]}, "high")
    kill_all(until(its_process, "its process is there", every_s=0.05))
    assert deployed.end(run)["state_type"] == "CRASHED"
    assert _jobs().of(new_job_id(run)) is None

    def is_done() -> bool:
        """A worker says twice that a run crashed. Where it says so again after a watch has put the
        run back, the next watch puts it back again."""
        watch([NAME], dry_run=False)
        deployed.end(run)
        record = _jobs().of(new_job_id(run))
        return record is not None and record.state == "succeeded"

    until(is_done, "the run started again, and its job succeeded")


@pytest.mark.rule(16)
def test_a_job_that_is_cancelled_in_prefect_ends_in_a_hibernated_workspace(
    deployed: Deployed, place: Path
) -> None:
    before = len(list_snapshots(NAME))
    run = deployed.start("job", {"workspace": NAME, "command": UNTIL_GO}, "high")
    until(lambda: _record(run).attempts, "its command was started", every_s=0.5)
    until(partial(_works, run), "its command works", every_s=0.5)
    deployed.cancel(run)
    assert deployed.end(run)["state_type"] == "CANCELLED"
    until(lambda: _record(run).ended, "another run has stopped it", every_s=0.5)
    record = _record(run)
    assert (record.state, record.why) == ("cancelled", "its run was cancelled in Prefect")
    assert len(list_snapshots(NAME)) == before + 1
    assert list_machines(NAME) == []


def test_a_job_is_cancelled_by_its_id(deployed: Deployed, place: Path) -> None:
    run = deployed.start("job", {"workspace": NAME, "command": UNTIL_GO}, "high")
    until(lambda: _record(run).attempts, "its command was started", every_s=0.5)
    said = cancel_job(NAME, new_job_id(run), machine="keep").answer
    assert said["now"] == f"run {run} stops it"
    assert deployed.end(run)["state_type"] == "COMPLETED"
    assert _record(run).state == "cancelled"
    assert len(list_machines(NAME)) == 1
