"""Processes of an installation are killed during a job, in an installation of the test's own."""

from __future__ import annotations

import json
from typing import Any

import psutil
import pytest

from deployments import server
from deployments.local_machines import running_machines
from deployments.processes import flow_runs
from tests.fixtures.deployed import place_of
from tests.fixtures.own_installation import Alone, kill_all
from tests.fixtures.prefect_api import ask
from tests.fixtures.waiting import until
from torpor.control.processes import is_running
from torpor.control.supervision import children_of, living

WORK = "until test -e go; do date >> ticks; sleep 0.1; done"
COMMAND = f"echo started; touch begun; {WORK}; echo done"

SUBMIT = """
from prefect.deployments import run_deployment
given = {"workspace": "demo", "command": ["sh", "-c", sys.argv[1]]}
say(str(run_deployment("job/job", parameters=given, timeout=0).id))
"""
CONTINUE = """
from flows import watch
from tasks.workspace_blocks import open_workspace
opened = open_workspace("demo")
(job,) = opened.jobs.open()
key = f"workspaces/demo/jobs/open/{job.id}"
record = json.loads(opened.store.signer.check(key, opened.store.get(key, max_bytes=1 << 20)))
record |= {"process": "", "driven_unix": 0.0}  # as if its run had been silent for long enough
opened.store.put(key, opened.store.signer.sign(key, json.dumps(record).encode()))
say({"driver": job.driver, "next": [job.next_step for job in watch(["demo"], dry_run=False).jobs]})
"""
DRIVER = """
import time
from tasks.workspace_blocks import open_workspace
jobs = open_workspace("demo").jobs
while jobs.open()[0].driver == sys.argv[1]:
    time.sleep(0.5)
say(jobs.open()[0].driver)
"""
RESULT = """
import time
from flows import job_status, list_machines
from tasks.workspace_blocks import open_workspace
jobs = open_workspace("demo").jobs
while jobs.open():
    time.sleep(0.5)
(job,) = jobs.ended()
say({"state": job.state, "ends": [attempt.end for attempt in job.attempts], "driver": job.driver,
     "log": job_status("demo", job.id, lines=200).log.text,
     "machines": len(list_machines("demo"))})
"""


def _ask(alone: Alone, method: str, path: str, body: dict[str, Any] | None = None) -> Any:
    url = f"{alone.server.api_url}/v2/concurrency_limits/{path}"
    return ask(method, url, body, by=alone.server.login)


def _take_slot(alone: Alone) -> str:
    """Take the only slot of a limit for an hour; returns the lease."""
    _ask(alone, "POST", "", {"name": "one", "limit": 1})
    wanted = {"names": ["one"], "slots": 1, "mode": "concurrency", "lease_duration": 3600}
    return str(_ask(alone, "POST", "increment-with-lease", wanted)["lease_id"])


def _end_lease(alone: Alone, lease: str) -> None:
    """As if its hour were over."""
    folder, over = alone.installation.prefect_home / "concurrency_leases", "2020-01-01T00:00:00Z"
    file, index = folder / f"{lease}.json", folder / "expirations.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "expiration": over}))
    index.write_text(json.dumps({**json.loads(index.read_text()), lease: over}))


def _runs(alone: Alone, run: str) -> list[psutil.Process]:
    """The processes of that flow run."""
    found = flow_runs(alone.installation, "job-worker")
    return [one for one in found if one.environ().get("PREFECT__FLOW_RUN_ID") == run]


def _see_that_each_child_comes_back(alone: Alone) -> None:
    """The supervisor, the other children, the worker's runs and the machines go on."""
    folder = alone.installation.folder
    pid, machines = _pid(alone), _machines(alone)
    for role in ("store", "server", "worker", "job-worker"):
        before = children_of(folder)
        kill_all([psutil.Process(before[role])])

        def restarted(role: str = role, before: dict[str, int] = before) -> bool:
            now = children_of(folder)
            return role in now and now == before | {role: now[role]} != before

        until(restarted, f"the {role} alone was restarted", every_s=0.2)
        if role == "server":
            assert server.answers(alone.server)
    assert _pid(alone) == pid
    assert _machines(alone) == machines


def _pid(alone: Alone) -> int:
    found = living(alone.installation.folder)
    assert found
    return found.pid


def _machines(alone: Alone) -> list[str]:
    return [machine.id for machine in running_machines(alone.installation)]


def _kill_the_parent(alone: Alone, *roles: str) -> None:
    """And these children in the same moment. All of them end, and nothing else."""
    machines, children = _machines(alone), children_of(alone.installation.folder)
    assert children.keys() == {"store", "server", "worker", "job-worker"}
    processes = {role: psutil.Process(pid) for role, pid in children.items()}
    kill_all([psutil.Process(_pid(alone)), *(processes[role] for role in roles)])
    until(lambda: not any(map(is_running, processes.values())), "all have ended", every_s=0.05)
    assert not server.answers(alone.server)
    assert _machines(alone) == machines


@pytest.mark.rule(16, 20)
def test_a_job_goes_on_when_each_process_is_killed_and_started_again(alone: Alone) -> None:
    alone.up()
    place = place_of(alone.installation, "demo")
    lease = _take_slot(alone)
    run = alone.python(SUBMIT, COMMAND)
    until((place / "begun").exists, "its command was started", every_s=0.2)
    its_run = _runs(alone, run)

    _kill_the_parent(alone)
    ticks = (place / "ticks").stat().st_size
    until(lambda: (place / "ticks").stat().st_size > ticks + 100, "it works on", every_s=0.2)
    assert its_run and _runs(alone, run) == its_run

    _end_lease(alone, lease)
    alone.up()
    until(lambda: _ask(alone, "GET", "one")["active_slots"] == 0, "the slot is free", every_s=0.5)
    _see_that_each_child_comes_back(alone)
    _kill_the_parent(alone, "store", "server", "worker", "job-worker")
    alone.up()
    assert _runs(alone, run) == its_run  # it outlived two supervisors and three workers

    continued = alone.python(CONTINUE)
    assert continued["driver"] == run
    assert continued["next"][0].endswith("continued it")
    driver = alone.python(DRIVER, run)
    (place / "go").touch()
    result = alone.python(RESULT)
    assert (result["state"], result["ends"]) == ("succeeded", ["command ended"])
    assert result["driver"] == driver
    said = [line for line in result["log"].splitlines() if "torpor:" not in line]
    assert said == ["started", "done"]  # the command was started once
    assert result["machines"] == 0
