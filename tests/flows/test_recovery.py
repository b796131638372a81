"""`watch` continues jobs whose run has gone: records in memory, runs of the test's own."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import msgspec
import pytest

from flows import watch
from flows.procedures.job.recovery import STUCK_S
from tasks.plain_runner import PlainRunner
from tasks.runs import JobRun, RunState
from tasks.workspace import OpenWorkspace
from tests.fixtures.lab import DEMO, Lab
from tests.fixtures.records import put_record
from torpor.control.jobs.policy import wait_s
from torpor.control.jobs.records import LOST_S, Job, Stop, new_job_id
from torpor.control.watch_report import WatchedJob, WatchReport
from torpor.shared.errors import RecordRefused, StoreUnavailable
from torpor.shared.values import ObjectKey, WorkspaceName

DRIVER = "7c9e6679-7425-40de-944b-e07fc1f90ae7"
RUN = "0f8fad5b-d9cb-469f-a165-70867728950e"


class Prefect(PlainRunner):
    """``states`` of runs that drove jobs, and ``open`` runs; what watch does is kept in order."""

    def __init__(
        self, *opened: OpenWorkspace, states: dict[str, RunState], open: list[JobRun]
    ) -> None:
        super().__init__(*opened, wait_factor=0.01, on_event=self._hear)
        self.events: list[dict[str, Any]] = []
        self._states = states
        self._open = open
        self.did: list[tuple[str, ...]] = []
        self.keys: list[str] = []
        self.since: list[float] = []

    def _hear(self, event: dict[str, Any]) -> None:
        self.events.append(event)

    def job_runs(self, *states: RunState, queue: str = "", ended_unix: float = 0.0) -> list[JobRun]:
        mine = [one for one in self._open if one.state in states and queue in ("", one.queue)]
        return [one for one in mine if one.state_unix >= ended_unix]

    def state(self, run: str) -> RunState:
        return self._states.get(run, "unknown")

    def give_up(self, run: str, seen: RunState, why: str) -> None:
        self.did.append(("give up", run, seen))

    def put_back(self, run: str, since_unix: float = 0.0) -> bool:
        self.did.append(("put back", run))
        self.since.append(since_unix)
        return run != "slow"

    def start(self, flow: Any, key: str, *, queue: str = "", **parameters: Any) -> str:
        self.did.append(("start", queue, parameters["workspace"], parameters.get("job", "")))
        self.keys.append(key)
        return "run again"


def _watch(
    *opened: OpenWorkspace,
    driver: RunState = "unknown",
    runs: tuple[JobRun, ...] = (),
    dry_run: bool = False,
) -> tuple[WatchReport, Prefect]:
    with Prefect(*opened, states={DRIVER: driver}, open=[*runs]) as prefect:
        return watch.fn(dry_run=dry_run), prefect


def _job(opened: OpenWorkspace, silent_s: float = 0.0, **changes: Any) -> Job:
    """A job whose run said so long ago that it drives it."""
    facts: dict[str, Any] = {
        "id": new_job_id(DRIVER),
        "workspace": opened.spec.name,
        "block": "a-block",
        "command": ["python", "train.py"],
        "created_unix": time.time() - 5000,
        "state": "running",
    }
    job = opened.jobs.take(Job(**facts | changes), DRIVER)
    job = msgspec.structs.replace(job, driven_unix=time.time() - silent_s)
    return _put(opened, job)


def _put(opened: OpenWorkspace, job: Job) -> Job:
    key = ObjectKey(f"workspaces/{job.workspace}/jobs/open/{job.id}")
    put_record(opened.store, key, job)
    return job


def _only(report: WatchReport) -> WatchedJob:
    (job,) = report.jobs
    return job


def test_a_job_that_is_driven_is_left_alone(lab: Lab) -> None:
    _job(lab.opened)
    report, prefect = _watch(lab.opened, driver="running")
    assert prefect.did == []
    assert _only(report).driven
    assert _only(report).next_step == "none: a run drives it"
    (row,) = report.rows()
    assert row["jobs"].startswith(f"{new_job_id(DRIVER)} is running: none")
    assert row["next step"] == "none: it has a job"
    assert "; open jobs: 1" in report.message()


@pytest.mark.rule(16)
@pytest.mark.parametrize(
    ("driver", "given_up"),
    [("running", True), ("ended", False), ("unknown", False)],
)
def test_a_job_whose_run_is_silent_is_continued_once_and_its_slot_is_freed(
    lab: Lab, driver: RunState, given_up: bool
) -> None:
    job = _job(lab.opened, LOST_S + 1)
    report, prefect = _watch(lab.opened, driver=driver)
    again, other = _watch(lab.opened, driver=driver)
    started = ("start", "critical", "a-block", job.id)
    assert prefect.did == [started, *([("give up", DRIVER, driver)] if given_up else [])]
    assert _only(report).next_step == "run again continued it"
    assert not _only(report).driven
    # Prefect starts one run for both, whatever the clock says: no five minutes begin between them.
    assert prefect.keys == other.keys == [f"continue-{job.id}-{job.version}-0"]
    assert lab.opened.jobs.stop_asked(job.id) is None
    assert again.jobs == report.jobs


@pytest.mark.rule(16)
def test_a_run_that_is_cancelled_cancels_its_own_job_and_not_the_one_that_it_drives_meanwhile(
    lab: Lab,
) -> None:
    """Its job waits for its turn behind one that had no run."""
    job = _job(lab.opened, LOST_S + 1)
    _put(lab.opened, msgspec.structs.replace(job, driven_for="f" * 12))
    report, prefect = _watch(lab.opened, driver="cancelled")
    assert lab.opened.jobs.stop_asked(job.id) is None
    assert ("start", "critical", "a-block", job.id) in prefect.did
    assert _only(report).next_step == "run again continued it"


def test_a_run_that_has_just_ended_is_given_time_to_be_the_last_one(lab: Lab) -> None:
    """Its process may still be ending."""
    _job(lab.opened)
    report, prefect = _watch(lab.opened, driver="ended")
    assert prefect.did == []
    assert _only(report).next_step == "its run has gone: another one continues it soon"


def test_a_job_whose_run_failed_is_continued_later_each_time_and_told_of(lab: Lab) -> None:
    job = _job(lab.opened)
    for _ in range(3):
        job = lab.opened.jobs.take(job, DRIVER)
        lab.opened.jobs.leave(msgspec.structs.replace(job, why="the key was revoked"))
        (job,) = lab.opened.jobs.open()
    report, prefect = _watch(lab.opened, driver="ended")
    assert prefect.did == []
    assert _only(report).next_step.startswith("3 runs have failed: it is tried again 20")
    _put(lab.opened, msgspec.structs.replace(job, driven_unix=time.time() - wait_s(3) + 30))
    assert _watch(lab.opened, driver="ended")[1].did == []
    _put(lab.opened, msgspec.structs.replace(job, driven_unix=time.time() - wait_s(3) - 1))
    _, prefect = _watch(lab.opened, driver="ended")
    assert [one[0] for one in prefect.did] == ["start"]
    (told,) = prefect.events
    assert told["payload"]["kind"] == "job failing"
    assert "3 of its runs have failed in a row: the key was revoked" in told["payload"]["message"]


def test_a_dry_run_only_reports(lab: Lab) -> None:
    job = _job(lab.opened, LOST_S + 1)
    stuck = JobRun(RUN, "low", "taken", time.time() - STUCK_S - 1, 0.0, {"workspace": DEMO})
    report, prefect = _watch(lab.opened, driver="cancelled", runs=(stuck,), dry_run=True)
    assert prefect.did == []
    assert _only(report).next_step == "continue it: this was a dry run"
    assert lab.opened.jobs.stop_asked(job.id) is None


@pytest.mark.rule(16)
def test_a_job_whose_run_was_cancelled_is_continued_to_be_stopped(lab: Lab) -> None:
    job = _job(lab.opened, on_cancel="keep")
    _, prefect = _watch(lab.opened, driver="cancelled")
    stop = lab.opened.jobs.stop_asked(job.id)
    assert stop is not None
    assert (stop.state, stop.then) == ("cancelled", "keep")
    assert prefect.did == []  # its process may still be ending
    job = _job(lab.opened, LOST_S + 1, on_cancel="keep")
    _, prefect = _watch(lab.opened, driver="cancelled")
    assert prefect.did == [
        ("start", "critical", "a-block", job.id),
        ("give up", DRIVER, "cancelled"),
    ]
    assert lab.opened.jobs.stop_asked(job.id) == stop


def test_a_stop_that_was_asked_before_stays(lab: Lab) -> None:
    job = _job(lab.opened)
    asked = Stop("over budget", "hibernate", "it costs", 60.0)
    lab.opened.jobs.ask_stop(job.id, asked)
    _watch(lab.opened, driver="cancelled")
    assert lab.opened.jobs.stop_asked(job.id) == asked


def test_a_run_that_has_just_begun_to_continue_a_job_is_given_time(lab: Lab) -> None:
    """It waits for the driver that is silent, before the job's record names it."""
    job = _job(lab.opened, LOST_S + 1)
    for begun_s, started in ((0.0, False), (LOST_S + 1, True)):
        begun_unix = time.time() - begun_s
        begun = JobRun(RUN, "critical", "running", begun_unix, 0.0, {"job": job.id})
        _, prefect = _watch(lab.opened, driver="ended", runs=(begun,))
        assert bool(prefect.keys) == started


