"""Processes of an installation are killed during a job, in an installation of the test's own."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import psutil
import pytest

from deployments import server, supervisor
from deployments.installation import Installation
from deployments.local_machines import running_machines
from deployments.processes import running, started_process
from tests.fixtures.deployed import place_of
from tests.fixtures.own_installation import Alone, kill_all
from tests.fixtures.prefect_api import ask
from tests.fixtures.waiting import until
from torpor.control.own_server import FOLDER_VARIABLE
from torpor.control.store import embedded
from torpor.control.supervision import read_supervision
from torpor.shared.errors import InvalidInput

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


def _see_that_what_is_killed_comes_back(alone: Alone) -> None:
    """The server, the store and a worker; the worker's runs and the machines go on."""
    roles = ["store", "server", "job-worker"]
    (supervisor,) = running(alone.installation, "supervisor")
    machines = [machine.id for machine in running_machines(alone.installation)]
    store = embedded.process_of(alone.installation.store)
    assert store
    begun = [started_process(alone.installation, role) for role in roles[1:]]
    kill_all([psutil.Process(record.pid) for record in (store, *begun) if record])

    def restarted() -> bool:
        seen = read_supervision(alone.installation.folder)
        events = seen.events if seen else []
        return {event.who for event in events if "restarted" in event.what} >= {*roles}

    until(restarted, "server, store and worker were restarted", every_s=0.5)
    assert server.answers(alone.server)
    again = embedded.process_of(alone.installation.store)
    assert again not in (None, store)
    assert [machine.id for machine in running_machines(alone.installation)] == machines
    assert running(alone.installation, "supervisor") == [supervisor]


def test_a_second_supervisor_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = Installation(tmp_path)
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path))
    with (
        made.locked(supervisor.ROLE),
        pytest.raises(InvalidInput, match="another supervisor looks after"),
    ):
        supervisor.main()


def test_a_job_goes_on_when_the_server_is_killed_and_started_again(alone: Alone) -> None:
    alone.up()
    place = place_of(alone.installation, "demo")
    lease = _take_slot(alone)
    run = alone.python(SUBMIT, COMMAND)
    until((place / "begun").exists, "its command was started", every_s=0.2)

    alone.kill("supervisor")
    alone.kill("server")
    assert not server.answers(alone.server)
    ticks = (place / "ticks").stat().st_size
    until(lambda: (place / "ticks").stat().st_size > ticks + 100, "it works on", every_s=0.2)

    _end_lease(alone, lease)
    alone.up()
    until(lambda: _ask(alone, "GET", "one")["active_slots"] == 0, "the slot is free", every_s=0.5)
    continued = alone.python(CONTINUE)
    assert continued["driver"] == run
    assert continued["next"][0].endswith("continued it")
    driver = alone.python(DRIVER, run)
    _see_that_what_is_killed_comes_back(alone)
    (place / "go").touch()
    result = alone.python(RESULT)
    assert (result["state"], result["ends"]) == ("succeeded", ["command ended"])
    assert result["driver"] == driver  # the run outlived its worker
    said = [line for line in result["log"].splitlines() if "torpor:" not in line]
    assert said == ["started", "done"]  # the command was started once
    assert result["machines"] == 0
