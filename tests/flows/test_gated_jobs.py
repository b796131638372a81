"""Jobs whose command starts before its workspace is restored: real machines and a real store."""

from __future__ import annotations

import hashlib
import os
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from flows import job
from tasks.plain_runner import PlainRunner
from tests.fixtures.driver import hurried
from tests.fixtures.fault_proxy import Fault, gets
from tests.fixtures.kill_points import killed_in_a_child
from tests.fixtures.plain_flows import hibernate_plainly, wake_plainly
from tests.fixtures.sshd import argv_of
from tests.fixtures.waiting import background, until
from tests.fixtures.world import WORKSPACE, World, kill
from torpor.control.jobs.records import Job, Jobs
from torpor.control.jobs.report import JobReport

pytestmark = pytest.mark.usefixtures("needs_server")

_GATED = "the command started before its files were there"
_FILES = {"d/weights": 6 << 20, "rest": 24 << 20}
_READ = "sha256sum d/weights > read; ls d > listed; sha256sum rest >> read"


@pytest.fixture(autouse=True)
def _hurried(short_agent: None) -> Iterator[None]:
    with hurried():
        yield


@pytest.fixture
def hashes(world: World) -> list[str]:
    """The workspace has a snapshot and no machine, and its packs come slowly; of what it holds."""
    place = world.workspace(world.rent().id)
    (place / "d").mkdir(parents=True)
    hashes = []
    for name, size in _FILES.items():
        data = os.urandom(size)
        (place / name).write_bytes(data)
        hashes.append(hashlib.sha256(data).hexdigest())
    hibernate_plainly(world.opened)
    _slowly(world)
    return hashes


def _slowly(world: World, seconds: float = 0.7) -> None:
    world.proxy.add(Fault("delay", gets("/packs/"), count=1000, delay_s=seconds))


def _run(world: World, command: str, steps: list[str], **options: Any) -> JobReport:
    with PlainRunner(world.opened, wait_factor=0.1, before=steps.append):
        report: JobReport = job.fn(WORKSPACE, ["sh", "-euc", command], gate=True, **options)
    return report


def _open(world: World) -> Job:
    """The job, once its command was started."""
    jobs = Jobs(world.direct, WORKSPACE)
    started = until(lambda: next((j for j in jobs.open() if j.attempt), None), "it was started")
    assert started is not None
    return started


def _woken(world: World) -> Path:
    machine = wake_plainly(world.opened).machine
    return world.workspace(machine)


def _index(steps: list[str], begins: str) -> int:
    return next(n for n, step in enumerate(steps) if step.startswith(begins))


def _check(world: World, read: list[str], hashes: list[str]) -> Path:
    """What was stored is what the workspace held, and what the command ``read``."""
    woken = _woken(world)
    assert [line.split()[0] for line in (woken / "read").read_text().splitlines()] == read
    for name, digest in zip(_FILES, hashes, strict=True):
        assert hashlib.sha256((woken / name).read_bytes()).hexdigest() == digest
    return woken


@pytest.mark.parametrize("ends", ["at once", "later"])
def test_a_command_reads_what_is_still_restored_and_nothing_is_saved_before_all_is_there(
    world: World, hashes: list[str], ends: str, caplog: pytest.LogCaptureFixture
) -> None:
    steps: list[str] = []
    caplog.set_level("INFO")
    command = "touch read listed; echo done" if ends == "at once" else f"{_READ}; echo done"
    report = _run(world, command, steps, save_minutes=0.001)
    assert _index(steps, "start attempt 1") < _index(steps, "finish restore")
    assert _index(steps, "check restore") < _index(steps, "hand over machine")
    assert _index(steps, "hand over machine") < min(_index(steps, "scan"), _index(steps, "commit"))
    assert (report.job.state, report.job.gated) == ("succeeded", _GATED)
    assert any(row == {"what": "gate", "value": _GATED} for row in report.rows())
    assert world.machines() == []
    assert [record.getMessage() for record in caplog.records].count("done") == 1
    woken = _check(world, hashes if ends == "later" else [], hashes)
    assert (woken / "listed").read_text() == ("weights\n" if ends == "later" else "")


