"""Real commands as jobs: each runs to its end, whatever becomes of its machine or its run. What
kills something has real machines; the others' are in memory."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import replace
from decimal import Decimal
from pathlib import Path
from typing import Any

import msgspec
import pytest

from flows import hibernate, job, watch
from tasks.plain_runner import PlainRunner
from tests.fixtures.driver import JOB_FLOW, attempt_on, hurried, left_job
from tests.fixtures.ground import Ground
from tests.fixtures.kill_points import killed_in_a_child
from tests.fixtures.lab import Lab
from tests.fixtures.plain_flows import hibernate_plainly, wake_plainly
from tests.fixtures.sshd import argv_of
from tests.fixtures.waiting import PATIENCE_S, background, until
from tests.fixtures.world import WORKSPACE, World, kill
from tests.jobs import training
from torpor.control.jobs import driven_job, records
from torpor.control.jobs.records import Job, Jobs, Stop
from torpor.control.jobs.report import JobReport
from torpor.control.money.budgets import Budget, OpenBudget
from torpor.control.store.manifests import list_snapshots
from torpor.shared.errors import (
    HandedOver,
    InvalidInput,
    JobFailed,
    MachineInUse,
    TorporError,
    WorkspaceBusy,
)
from torpor.shared.values import MachineId

pytestmark = pytest.mark.usefixtures("needs_server")

_STEPS = 30
_FINE = ["python3", "training.py", str(_STEPS), "0.1"]
_LONG = ["python3", "training.py", "100000", "0.1"]


def _held(go: Path) -> list[str]:
    """It ends as `_FINE` does, once ``go`` is there; it stands at step 20 until then."""
    there = f"until test -e {go}; do sleep 0.1; done"
    return ["sh", "-c", f"python3 training.py 20 0.1; {there}; exec {' '.join(_FINE)}"]


@pytest.fixture(autouse=True)
def _hurried(short_agent: None) -> Iterator[None]:
    with hurried():
        yield


@pytest.fixture
def runs_live(monkeypatch: pytest.MonkeyPatch) -> None:
    """No run counts as gone: a busy host can hold one up for longer than `hurried` allows."""
    monkeypatch.setattr(records, "LOST_S", 900.0)


def _placed(ground: Ground) -> Path:
    """The workspace on its machine, with the training program."""
    place = ground.workspace(ground.rent().id)
    place.mkdir()
    (place / "training.py").write_text(Path(training.__file__).read_text())
    return place


@pytest.fixture
def place(lab: Lab) -> Path:
    return _placed(lab)


def _jobs(ground: Ground) -> Jobs:
    return Jobs(ground.direct, WORKSPACE)


def _run(ground: Ground, command: list[str], **options: Any) -> JobReport:
    with PlainRunner(ground.opened, wait_factor=0.1):
        report: JobReport = job.fn(WORKSPACE, command, **options)
    return report


def _failed(ground: Ground, command: list[str], **options: Any) -> Job:
    """A job that ends without success."""
    with pytest.raises(JobFailed) as caught:
        _run(ground, command, **options)
    ended = _jobs(ground).ended(1)[0]
    assert ended.why in str(caught.value) and f"{ended.id}.log" in str(caught.value)
    return ended


def _running(
    ground: Ground, command: list[str], **options: Any
) -> AbstractContextManager[Callable[[], JobReport]]:
    return background(lambda: _run(ground, command, **options))


def _open(ground: Ground) -> Job:
    """The job, once its command was started."""
    return until(
        lambda: next((begun for begun in _jobs(ground).open() if begun.attempt is not None), None),
        "the command was started",
    )


def _step(place: Path) -> int:
    try:
        return int(json.loads((place / "state.json").read_text())["n"])
    except (OSError, ValueError):
        return 0


def _woken(ground: Ground) -> Path:
    return ground.workspace(MachineId(wake_plainly(ground.opened).machine))


def test_a_command_runs_to_its_end_and_the_machine_is_hibernated(world: World) -> None:
    _placed(world)
    report = _run(world, _FINE)
    assert (report.job.state, report.job.why) == ("succeeded", "the command ended with status 0")
    assert world.machines() == [] and _jobs(world).open() == []
    assert report.job.final == world.snapshots()[0].snapshot
    (attempt,) = report.job.attempts
    assert (attempt.end, attempt.status, report.lost_s) == ("command ended", 0, 0.0)
    assert "$" in report.cost.words and report.rows()[1]["value"].startswith("succeeded")
    woken = _woken(world)
    assert json.loads((woken / "state.json").read_text()) == training.uninterrupted(_STEPS)
    log = (woken / f".torpor-jobs/{report.job.id}.log").read_text()
    assert f"step {_STEPS}\n" in log and "goes on from step 0" in log


def test_a_program_that_is_not_there_is_the_users_mistake(lab: Lab, place: Path) -> None:
    ended = _failed(lab, ["no-such-program"])
    assert (ended.state, ended.attempts[0].status) == ("failed", 127)
    assert "no-such-program" in ended.why and lab.machines() == []


@pytest.mark.rule(16)
def test_a_lost_machine_costs_what_came_after_the_newest_save(world: World, tmp_path: Path) -> None:
    _placed(world)
    hibernate_plainly(world.opened, destroy=False)
    with _running(world, _held(tmp_path / "go"), save_minutes=0.01) as ended:
        until(lambda: _open(world).saves >= 2, "it was saved")
        saved = _open(world).newest
        first = _open(world).attempts[-1].machine
        world.lose_machines()
        (tmp_path / "go").touch()
        report = ended()
    job_ = report.job
    assert job_.state == "succeeded"
    assert [attempt.end for attempt in job_.attempts] == ["machine lost", "command ended"]
    assert job_.attempts[0].machine == first != job_.attempts[1].machine
    assert job_.attempts[0].saved and 0.0 <= report.lost_s < PATIENCE_S
    assert saved is not None and world.machines() == []
    woken = _woken(world)
    assert json.loads((woken / "state.json").read_text()) == training.uninterrupted(_STEPS)


def test_a_job_that_is_stopped_may_keep_its_machine(lab: Lab, place: Path) -> None:
    with _running(lab, _LONG) as ended:
        job_ = _open(lab)
        until(lambda: _step(place) > 3, "it works")
        _jobs(lab).ask_stop(job_.id, Stop("cancelled", "keep", "enough", time.time()))
        report = ended()
    assert (report.job.state, report.job.why) == ("cancelled", "enough")
    assert len(lab.machines()) == 1 and lab.snapshots() == []


@pytest.mark.rule(16)
def test_a_job_whose_run_is_killed_is_continued_and_its_command_not_started_twice(
    world: World, tmp_path: Path
) -> None:
    place = _placed(world)

    def begin() -> None:
        threading.Thread(target=lambda: _die_when(lambda: _step(place) > 5), daemon=True).start()
        _run(world, _held(tmp_path / "go"))

    assert killed_in_a_child(begin)
    (left,) = _jobs(world).open()
    assert left.attempt is not None
    with pytest.raises(InvalidInput, match="has no job 000000000000"):
        _run(world, [], job="0" * 12)
    until(lambda: not _jobs(world).open()[0].driven, "its driver counts as gone")
    (tmp_path / "go").touch()
    report = _run(world, [], job=left.id)
    assert (report.job.id, report.job.state) == (left.id, "succeeded")
    assert len(report.job.attempts) == 1
    woken = _woken(world)
    log = (woken / f".torpor-jobs/{left.id}.log").read_text()
    assert log.count("goes on from step 0\n") == log.count("goes on from step 20\n") == 1
    assert log.count("goes on from step") == 2
    assert json.loads((woken / "state.json").read_text()) == training.uninterrupted(_STEPS)


def test_the_agent_and_the_supervisor_may_be_killed(world: World, tmp_path: Path) -> None:
    place = _placed(world)
    with _running(world, _held(tmp_path / "go")) as ended:
        machine = _open(world).attempts[-1].machine
        until(lambda: _step(place) > 3, "it works")
        assert kill(world.agents(machine))
        until(lambda: _step(place) > 10, "it works on")
        supervisors = [p.pid for p in world.processes(machine) if "supervise" in argv_of(p.pid)]
        assert kill(supervisors)
        (tmp_path / "go").touch()
        report = ended()
    assert [attempt.end for attempt in report.job.attempts] == ["supervisor lost", "command ended"]
    assert report.job.state == "succeeded" and world.machines() == []


@pytest.mark.rule(16)
def test_a_command_that_removes_torpors_folder_is_begun_once(world: World) -> None:
    """`rm -rf ~/.*` cleans a home, and removes the agent's bundle and the job's folder with it."""
    _placed(world)
    script = "echo $TORPOR_ATTEMPT >> begun; rm -rf ~/.torpor; sleep 3; echo its end >> begun"
    report = _run(world, ["bash", "-c", script])
    assert report.job.outcome == "succeeded: the command ended with status 0"
    assert len(report.job.attempts) == 1
    assert world.machines() == []
    assert (_woken(world) / "begun").read_text() == "1\nits end\n"


@pytest.mark.rule(16)
def test_an_attempt_that_its_machine_has_forgotten_is_not_begun_again(
    lab: Lab, place: Path
) -> None:
    """Its command was seen to run. Then its driver died, and torpor's folder was removed."""
    machine, *_ = lab.machines()
    (rental,) = lab.opened.rentals.open()
    left = left_job(
        lab,
        command=["sh", "-c", "echo $TORPOR_ATTEMPT >> begun"],
        attempts=[attempt_on(machine, rental, seen_unix=2.0)],
    )
    with PlainRunner(lab.opened, wait_factor=0.1):
        report = job.fn(WORKSPACE, [], job=left.id)
    assert report.job.state == "succeeded"
    lost, done = report.job.attempts
    assert (lost.end, lost.error) == ("supervisor lost", records.FORGOTTEN)
    assert done.end == "command ended" and "nobody knows how" in report.rows()[2]["value"]
    assert (_woken(lab) / "begun").read_text() == "2\n"