def test_a_run_that_waits_in_a_queue_continues_the_job(lab: Lab) -> None:
    job = _job(lab.opened, LOST_S + 1)
    waits = JobRun(RUN, "critical", "waiting", 0.0, 0.0, {"workspace": DEMO, "job": job.id})
    report, prefect = _watch(lab.opened, driver="ended", runs=(waits,))
    assert prefect.did == []
    assert _only(report).next_step == f"run {RUN} in queue critical continues it"
    _, prefect = _watch(lab.opened, driver="running", runs=(waits,))
    assert prefect.did == [("give up", DRIVER, "running")]  # as it was not done when that started
    report, prefect = _watch(lab.opened, driver="waiting")  # a person retries it in the UI
    assert prefect.did == []
    assert _only(report).next_step == "its own run waits in its queue"


def test_a_job_whose_turn_has_not_come_needs_no_run_unless_it_is_stopped(lab: Lab) -> None:
    first = _job(lab.opened)
    early = time.time() - 4000
    later = _job(lab.opened, LOST_S + 1, id="a" * 12, created_unix=early, state="waiting")
    report, prefect = _watch(lab.opened, driver="ended")
    assert prefect.did == []
    assert report.jobs[1].next_step == f"none: job {first.id} of this workspace comes first"
    lab.opened.jobs.ask_stop(later.id, Stop("cancelled", "hibernate", "enough", 60.0))
    _, prefect = _watch(lab.opened, driver="ended")
    assert prefect.did == [("start", "critical", "a-block", later.id)]


