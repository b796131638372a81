"""Listing, showing and cancelling jobs, over records in memory and queues of the test's own."""

from __future__ import annotations

import time
from importlib import import_module
from typing import Any

import msgspec
import pytest

from flows import cancel_job, job_status, jobs
from tasks.plain_runner import PlainRunner
from tasks.runs import JobRun, RunState
from tasks.workspace import OpenWorkspace
from tests.fixtures.driver import attempt_on
from tests.fixtures.lab import DEMO, Lab
from tests.fixtures.rentals import standing
from torpor.control.jobs import listing
from torpor.control.jobs.records import Job, Jobs, Stop, new_job_id
from torpor.shared.errors import InvalidInput, StoreDenied

RUN = "0f8fad5b-d9cb-469f-a165-70867728950e"
DRIVER = "7c9e6679-7425-40de-944b-e07fc1f90ae7"
OTHER = "16fd2706-8baf-433b-82eb-8c7fada847da"


class Queues(PlainRunner):
    """Runs of these parameters wait in the queue `low`; what is started or cancelled is kept."""

    def __init__(self, opened: OpenWorkspace, **waiting: dict[str, Any]) -> None:
        super().__init__(opened)
        self._waiting = waiting
        self.states: dict[str, RunState] = {}
        self.started: list[dict[str, Any]] = []
        self.cancelled: list[str] = []
        self.tables: dict[str, Any] = {}

    def job_runs(self, *states: RunState, queue: str = "", ended_unix: float = 0.0) -> list[JobRun]:
        assert states[:2] == ("waiting", "taken")
        waiting = self._waiting.items()
        return [JobRun(run, "low", "waiting", 6.0, 5.0, given) for run, given in waiting]

    def start(self, flow: Any, key: str, *, queue: str = "", **parameters: Any) -> str:
        self.started.append({"flow": flow.name, "queue": queue, **parameters})
        return "run again"

    def state(self, run: str) -> RunState:
        return self.states.get(run, "running")

    def cancel(self, run: str) -> None:
        self.cancelled.append(run)

    def table(self, key: str, rows: Any, description: str) -> None:
        self.tables[key] = rows


def _job(lab: Lab, number: int, **changes: Any) -> Job:
    """An open job that was begun `number` seconds after 1970."""
    facts: dict[str, Any] = {
        "id": f"{number:012x}",
        "workspace": DEMO,
        "block": "demo",
        "command": ["python", "train.py"],
        "created_unix": float(number),
    }
    jobs = lab.opened.jobs
    return jobs.take(Job(**facts | changes), DRIVER)


def _ended(lab: Lab, number: int) -> Job:
    begun = _job(lab, number)
    return lab.opened.jobs.end(msgspec.structs.replace(begun, state="succeeded", why="status 0"))


