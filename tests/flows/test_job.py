"""Jobs on real machines: a command runs to its end, whatever becomes of its machine or its run."""

from __future__ import annotations

import itertools
import json
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from decimal import Decimal
from pathlib import Path
from typing import Any

import msgspec
import pytest

from flows import hibernate, job, watch
from flows.procedures.job import driver
from tasks.plain_runner import PlainRunner
from tests.fixtures.driver import JOB_FLOW, hurried
from tests.fixtures.kill_points import killed_in_a_child
from tests.fixtures.plain_flows import hibernate_plainly, wake_plainly
from tests.fixtures.sshd import argv_of
from tests.fixtures.waiting import until
from tests.fixtures.world import WORKSPACE, World, kill
from tests.jobs import training
from torpor.control.jobs import driven_job, records
from torpor.control.jobs.records import Job, Jobs, Stop
from torpor.control.jobs.report import JobReport
from torpor.control.money.budgets import Budget, OpenBudget
from torpor.control.providers.local.provider import LocalProvider
from torpor.shared.errors import (
    AgentLost,
    HandedOver,
    InvalidInput,
    JobFailed,
    MachineInUse,
    MachineUnreachable,
    StoreDenied,
    TorporError,
    WorkspaceBusy,
)
from torpor.shared.values import Machine, MachineId, ObjectKey

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


@pytest.fixture
def place(world: World) -> Path:
    """The workspace on its machine, with the training program."""
    place = world.workspace(world.rent().id)
    place.mkdir()
    (place / "training.py").write_text(Path(training.__file__).read_text())
    return place


def _jobs(world: World) -> Jobs:
    return Jobs(world.direct, WORKSPACE)


def _run(world: World, command: list[str], **options: Any) -> JobReport:
    with PlainRunner(world.opened, wait_factor=0.1):
        report: JobReport = job.fn(WORKSPACE, command, **options)
    return report


def _failed(world: World, command: list[str], **options: Any) -> Job:
    """A job that ends without success."""
    with pytest.raises(JobFailed) as caught:
        _run(world, command, **options)
    ended = _jobs(world).ended(1)[0]
    assert ended.why in str(caught.value) and f"{ended.id}.log" in str(caught.value)
    return ended


@contextmanager
def _running(world: World, command: list[str], **options: Any) -> Iterator[Callable[[], JobReport]]:
    """The job in a thread; what is yielded waits for its end."""
    told: list[JobReport | BaseException] = []

    def run() -> None:
        try:
            told.append(_run(world, command, **options))
        except BaseException as error:  # noqa: BLE001 - raised below
            told.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()

    def ended() -> JobReport:
        until(lambda: told, "the job has ended")
        if isinstance(told[0], BaseException):
            raise told[0]
        return told[0]

    yield ended
    thread.join()


def _made(job_id: str, command: list[str]) -> Job:
    return Job(id=job_id, workspace=WORKSPACE, block=WORKSPACE, command=command, created_unix=1.0)


def _write(world: World, job_: Job) -> None:
    key = ObjectKey(f"workspaces/{WORKSPACE}/jobs/open/{job_.id}")
    world.direct.put(key, msgspec.json.encode(job_))


def _open(world: World) -> Job:
    """The job, once its command was started."""
    return until(
        lambda: next((one for one in _jobs(world).open() if one.attempt is not None), None),
        "the command was started",
    )


def _step(place: Path) -> int:
    try:
        return int(json.loads((place / "state.json").read_text())["n"])
    except (OSError, ValueError):
        return 0


def _log(place: Path) -> str:
    return "".join(path.read_text() for path in (place / ".torpor-jobs").glob("*.log"))


def _woken(world: World) -> Path:
    return world.workspace(MachineId(wake_plainly(world.opened).machine))


def test_a_command_runs_to_its_end_and_the_machine_is_hibernated(world: World, place: Path) -> None:
    report = _run(world, _FINE)
    assert (report.job.state, report.job.why) == ("succeeded", "the command ended with status 0")
    assert world.machines() == [] and _jobs(world).open() == []
    assert report.job.final == world.snapshots()[0].snapshot
    (attempt,) = report.job.attempts
    assert (attempt.end, attempt.status, report.lost_s) == ("command ended", 0, 0.0)
    assert "$" in report.cost and report.rows()[1]["value"].startswith("succeeded")
    woken = _woken(world)
    assert json.loads((woken / "state.json").read_text()) == training.uninterrupted(_STEPS)
    log = (woken / f".torpor-jobs/{report.job.id}.log").read_text()
    assert f"step {_STEPS}\n" in log and "goes on from step 0" in log