@pytest.mark.rule(16)
def test_an_end_that_was_stored_is_not_done_again(lab: Lab, place: Path) -> None:
    """The run was killed between the end of the machine and the end of the job."""
    report = _run(lab, _FINE)
    half = msgspec.structs.replace(
        report.job, state="hibernating", ended_unix=None, driver="", driven_unix=0.0
    )
    jobs = _jobs(lab)
    lab.direct.delete([found.key for found in lab.direct.list("workspaces/demo/jobs/")])
    jobs.leave(jobs.take(half, ""))
    again = _run(lab, [], job=half.id)
    assert again.job.state == "succeeded" and again.job.attempts == report.job.attempts
    assert lab.machines() == []


@pytest.mark.rule(16)
def test_a_workspace_of_a_job_is_not_hibernated_by_others(lab: Lab, place: Path) -> None:
    with _running(lab, _LONG) as ended:
        job_ = _open(lab)
        with (
            PlainRunner(lab.opened),
            pytest.raises(MachineInUse, match=f"job {job_.id} .*cancel"),
        ):
            hibernate.fn(WORKSPACE)
        _jobs(lab).ask_stop(job_.id, Stop("cancelled", "hibernate", "enough", time.time()))
        ended()
    assert lab.machines() == []


def test_a_job_whose_budget_is_spent_is_stopped_and_hibernated(
    lab: Lab, place: Path, runs_live: None
) -> None:
    budget = Budget(name="lab", usd_month=Decimal("0.0001"), workspaces=(WORKSPACE,))
    opened = replace(lab.opened, budgets=lambda: [OpenBudget(budget, lambda: [lab.opened.rentals])])
    with _running(lab, _LONG) as ended:
        job_ = _open(lab)
        until(lambda: _step(place) > 3, "it works")
        with PlainRunner(opened):
            (row,) = watch.fn(dry_run=False).watched
        assert f"job {job_.id} is asked to stop" in row.next_step
        with pytest.raises(JobFailed, match="budget lab is spent"):
            ended()
    (over,) = _jobs(lab).ended(1)
    assert (over.state, over.why) == ("over budget", "budget lab is spent")
    assert lab.machines() == [] and lab.verify_listed() >= 1
    assert _step(_woken(lab)) > 3