def test_after_a_loss_the_log_of_earlier_attempts_comes_back_before_the_command_starts(
    world: World, hashes: list[str], tmp_path: Path
) -> None:
    command = f"{_READ}; echo once more; until test -e {tmp_path}/go; do sleep 0.1; done"
    steps: list[str] = []
    with background(lambda: _run(world, command, steps, save_minutes=0.01)) as ended:
        until(lambda: _open(world).saves >= 2, "it was saved")
        world.lose_machines()
        (tmp_path / "go").touch()
        report = ended()
    assert [one.end for one in report.job.attempts] == ["machine lost", "command ended"]
    assert (report.job.state, report.job.gated) == ("succeeded", _GATED)
    assert _index(steps, "start attempt 2") < len(steps) - steps[::-1].index("finish restore")
    woken = _check(world, hashes, hashes)
    log = (woken / f".torpor-jobs/{report.job.id}.log").read_text()
    assert log.count("once more") == 2 and "attempt 1 begins" in log and "attempt 2 begins" in log


@pytest.mark.parametrize("victim", ["agent", "supervisor"])
def test_a_kill_during_the_restore_costs_an_attempt_at_most(
    world: World, hashes: list[str], victim: str
) -> None:
    steps: list[str] = []
    with background(lambda: _run(world, _READ, steps, retries=1)) as ended:
        machine = _open(world).attempts[-1].machine

        def victims() -> list[int]:
            supervisors = [p.pid for p in world.processes(machine) if "supervise" in argv_of(p.pid)]
            return world.agents(machine) if victim == "agent" else supervisors

        assert kill(until(victims, f"the {victim} is there"))
        report = ended()
    assert report.job.state == "succeeded"
    _check(world, hashes, hashes)


@pytest.mark.parametrize("by_hand", [False, True], ids=["by the job", "by hand"])
def test_a_run_that_is_killed_during_the_restore_is_continued_on_its_machine(
    world: World, hashes: list[str], by_hand: bool
) -> None:
    _slowly(world, 3.0)
    command = f"echo $TORPOR_ATTEMPT >> began; {_READ}; test $TORPOR_ATTEMPT = 2 || sleep 1000"

    def reads() -> bool:
        return any((world.workspace(one.id) / "read").exists() for one in world.machines())

    def begin() -> None:
        threading.Thread(target=lambda: _die_when(reads), daemon=True).start()
        _run(world, command, [])

    assert killed_in_a_child(begin)
    (left,) = Jobs(world.direct, WORKSPACE).open()
    until(lambda: not Jobs(world.direct, WORKSPACE).open()[0].driven, "its driver is gone")
    if by_hand:  # the command may have got an error for what was missing: it does not count
        wake_plainly(world.opened)
    report = _run(world, "", [], job=left.id)
    first, second = report.job.attempts
    assert (report.job.state, first.end, second.status) == ("succeeded", "machine lost", 0)
    assert first.machine == second.machine and not first.saved
    if not by_hand:
        assert report.job.gated == "not used: the attempt before was lost without a save"
    assert (_check(world, hashes, hashes) / "began").read_text() == "1\n2\n"


def test_a_command_that_moves_a_directory_of_the_restore_is_started_last_on_another_machine(
    world: World, hashes: list[str]
) -> None:
    report = _run(world, f"mv d gone; mv gone d; mv d gone; sleep 20; mv gone d; {_READ}", [])
    first, second = report.job.attempts
    assert first.end == "machine lost" and "its restore failed" in first.error
    assert second.status == 0 and first.machine != second.machine
    assert report.job.gated == "not used: the attempt before was lost without a save"
    _check(world, hashes, hashes)


def _die_when(so: Callable[[], bool]) -> None:
    until(so, "it is time to die")
    os.kill(os.getpid(), signal.SIGKILL)