def test_a_command_that_fails_hibernates_too_and_is_repeated_only_if_asked(
    world: World, place: Path
) -> None:
    fails = ["python3", "training.py", "10", "0.01", "5"]
    first = _failed(world, fails)
    assert (first.state, first.why, len(first.attempts)) == (
        "failed", "the command ended with status 3", 1
    )  # fmt: skip
    assert world.machines() == []
    again = _failed(world, fails, retries=2)
    assert (again.state, [one.status for one in again.attempts]) == ("failed", [3, 3, 3])
    assert world.machines() == []


def test_a_program_that_is_not_there_is_the_users_mistake(world: World, place: Path) -> None:
    ended = _failed(world, ["no-such-program"])
    assert (ended.state, ended.attempts[0].status) == ("failed", 127)
    assert "no-such-program" in ended.why and world.machines() == []


def test_a_lost_machine_costs_what_came_after_the_newest_save(
    world: World, place: Path, tmp_path: Path
) -> None:
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
    assert [one.end for one in job_.attempts] == ["machine lost", "command ended"]
    assert job_.attempts[0].machine == first != job_.attempts[1].machine
    assert job_.attempts[0].saved and 0.0 <= report.lost_s < 60.0
    assert saved is not None and world.machines() == []
    woken = _woken(world)
    assert json.loads((woken / "state.json").read_text()) == training.uninterrupted(_STEPS)


def test_machines_that_are_lost_before_a_save_end_the_job(world: World, place: Path) -> None:
    hibernate_plainly(world.opened)
    with _running(world, _LONG, save_minutes=1000) as ended:
        for number in (1, 2, 3):
            until(lambda n=number: len(_open(world).attempts) == n, f"attempt {number} has begun")
            world.lose_machines()
        with pytest.raises(JobFailed, match=r"preempted: .* Save more often"):
            ended()
    (lost,) = _jobs(world).ended(9)
    assert [one.end for one in lost.attempts] == ["machine lost"] * 3
    assert len(world.snapshots()) == 1  # what it began with


@pytest.mark.parametrize("then", ["hibernate", "keep"])
def test_a_job_that_is_stopped_saves_its_work(world: World, place: Path, then: Any) -> None:
    with _running(world, _LONG) as ended:
        job_ = _open(world)
        until(lambda: _step(place) > 3, "it works")
        _jobs(world).ask_stop(job_.id, Stop("cancelled", then, "enough", time.time()))
        report = ended()
    assert (report.job.state, report.job.why) == ("cancelled", "enough")
    reached = _step(place) if then == "keep" else _step(_woken(world))
    assert reached > 3
    assert len(world.machines()) == 1
    assert len(world.snapshots()) == (0 if then == "keep" else 1)