@pytest.mark.rule("H17")
def test_one_forged_request_to_stop_a_job_is_that_jobs_trouble_alone(lab: Lab) -> None:
    """Whoever writes in the bucket ended every look of watch by it, at all workspaces."""
    first = _job(lab.opened, LOST_S + 1)
    later = _job(lab.opened, LOST_S + 1, id="a" * 12, state="waiting", created_unix=time.time())
    key = ObjectKey(f"workspaces/demo/jobs/stop/{later.id}")
    lab.store.put(key, msgspec.json.encode(Stop("cancelled", "hibernate", "forged", 60.0)))
    dry, _ = _watch(lab.opened, driver="ended", dry_run=True)
    assert str(key) in dry.jobs[1].next_step
    prefect = Prefect(lab.opened, states={DRIVER: "ended"}, open=[])
    with prefect, pytest.raises(RecordRefused, match=str(key)):
        watch.fn(dry_run=False)
    assert prefect.did == [("start", "critical", "a-block", first.id)]


def test_a_run_that_no_worker_started_waits_again(lab: Lab) -> None:
    now = time.time()
    old, new = now - STUCK_S - 1, now - STUCK_S + 60
    given = {"workspace": DEMO, "command": ["a"]}
    runs = (
        JobRun("stuck", "low", "taken", old, 0.0, given),
        JobRun("slow", "low", "taken", old, 0.0, given),  # its process was started
        JobRun("fresh", "low", "taken", new, 0.0, given),
        JobRun("queued", "low", "waiting", 0.0, 0.0, given),
    )
    _, prefect = _watch(lab.opened, runs=runs)
    assert prefect.did == [("put back", "stuck"), ("put back", "slow")]


def test_a_run_that_crashed_before_its_job_was_on_record_starts_again(lab: Lab) -> None:
    now = time.time()
    _job(lab.opened)
    given = {"workspace": DEMO, "command": ["a"]}
    runs = (
        JobRun(DRIVER, "low", "crashed", now, 0.0, given),  # it has a record
        JobRun(RUN, "low", "crashed", now, 0.0, given),
        JobRun("old", "low", "crashed", now - 7200, 0.0, given),  # its user has seen it
        JobRun("failed", "low", "ended", now, 0.0, given),
        JobRun("other", "low", "crashed", now, 0.0, {"workspace": "of another server"}),
    )
    assert _watch(lab.opened, driver="running", runs=runs)[1].did == [("put back", RUN)]