def test_jobs_are_listed_the_newest_first_with_those_in_queues(
    lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in (1, 2, 3):
        _ended(lab, number)
    _job(lab, 10)
    left = _job(lab, 11)
    lab.opened.jobs.leave(left)
    waiting = {"workspace": DEMO, "command": ["sleep", "9" * 200]}
    runs = {RUN: waiting, "another": {"workspace": DEMO, "job": left.id}}
    with Queues(lab.opened, **runs) as queues:
        found = jobs.fn(ended=2)
    assert [one.id for one in found.open] == [f"{10:012x}", left.id]
    assert len(found.ended) == 2
    rows = queues.tables["jobs"]
    assert [row["job"] for row in rows][:3] == [left.id, f"{10:012x}", new_job_id(RUN)]
    assert [row["state"] for row in rows] == [
        "waiting, its run waits in low",
        "waiting",
        "queued in low",
        "succeeded",
        "succeeded",
    ]
    assert rows[2]["command"].startswith("sleep 999") and len(rows[2]["command"]) < 130
    monkeypatch.setattr(listing, "MOST_ROWS", 1)
    assert found.rows()[-1]["job"] == "and 4 more"


def test_one_workspace_that_cannot_be_read_leaves_the_others(lab: Lab) -> None:
    _job(lab, 10)
    with Queues(lab.opened):
        found = jobs.fn(workspaces=["nowhere", DEMO])
    assert [one.id for one in found.open] == [f"{10:012x}"]
    assert "was not given to" in found.unread["nowhere"]
    with Queues(lab.opened):
        assert jobs.fn(workspaces=["nowhere"]).rows()[0]["workspace"] == "nowhere"
    lab.store.fails = StoreDenied("the key is refused")
    with Queues(lab.opened):
        assert "the key is refused" in jobs.fn(workspaces=[DEMO]).unread[DEMO]


def test_a_status_says_who_drives_the_job_and_what_was_asked(lab: Lab) -> None:
    open_job = _job(lab, 10, why="nothing is on sale")
    lab.opened.jobs.ask_stop(open_job.id, Stop("over budget", "hibernate", "it costs", 60.0))
    with Queues(lab.opened):
        said = job_status.fn(DEMO, f" {open_job.id} ").answer
    assert said["outcome"] == "waiting: nothing is on sale"
    assert said["driven by"] == f"run {DRIVER}"
    assert said["asked to stop"] == "1970-01-01 00:01 UTC: it costs"
    assert said["log"] == f"~/workspace/.torpor-jobs/{open_job.id}.log"
    lab.opened.jobs.leave(open_job)
    with Queues(lab.opened):
        assert "nobody" in job_status.fn(DEMO, open_job.id).answer["driven by"]
    with Queues(lab.opened, **{RUN: {"workspace": DEMO, "command": ["a"]}}):
        said = job_status.fn(DEMO, new_job_id(RUN)).answer
    assert said["outcome"] == "not begun"
    assert "waits in low since 1970" in said["queue"]
    with Queues(lab.opened), pytest.raises(InvalidInput, match=f"has no job {new_job_id(RUN)}"):
        job_status.fn(DEMO, new_job_id(RUN))


def test_a_job_without_machine_and_snapshot_has_no_log(lab: Lab) -> None:
    begun = _job(lab, 10)
    with Queues(lab.opened):
        log = job_status.fn(DEMO, begun.id).log
    assert log is not None and (log.text, "nowhere" in log.source) == ("", True)
    with Queues(lab.opened, **{RUN: {"workspace": DEMO}}):
        waits = job_status.fn(DEMO, new_job_id(RUN))
        assert waits.log is not None and "has not begun" in waits.log.source
        assert job_status.fn(DEMO, new_job_id(RUN), lines=0).log is None


def test_a_log_that_cannot_be_read_leaves_the_status(
    lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun = _job(lab, 10)

    def fails(*_: object) -> None:
        raise StoreDenied("the key is refused")

    monkeypatch.setattr(import_module("flows.job_status"), "read_log", fails)
    with Queues(lab.opened) as queues, pytest.raises(StoreDenied, match="the key is refused"):
        job_status.fn(DEMO, begun.id)
    (shown,) = queues.tables.values()
    assert {"what": "driven by", "value": f"run {DRIVER}"} in shown


def test_a_job_in_a_queue_is_taken_out_of_it(lab: Lab) -> None:
    waiting = {RUN: {"workspace": DEMO}, OTHER: {"workspace": "other"}}
    with Queues(lab.opened, **waiting) as queues:
        assert cancel_job.fn(DEMO, new_job_id(RUN)).answer["now"] == "taken out of its queue"
        with pytest.raises(InvalidInput, match="has no job"):  # it is another workspace's
            cancel_job.fn(DEMO, new_job_id(OTHER))
    assert (queues.cancelled, queues.started) == ([RUN], [])
    assert lab.opened.jobs.open() == []


@pytest.mark.parametrize(
    ("machine", "on_cancel", "then"),
    [
        ("as submitted", "hibernate", "hibernate"),
        ("as submitted", "keep", "keep"),
        ("keep", "hibernate", "keep"),
        ("hibernate", "keep", "hibernate"),
    ],
)
def test_the_run_that_drives_a_job_is_asked_to_stop_it(
    lab: Lab, machine: Any, on_cancel: str, then: str
) -> None:
    begun = _job(lab, 10, on_cancel=on_cancel)
    with Queues(lab.opened) as queues:
        said = cancel_job.fn(DEMO, begun.id, machine=machine).answer
    assert said["now"] == f"run {DRIVER} stops it"
    stop = lab.opened.jobs.stop_asked(begun.id)
    assert stop is not None
    assert (stop.state, stop.then) == ("cancelled", then)
    assert abs(stop.asked_unix - time.time()) < 600
    assert queues.started == []


def test_a_job_that_nobody_drives_is_stopped_by_a_new_run(lab: Lab) -> None:
    begun = _job(lab, 10)
    lab.opened.jobs.leave(begun)
    with Queues(lab.opened) as queues:
        assert cancel_job.fn(DEMO, begun.id).answer["now"] == "run again stops it"
    again = {"flow": "job", "queue": "critical", "workspace": "demo", "job": begun.id}
    assert queues.started == [again]
    waits = Queues(lab.opened, **{RUN: {"workspace": DEMO, "job": begun.id}})
    with waits as queues:
        assert f"run {RUN} in queue low stops it" in cancel_job.fn(DEMO, begun.id).answer["now"]
    assert queues.started == queues.cancelled == []


@pytest.mark.parametrize("state", ["cancelled", "ended"])
def test_a_run_that_is_dead_is_not_said_to_stop_a_job(lab: Lab, state: RunState) -> None:
    """It was cancelled or killed, and its last word in the record is seconds old."""
    begun = _job(lab, 10)
    with Queues(lab.opened) as queues:
        queues.states[DRIVER] = state
        assert cancel_job.fn(DEMO, begun.id).answer["now"] == "run again stops it"
    assert [run["job"] for run in queues.started] == [begun.id]


def test_a_retry_that_waits_is_taken_out_of_its_queue(lab: Lab) -> None:
    """Its earlier job has ended."""
    failed = lab.opened.jobs.end(
        msgspec.structs.replace(_job(lab, 1, id=new_job_id(RUN)), state="failed")
    )
    with Queues(lab.opened, **{RUN: {"workspace": DEMO}}) as queues:
        assert cancel_job.fn(DEMO, failed.id).answer["now"] == "taken out of its queue"
    assert queues.cancelled == [RUN]


def test_a_status_names_the_machine_of_a_job_while_it_is_woken_and_when_its_command_has_ended(
    lab: Lab,
) -> None:
    machine, rental = standing(lab.opened)
    rental = lab.opened.rentals.change(rental, job=f"{10:012x}")
    begun = _job(lab, 10)
    with Queues(lab.opened):
        said = job_status.fn(DEMO, begun.id).answer
    assert said["runs on"] == f"{machine.id} at {machine.provider}, standing"
    assert said["outcome"] == "waiting"
    ended = attempt_on(machine, rental, end="command ended", status=0)
    lab.opened.jobs.keep(msgspec.structs.replace(begun, attempts=[ended], state="hibernating"))
    with Queues(lab.opened) as queues:
        jobs.fn()
    assert queues.tables["jobs"][0]["runs on"] == f"{machine.id} at {machine.provider}"


def test_a_job_that_has_ended_is_not_cancelled(lab: Lab) -> None:
    ended = _ended(lab, 1)
    with Queues(lab.opened), pytest.raises(InvalidInput, match="is succeeded already"):
        cancel_job.fn(DEMO, ended.id)
    assert lab.opened.jobs.stop_asked(ended.id) is None


def test_a_job_that_ends_meanwhile_leaves_no_request_behind(
    lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun = _job(lab, 10)
    over = msgspec.structs.replace(begun, state="succeeded")

    def late(jobs: Jobs, job: str, stop: Stop) -> None:
        jobs.end(over)
        asked(jobs, job, stop)

    asked = Jobs.ask_stop
    monkeypatch.setattr(Jobs, "ask_stop", late)
    with Queues(lab.opened), pytest.raises(InvalidInput, match="already"):
        cancel_job.fn(DEMO, begun.id)
    assert lab.opened.jobs.stop_asked(begun.id) is None