def test_a_machine_that_does_not_answer_is_kept_and_the_job_says_so(
    world: World, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def silent(*_: Any, **__: Any) -> None:
        raise MachineUnreachable("no SSH")

    def begin() -> None:
        threading.Thread(target=lambda: _die_when(lambda: _step(place) > 5), daemon=True).start()
        _run(world, _FINE)

    assert killed_in_a_child(begin)
    (left,) = _jobs(world).open()
    _jobs(world).ask_stop(left.id, Stop("cancelled", "keep", "enough", time.time()))
    until(lambda: not _jobs(world).open()[0].driven, "its driver counts as gone")
    monkeypatch.setattr(driver.open_session, "function", silent)
    ended = _run(world, [], job=left.id).job
    assert (ended.state, len(world.machines())) == ("cancelled", 1)
    assert ended.why.startswith("enough. Its command may still run on machine")


def test_a_job_whose_run_is_killed_is_continued_and_its_command_not_started_twice(
    world: World, place: Path
) -> None:
    def begin() -> None:
        threading.Thread(target=lambda: _die_when(lambda: _step(place) > 5), daemon=True).start()
        _run(world, _FINE)

    assert killed_in_a_child(begin)
    (left,) = _jobs(world).open()
    assert left.attempt is not None
    with pytest.raises(InvalidInput, match="has no job 000000000000"):
        _run(world, [], job="0" * 12)
    until(lambda: not _jobs(world).open()[0].driven, "its driver counts as gone")
    report = _run(world, [], job=left.id)
    assert (report.job.id, report.job.state) == (left.id, "succeeded")
    assert len(report.job.attempts) == 1
    woken = _woken(world)
    log = (woken / f".torpor-jobs/{left.id}.log").read_text()
    assert log.count("goes on from step") == 1
    assert json.loads((woken / "state.json").read_text()) == training.uninterrupted(_STEPS)


@pytest.mark.parametrize("ahead_s", [-1e6, 1e6], ids=["behind", "ahead"])
def test_a_run_is_not_replaced_however_wrong_its_clock_is(
    world: World, ahead_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It writes the record between two looks of another run."""
    mine, read = _jobs(world).take(_made("0" * 12, _FINE), "one"), Jobs.of
    versions = itertools.count(mine.version + 1)

    def driven(self: Jobs, job_id: str) -> Job | None:
        now_unix = time.time() + ahead_s
        one = msgspec.structs.replace(mine, driven_unix=now_unix, version=next(versions))
        _write(world, one)
        return read(self, job_id)

    monkeypatch.setattr(Jobs, "of", driven)
    with pytest.raises(WorkspaceBusy, match="flow run one works on job"):
        _run(world, [], job=mine.id)


def test_a_machine_that_is_missing_in_an_answer_is_not_lost(
    world: World, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def begin() -> None:
        threading.Thread(target=lambda: _die_when(lambda: _step(place) > 5), daemon=True).start()
        _run(world, _FINE)

    assert killed_in_a_child(begin)
    (left,) = _jobs(world).open()
    listed, answers = LocalProvider.list_own, iter(range(100))

    def short(self: LocalProvider) -> list[Machine]:
        return listed(self) if next(answers) >= 4 else []

    monkeypatch.setattr(LocalProvider, "list_own", short)
    until(lambda: not _jobs(world).open()[0].driven, "its driver counts as gone")
    report = _run(world, [], job=left.id)
    assert (report.job.state, len(report.job.attempts)) == ("succeeded", 1)


def test_the_agent_and_the_supervisor_may_be_killed(
    world: World, place: Path, tmp_path: Path
) -> None:
    with _running(world, _held(tmp_path / "go")) as ended:
        machine = _open(world).attempts[-1].machine
        until(lambda: _step(place) > 3, "it works")
        assert kill(world.agents(machine))
        until(lambda: _step(place) > 10, "it works on")
        supervisors = [p.pid for p in world.processes(machine) if "supervise" in argv_of(p.pid)]
        assert kill(supervisors)
        (tmp_path / "go").touch()
        report = ended()
    assert [one.end for one in report.job.attempts] == ["supervisor lost", "command ended"]
    assert report.job.state == "succeeded" and world.machines() == []


def test_an_end_that_was_stored_is_not_done_again(world: World, place: Path) -> None:
    """The run was killed between the end of the machine and the end of the job."""
    report = _run(world, _FINE)
    half = msgspec.structs.replace(
        report.job, state="hibernating", ended_unix=None, driver="", driven_unix=0.0
    )
    jobs = _jobs(world)
    world.direct.delete([found.key for found in world.direct.list("workspaces/demo/jobs/")])
    jobs.leave(jobs.take(half, ""))
    again = _run(world, [], job=half.id)
    assert again.job.state == "succeeded" and again.job.attempts == report.job.attempts
    assert world.machines() == []


def test_a_workspace_of_a_job_is_not_hibernated_by_others(world: World, place: Path) -> None:
    with _running(world, _LONG) as ended:
        job_ = _open(world)
        with (
            PlainRunner(world.opened),
            pytest.raises(MachineInUse, match=f"job {job_.id} .*cancel"),
        ):
            hibernate.fn(WORKSPACE)
        _jobs(world).ask_stop(job_.id, Stop("cancelled", "hibernate", "enough", time.time()))
        ended()
    assert world.machines() == []


def test_a_job_whose_budget_is_spent_is_stopped_and_hibernated(
    world: World, place: Path, runs_live: None
) -> None:
    budget = Budget(name="lab", usd_month=Decimal("0.0001"), workspaces=(WORKSPACE,))
    opened = replace(
        world.opened, budgets=lambda: [OpenBudget(budget, lambda: [world.opened.rentals])]
    )
    with _running(world, _LONG) as ended:
        job_ = _open(world)
        until(lambda: _step(place) > 3, "it works")
        with PlainRunner(opened):
            (row,) = watch.fn(dry_run=False).watched
        assert f"job {job_.id} is asked to stop" in row.next_step
        with pytest.raises(JobFailed, match="budget lab is spent"):
            ended()
    (over,) = _jobs(world).ended(1)
    assert (over.state, over.why) == ("over budget", "budget lab is spent")
    assert world.machines() == [] and world.verify_listed() >= 1
    assert _step(_woken(world)) > 3


def test_a_workspace_that_cannot_be_woken_ends_the_job(world: World) -> None:
    with pytest.raises(JobFailed, match="could not be woken: workspace demo has no snapshot"):
        _run(world, _FINE)
    jobs = _jobs(world)
    assert jobs.open() == [] and jobs.ended(1)[0].state == "failed"


def test_a_save_command_that_fails_costs_no_save(world: World, place: Path) -> None:
    save = ["python3", "-c", "open('saved', 'w'); raise SystemExit(7)"]
    with _running(world, _LONG, save=save, save_minutes=0.01) as ended:
        until(lambda: _open(world).saves >= 1, "it was saved")
        job_ = _open(world)
        _jobs(world).ask_stop(job_.id, Stop("cancelled", "hibernate", "enough", time.time()))
        assert ended().job.state == "cancelled"


def test_a_job_that_is_cancelled_while_it_waits_touches_no_machine(
    world: World, place: Path, runs_live: None
) -> None:
    with _running(world, _LONG) as first:
        early = _open(world)
        with _running(world, _FINE) as second:
            until(lambda: len(_jobs(world).open()) == 2, "the second one waits")
            late = next(one for one in _jobs(world).open() if one.id != early.id)
            stop = Stop("cancelled", "hibernate", "not needed", time.time())
            _jobs(world).ask_stop(late.id, stop)
            assert second().job.state == "cancelled"
        before = _step(place)
        until(lambda: _step(place) > before, "the first one works on")
        assert len(world.machines()) == 1 and world.snapshots() == []
        _jobs(world).ask_stop(early.id, stop)
        first()


def test_a_waiting_run_takes_an_older_job_that_has_no_run(world: World, place: Path) -> None:
    """It might wait for a run that finds no free slot, because all wait for it."""
    early = _jobs(world).take(_made("0" * 12, _FINE), "gone")
    _jobs(world).leave(early)
    late = _run(world, ["python3", "training.py", "40", "0.01"])
    assert late.job.state == "succeeded"
    first = _jobs(world).of(early.id)
    assert first is not None and first.state == "succeeded" and len(first.attempts) == 1


def test_a_supervisor_that_is_lost_again_and_again_ends_the_job(world: World, place: Path) -> None:
    def lose() -> None:
        machine = _open(world).attempts[-1].machine
        until(
            lambda: kill(
                [p.pid for p in world.processes(machine) if "supervise" in argv_of(p.pid)]
            ),
            "a supervisor was killed",
        )

    with _running(world, _LONG, save_minutes=1000) as ended:
        for number in (1, 2, 3):
            until(
                lambda n=number: _log(place).count("goes on from step") == n,
                f"the command of attempt {number} has begun",
            )
            lose()
        with pytest.raises(JobFailed, match="its supervisor was lost several times"):
            ended()
    assert world.machines() == [] and len(world.snapshots()) == 1


def test_a_command_whose_end_was_stored_by_hand_does_not_run_again(
    world: World, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise StoreDenied("the key was revoked")

    with monkeypatch.context() as broken:
        broken.setattr(JOB_FLOW, "hibernate_machine", refuse)
        with pytest.raises(StoreDenied):
            _run(world, _FINE)
    (left,) = _jobs(world).open()
    hibernate_plainly(world.opened)
    report = _run(world, [], job=left.id)
    assert report.job.state == "succeeded" and len(report.job.attempts) == 1
    assert report.job.final == world.snapshots()[0].snapshot
    assert world.machines() == []


@pytest.mark.parametrize("says", [None, WorkspaceBusy, HandedOver], ids=["on", "busy", "over"])
def test_a_wake_by_somebody_else_ends_no_job(
    world: World, place: Path, monkeypatch: pytest.MonkeyPatch, says: type[TorporError] | None
) -> None:
    hibernate_plainly(world.opened)
    wake, woken = JOB_FLOW.wake_workspace, []

    def meet(*given: Any) -> Any:
        woken.append(wake_plainly(world.opened).machine)
        if says is not None:
            raise says("another run was there before")
        return wake(*given)

    monkeypatch.setattr(JOB_FLOW, "wake_workspace", meet)
    report = _run(world, _FINE)
    assert [one.machine for one in report.job.attempts] == woken
    assert report.job.state == "succeeded" and world.machines() == []


def test_a_user_may_keep_the_machine_until_it_is_destroyed(
    world: World, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = JOB_FLOW.hibernate_machine

    def begun(*given: Any, **options: Any) -> Any:
        """The user decides after the final hibernate has begun."""
        (job_,) = _jobs(world).open()
        _jobs(world).ask_stop(job_.id, Stop("cancelled", "keep", "I go on by hand", 2.0))
        return store(*given, **options)

    monkeypatch.setattr(JOB_FLOW, "hibernate_machine", begun)
    monkeypatch.setattr(driven_job, "STOP_S", 1000.0)  # the request is seen by nobody else
    report = _run(world, _FINE)
    assert (report.job.state, report.job.final) == ("succeeded", None)
    assert report.job.newest == world.snapshots()[0].snapshot
    assert len(world.machines()) == 1


def test_wakes_that_fail_again_and_again_end_the_job(
    world: World, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hibernate_plainly(world.opened)
    tries = []

    def fail(*_: Any, **__: Any) -> None:
        tries.append(time.time())
        raise AgentLost("the agent was killed, for want of memory")

    monkeypatch.setattr(JOB_FLOW, "wake_workspace", fail)
    monkeypatch.setattr(driver, "MOST_FAILURES", 3)
    with pytest.raises(JobFailed, match="could not be woken: the agent was killed"):
        _run(world, _FINE)
    assert len(tries) == 3


def test_a_burst_of_output_and_a_child_that_goes_on_hold_up_nothing(
    world: World, place: Path
) -> None:
    goes_on = ["sh", "-c", "while :; do echo more; sleep 0.02; done"]
    noisy = f"import subprocess; print('x' * 3_000_000, flush=True); subprocess.Popen({goes_on!r})"
    report = _run(world, ["python3", "-c", noisy])
    assert report.job.state == "succeeded" and world.machines() == []


def test_jobs_of_one_workspace_run_one_after_the_other(
    world: World, place: Path, runs_live: None
) -> None:
    with _running(world, _FINE) as first:
        early = _open(world)
        with _running(world, ["python3", "training.py", "40", "0.01"]) as second:
            until(lambda: len(_jobs(world).open()) == 2, "the second one waits")
            late = next(one for one in _jobs(world).open() if one.id != early.id)
            until(
                lambda: any("comes first" in one.why for one in _jobs(world).open()),
                "it says that it waits",
            )
            assert late.attempts == []
            assert first().job.state == "succeeded"
            assert second().job.state == "succeeded"
    ended = sorted(_jobs(world).ended(2), key=lambda one: one.created_unix)
    assert [one.id for one in ended] == [early.id, late.id]
    assert ended[0].ended_unix is not None
    assert ended[1].attempts[0].began_unix > ended[0].ended_unix


def test_an_error_leaves_the_job_to_the_next_run(
    world: World, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise StoreDenied("the key was revoked")

    with monkeypatch.context() as broken:
        broken.setattr(JOB_FLOW, "hibernate_machine", refuse)
        with pytest.raises(StoreDenied, match="the key was revoked"):
            _run(world, _FINE)
    (left,) = _jobs(world).open()
    assert (left.state, left.why, left.driven) == ("hibernating", "the key was revoked", False)
    assert len(world.machines()) == 1
    report = _run(world, [], job=left.id)
    assert report.job.state == "succeeded" and len(report.job.attempts) == 1


def test_a_job_needs_a_command(world: World) -> None:
    for command in ([], [""]):
        with pytest.raises(InvalidInput, match="the job has no command"):
            _run(world, command)
    assert _jobs(world).open() == []


def _die_when(so: Callable[[], bool]) -> None:
    until(so, "it is time to die")
    os.kill(os.getpid(), signal.SIGKILL)