def test_a_workspace_that_cannot_be_woken_ends_the_job(lab: Lab) -> None:
    with pytest.raises(JobFailed, match="could not be woken: workspace demo has no snapshot"):
        _run(lab, _FINE)
    jobs = _jobs(lab)
    assert jobs.open() == [] and jobs.ended(1)[0].state == "failed"


def test_a_save_command_that_fails_costs_no_save(lab: Lab, place: Path) -> None:
    save = ["python3", "-c", "open('saved', 'w'); raise SystemExit(7)"]
    with _running(lab, _LONG, save=save, save_minutes=0.01) as ended:
        until(lambda: _open(lab).saves >= 1, "it was saved")
        job_ = _open(lab)
        _jobs(lab).ask_stop(job_.id, Stop("cancelled", "hibernate", "enough", time.time()))
        assert ended().job.state == "cancelled"


def test_a_command_that_removes_its_workspace_keeps_the_machine(lab: Lab, place: Path) -> None:
    """Its log, which the supervisor writes again, does not make up for what was there."""
    before = hibernate_plainly(lab.opened, destroy=False).snapshot
    report = _run(lab, ["sh", "-c", "rm -rf ../workspace"])
    assert report.job.state == "succeeded"
    assert "had 1 more files" in report.job.why
    assert len(lab.machines()) == 1
    assert before in [one.snapshot for one in list_snapshots(lab.store, lab.opened.spec.name)]