@pytest.mark.parametrize("named", ["", "f" * 12], ids=["an id of its own", "a given id"])
def test_a_retry_that_crashed_before_its_job_was_on_record_starts_again(
    lab: Lab, named: str
) -> None:
    """Only where somebody has scheduled it since its last job has ended."""
    now = time.time()
    given = {"workspace": DEMO, "command": ["a"], "job": named}
    retry = JobRun(DRIVER, "low", "crashed", now, 0.0, given)
    failed = msgspec.structs.replace(
        lab.opened.jobs.end(
            msgspec.structs.replace(
                _job(lab.opened, id=named or new_job_id(DRIVER)), state="failed"
            )
        ),
        ended_unix=now - 2 * STUCK_S,
    )
    put_record(lab.store, ObjectKey(f"workspaces/demo/jobs/ended/{failed.id}"), failed)
    continues = retry._replace(id=RUN, parameters={"workspace": DEMO, "job": failed.id})
    _, prefect = _watch(lab.opened, runs=(retry, continues))
    assert (prefect.did, prefect.since) == ([("put back", DRIVER)], [failed.ended_unix])
    ends = retry._replace(state="running", state_unix=now - 3 * STUCK_S)  # and takes long
    assert _watch(lab.opened, runs=(ends,))[1].did == []
    hangs = retry._replace(state="running", state_unix=now - STUCK_S - 1)
    assert _watch(lab.opened, runs=(hangs,))[1].did == [("give up", DRIVER, "running")]
    _job(lab.opened, id=new_job_id(DRIVER, 0 if named else 1))
    assert _watch(lab.opened, driver="running", runs=(retry, hangs))[1].did == []


def test_a_run_that_recorded_nothing_holds_no_slot(lab: Lab) -> None:
    old = time.time() - STUCK_S - 1
    _job(lab.opened)
    runs = (
        JobRun(DRIVER, "low", "running", old, 0.0, {"workspace": DEMO}),  # it has a record
        JobRun(RUN, "low", "running", old, 0.0, {"workspace": DEMO}),
        JobRun("other", "low", "running", old, 0.0, {"workspace": "of another server"}),
    )
    _, prefect = _watch(lab.opened, driver="running", runs=runs)
    assert prefect.did == [("give up", RUN, "running")]


def test_a_prefect_server_that_fails_hides_no_machine(lab: Lab) -> None:
    class Silent(Prefect):
        def state(self, run: str) -> RunState:
            raise OSError("the server is away")

        def table(self, key: str, rows: Any, description: str) -> None:
            self.rows = rows

    _job(lab.opened, LOST_S + 1)
    runner = Silent(lab.opened, states={}, open=[])
    with runner, pytest.raises(OSError, match="away"):
        watch.fn(dry_run=False)
    assert runner.did == []
    assert "it was not continued: the server is away" in runner.rows[0]["jobs"]
    with Silent(lab.opened, states={}, open=[]):
        assert _only(watch.fn()).next_step == "not known: the server is away"


def test_one_job_that_cannot_be_continued_leaves_the_others(lab: Lab) -> None:
    class NoDeployment(Prefect):
        def start(self, flow: Any, key: str, *, queue: str = "", **parameters: Any) -> str:
            super().start(flow, key, queue=queue, **parameters)
            if len(self.keys) == 1:
                raise LookupError("no deployment has this name")
            return "run again"

        def table(self, key: str, rows: Any, description: str) -> None:
            self.rows = rows

    spec = msgspec.structs.replace(lab.opened.spec, name=WorkspaceName("other"))
    other = replace(lab.opened, spec=spec)
    _job(lab.opened, LOST_S + 1)
    _job(other, LOST_S + 1)
    runner = NoDeployment(lab.opened, other, states={}, open=[])
    with runner, pytest.raises(LookupError):
        watch.fn(dry_run=False)
    assert len(runner.keys) == 2
    jobs = str([row["jobs"] for row in runner.rows])
    assert "it was not continued: no deployment has this name" in jobs
    assert "run again continued it" in jobs


def test_a_workspace_whose_jobs_cannot_be_read_is_unknown(lab: Lab) -> None:
    class Silent:
        address = "s3://silent"

        def list(self, prefix: str) -> Any:
            if "/jobs/" in prefix:
                raise StoreUnavailable("s3://silent does not answer")
            return iter([])

    spec = msgspec.structs.replace(lab.opened.spec, name=WorkspaceName("other"))
    other = replace(lab.opened, spec=spec, store=Silent())  # type: ignore[arg-type]
    _job(lab.opened, LOST_S + 1)
    report, prefect = _watch(other, lab.opened)
    assert {one.workspace: one.kind for one in report.watched}["other"] == "unknown"
    assert [one[0] for one in prefect.did] == ["start"]