@pytest.mark.rule(16)
@pytest.mark.parametrize("says", [None, WorkspaceBusy, HandedOver], ids=["on", "busy", "over"])
def test_a_wake_by_somebody_else_ends_no_job(
    lab: Lab, place: Path, monkeypatch: pytest.MonkeyPatch, says: type[TorporError] | None
) -> None:
    hibernate_plainly(lab.opened)
    wake, woken = JOB_FLOW.wake_workspace, []

    def meet(*given: Any, **options: Any) -> Any:
        woken.append(wake_plainly(lab.opened).machine)
        if says is not None:
            raise says("another run was there before")
        return wake(*given, **options)

    monkeypatch.setattr(JOB_FLOW, "wake_workspace", meet)
    report = _run(lab, _FINE)
    assert [attempt.machine for attempt in report.job.attempts] == woken
    assert report.job.state == "succeeded" and lab.machines() == []


@pytest.mark.rule(16)
def test_a_user_may_keep_the_machine_until_it_is_destroyed(
    lab: Lab, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = JOB_FLOW.hibernate_machine

    def begun(*given: Any, **options: Any) -> Any:
        """The user decides after the final hibernate has begun."""
        (job_,) = _jobs(lab).open()
        _jobs(lab).ask_stop(job_.id, Stop("cancelled", "keep", "I go on by hand", 2.0))
        return store(*given, **options)

    monkeypatch.setattr(JOB_FLOW, "hibernate_machine", begun)
    monkeypatch.setattr(driven_job, "STOP_S", 1000.0)  # the request is seen by nobody else
    report = _run(lab, _FINE)
    assert (report.job.state, report.job.final) == ("succeeded", None)
    assert report.job.newest == lab.snapshots()[0].snapshot
    assert len(lab.machines()) == 1


def test_a_command_that_makes_its_logs_folder_a_file_ends_its_job(lab: Lab, place: Path) -> None:
    script = "rm -r .torpor-jobs && echo mine > .torpor-jobs; sleep 1"
    report = _run(lab, ["sh", "-c", script])
    assert report.job.outcome == "succeeded: the command ended with status 0"
    assert lab.machines() == []
    assert (_woken(lab) / ".torpor-jobs").read_text() == "mine\n"


def test_a_burst_of_output_and_a_child_that_goes_on_hold_up_nothing(lab: Lab, place: Path) -> None:
    goes_on = ["sh", "-c", "while :; do echo more; sleep 0.02; done"]
    noisy = f"import subprocess; print('x' * 3_000_000, flush=True); subprocess.Popen({goes_on!r})"
    report = _run(lab, ["python3", "-c", noisy])
    assert report.job.state == "succeeded" and lab.machines() == []


def _die_when(so: Callable[[], bool]) -> None:
    until(so, "it is time to die")
    os.kill(os.getpid(), signal.SIGKILL)
