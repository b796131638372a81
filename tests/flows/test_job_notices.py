"""A job's machine that is taken away while nobody drives the job: its own save counts."""

from __future__ import annotations

import json
import os
import re
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from email.utils import formatdate
from pathlib import Path
from typing import Any
from unittest.mock import patch

import msgspec
import psutil
import pytest

from flows import backup, job
from flows.procedures.job import attempt
from tasks.jobs import start_command
from tasks.machines import open_session
from tasks.plain_runner import PlainRunner
from tasks.standing_by import stand_by
from tests.fixtures.driver import hurried
from tests.fixtures.kill_points import killed_in_a_child
from tests.fixtures.metadata import ACTION, EVENTS, PREEMPTED, Metadata
from tests.fixtures.plain_flows import hibernate_plainly, run_plainly, wake_plainly
from tests.fixtures.short_agent import copy_agent, installing
from tests.fixtures.sshd import argv_of
from tests.fixtures.stores import Server
from tests.fixtures.waiting import until
from tests.fixtures.world import WORKSPACE, World, make_world, until_gone
from tests.jobs import training
from torpor.control.jobs.records import Jobs
from torpor.control.jobs.report import JobReport
from torpor.control.remote.snapshot import RemoteSnapshot
from torpor.control.safety import check_whole, verify_snapshot
from torpor.control.store.manifests import find_snapshot
from torpor.control.upkeep.lineage import SnapshotLines
from torpor.machine.supervisor.folder import JobFolder
from torpor.shared.errors import JobFailed
from torpor.shared.values import MIB, MachineId
from torpor.shared.wire.job import JobState, StartJob

_LONG = 200
_JOB = "3f2a9c81d04e"
_TRAINING = ["python3", "training.py", str(_LONG), "0.1"]
_SHORTER = ["python3", "training.py", "100", "0.1"]

_PATIENT = ("torpor/machine/agent/rescue.py", "ENDS_S: Final = 3.0", "ENDS_S: Final = 60.0")


@pytest.fixture(autouse=True)
def _hurried(short_agent: None) -> Iterator[None]:
    with hurried():
        yield


@pytest.fixture(params=[("gcp", False), ("azure", True)], ids=["gcp plain", "azure sealed"])
def noticed(
    seaweed: Server, metadata: Metadata, request: pytest.FixtureRequest
) -> Iterator[tuple[World, str]]:
    """A world whose market has a metadata service, and the market."""
    market, sealed = request.param
    with make_world(seaweed, sealed=sealed) as made:
        made.access = msgspec.structs.replace(made.access, notices=[metadata.source(market)])
        yield made, market


def test_the_machine_saves_itself_while_nobody_is_there_and_the_job_goes_on_from_that(
    noticed: tuple[World, str], metadata: Metadata
) -> None:
    world, market = noticed
    machine, place = _placed(world)
    (place / "weights.bin").write_bytes(os.urandom(3 * MIB))
    hibernate_plainly(world.opened, destroy=False)
    (basis,) = [one.snapshot for one in world.snapshots()]

    assert killed_in_a_child(lambda: _die_once_it_stands_by(world))
    (left,) = _jobs(world).open()
    assert (left.saves, left.newest) == (0, basis)
    reached = _step(place)
    until(lambda: _step(place) > reached + 3, "the command goes on")
    noticed_at = _step(place)
    (place / "checkpoint.bin").write_bytes(os.urandom(5 * MIB))
    taken_unix = _take(metadata, market)
    state = until(lambda: _after_save(world, machine, left.id), "the machine has saved itself")
    assert state.save_error == ""
    assert state.notice is not None and state.notice.kind == market
    assert state.saved is not None and state.saved.made_unix < taken_unix
    own = state.saved.snapshot
    checkpoint = (place / "checkpoint.bin").read_bytes()
    _assert_hidden(world, machine)
    world.lose_machines()

    assert [one.snapshot for one in world.snapshots()] == [own, basis]
    manifest = check_whole(world.direct, find_snapshot(world.direct, WORKSPACE, own), world.seal)
    assert (manifest.parent, manifest.statistics["own_save"]) == (basis, 1)

    metadata.says.clear()
    until(lambda: not _jobs(world).open()[0].driven, "its driver counts as gone")
    report = _run(world, [], job=left.id)
    assert report.job.state == "succeeded"
    first, second = report.job.attempts
    assert (first.end, first.saved, second.end) == ("machine lost", True, "command ended")
    woken = world.workspace(MachineId(wake_plainly(world.opened).machine))
    assert json.loads((woken / "state.json").read_text()) == training.uninterrupted(_LONG)
    assert (woken / "checkpoint.bin").read_bytes() == checkpoint
    log = (woken / f".torpor-jobs/{left.id}.log").read_text()
    begun = [int(line.rsplit(" ", 1)[1]) for line in log.splitlines() if "goes on from" in line]
    assert begun[0] == 0
    assert begun[1] >= noticed_at


def test_a_spot_machine_without_a_job_or_a_schedule_is_saved_when_it_is_taken_away(
    noticed: tuple[World, str], metadata: Metadata
) -> None:
    world, market = noticed
    machine = world.rent().id
    (rental,) = world.opened.rentals.open()
    world.opened.rentals.change(rental, spot=True)
    place = world.workspace(machine)
    place.mkdir()
    (place / "old").write_bytes(os.urandom(MIB))
    run_plainly(world.opened, backup)
    (basis,) = world.snapshots()
    (place / "new").write_bytes(os.urandom(MIB))
    new = (place / "new").read_bytes()
    _take(metadata, market)
    until(lambda: len(world.snapshots()) == 2, "the machine has saved itself")
    _assert_hidden(world, machine)
    world.lose_machines()
    woken = wake_plainly(world.opened)
    assert woken.snapshot != basis.snapshot
    assert (world.workspace(MachineId(woken.machine)) / "new").read_bytes() == new


def test_the_machine_saves_on_the_jobs_schedule_while_nobody_is_there(world: World) -> None:
    """A laptop is closed, and the market takes the machine without a notice."""
    machine, place = _placed(world)
    with patch.object(attempt, "LATE_S", 0.5):
        assert killed_in_a_child(lambda: _die_once_it_stands_by(world, save_minutes=0.01))
    (left,) = _jobs(world).open()
    assert (left.saves, left.newest) == (0, None)
    reached = _step(place)
    until(lambda: _step(place) > reached + 3, "the command goes on")
    began_unix, step = time.time(), _step(place)

    def saved_since() -> bool:
        state = JobFolder(world.home(machine) / ".torpor", left.id).look()[0]
        return state.saved is not None and state.saved.made_unix > began_unix + 10.0

    until(saved_since, "the machine has saved itself more than once since")
    world.lose_machines()
    until(lambda: not _jobs(world).open()[0].driven, "its driver counts as gone")
    report = _run(world, [], job=left.id)
    assert report.job.state == "succeeded"
    first, second = report.job.attempts
    assert (first.end, first.saved, second.end) == ("machine lost", True, "command ended")
    woken = world.workspace(MachineId(wake_plainly(world.opened).machine))
    assert json.loads((woken / "state.json").read_text()) == training.uninterrupted(_LONG)
    log = (woken / f".torpor-jobs/{left.id}.log").read_text()
    begun = [int(line.rsplit(" ", 1)[1]) for line in log.splitlines() if "goes on from" in line]
    assert begun[0] == 0 and begun[1] >= step
    lines = SnapshotLines.of(world.direct, WORKSPACE, world.seal)
    line = [*lines.going_back(str(report.job.final))]
    assert not any(one.autosave for one in line)  # the verified ones have their work


@pytest.mark.rule(16)
@pytest.mark.parametrize("goes", [True, False], ids=["goes", "stays"])
def test_a_command_that_ends_with_its_machine_has_not_failed(world: World, goes: bool) -> None:
    """A machine that shuts down sends SIGTERM to torpor's processes and to the command alike."""
    machine, place = _placed(world)
    hand_over, stands_by = attempt.stand_by, threading.Event()

    def note(*given: Any) -> float:
        again_s = hand_over(*given)
        stands_by.set()
        return again_s

    with (
        ThreadPoolExecutor(1) as thread,
        patch.object(attempt, "TAKEN_S", 1000.0 if goes else 2.0),
        patch.object(attempt, "stand_by", note),
    ):
        running = thread.submit(_run, world, _SHORTER, save_minutes=1000)
        job_id = until(lambda: next((one.id for one in _jobs(world).open()), None), "it is there")
        folder = JobFolder(world.home(machine) / ".torpor", job_id)
        until(lambda: _step(place) > 3 and stands_by.is_set(), "it could be saved")
        kept = folder.read()
        assert kept is not None
        processes = [process.pid for process in world.processes(machine)]
        savers = [pid for pid in processes if "autosave" in argv_of(pid)]
        for pid in (*savers, kept.supervisor.pid, kept.command.pid):
            os.kill(pid, signal.SIGTERM)
        until(lambda: _after_save(world, machine, job_id), "the machine has saved itself")
        until(lambda: folder.look()[0].state == "ended", "the command has ended")
        if goes:
            world.lose_machines()
            report = running.result()
            first, second = report.job.attempts
            assert (first.end, first.saved, second.status) == ("machine lost", True, 0)
            assert report.job.state == "succeeded"
        else:
            with pytest.raises(JobFailed, match="the command ended with status -15"):
                running.result()


@pytest.mark.parametrize("hung", [False, True], ids=["at work", "hung"])
def test_an_agent_that_holds_the_workspace_is_ended_when_time_is_short(
    world: World, metadata: Metadata, hung: bool, tmp_path: Path
) -> None:
    """The control side was lost in the middle of a save. A busy host may hold up an agent at work
    for longer than it is given."""
    notices = [metadata.source("aws")]
    world.access = msgspec.structs.replace(world.access, notices=notices)
    machine = world.rent()
    place = world.workspace(machine.id)
    place.mkdir()
    (place / "weights.bin").write_bytes(os.urandom(3 * MIB))
    opened = world.opened
    with (
        installing(copy_agent(tmp_path / "agent", *([] if hung else [_PATIENT]))),
        PlainRunner(opened),
        open_session(opened, machine) as session,
    ):
        request = StartJob(
            _JOB, 1, ["sleep", "600"], "~/workspace", "~/job.log", notices, workspace=WORKSPACE
        )
        assert start_command(session, request).state == "running"
        stand_by(opened, session, machine, _JOB, None)
        running = RemoteSnapshot(session, opened.store, opened.spec, opened.key, "interrupted")
        running.begin()
        (agent,) = world.agents(machine.id)
        if hung:
            os.kill(agent, signal.SIGSTOP)
        soon = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(time.time() + 5))
        metadata.say(ACTION, {"action": "terminate", "time": soon})
        state = until(lambda: _after_save(world, machine.id, _JOB), "the machine has saved itself")
        assert state.save_error == "" and state.saved is not None
        until_gone([agent])
    whole = find_snapshot(world.direct, WORKSPACE, state.saved.snapshot)
    verify_snapshot(world.direct, whole, world.seal)
    log = (world.home(machine.id) / ".torpor/agent.log").read_text()
    assert "a run holds workspace demo: the agent gets SIGTERM" in log
    assert ("the agent gets SIGKILL" in log) == hung


def _take(metadata: Metadata, market: str) -> float:
    """Say that the market takes the machine in 30 s; when that is."""
    taken_unix = time.time() + 30
    if market == "gcp":
        metadata.says[PREEMPTED] = b"TRUE"
    else:
        event = {"EventId": "1", "EventType": "Preempt"}
        metadata.say(
            EVENTS, {"Events": [{**event, "NotBefore": formatdate(taken_unix, usegmt=True)}]}
        )
    return taken_unix


def _placed(world: World) -> tuple[MachineId, Path]:
    """A machine, and the workspace on it with the training program."""
    machine = world.rent().id
    place = world.workspace(machine)
    place.mkdir()
    (place / "training.py").write_text(Path(training.__file__).read_text())
    return machine, place


def _run(world: World, command: list[str], **options: Any) -> JobReport:
    with PlainRunner(world.opened, wait_factor=0.1):
        report: JobReport = job.fn(WORKSPACE, command, **options)
    return report


def _die_once_it_stands_by(world: World, save_minutes: float = 1000) -> None:
    """Drive a job until its machine has what it needs to save by itself."""
    hand_over = attempt.stand_by

    def die(*given: Any) -> float:
        hand_over(*given)
        os.kill(os.getpid(), signal.SIGKILL)
        raise AssertionError("it lives")

    with patch.object(attempt, "stand_by", die):
        _run(world, _TRAINING, save_minutes=save_minutes)


def _jobs(world: World) -> Jobs:
    return Jobs(world.direct, WORKSPACE)


def _step(place: Path) -> int:
    try:
        return int(json.loads((place / "state.json").read_text())["n"])
    except (OSError, ValueError):
        return 0


def _after_save(world: World, machine: MachineId, job_id: str) -> JobState | None:
    """What the supervisor has written, once the save for its notice is over."""
    state, _ = JobFolder(world.home(machine) / ".torpor", job_id).look()
    return state if state.saved or state.save_error else None


def _assert_hidden(world: World, machine: MachineId) -> None:
    """Neither a grant nor the key is in the machine's files, arguments or environments."""
    key = world.opened.key
    secrets = [re.escape(one) for one in (key, key.hex().encode())] if key else []
    hidden = re.compile(b"|".join([rb"X-Amz-Signature=[0-9a-f]{16}", *secrets]))
    held = [path.read_bytes() for path in world.home(machine).rglob("*") if path.is_file()]
    for process in world.processes(machine):
        with suppress(psutil.Error):
            held.append("\0".join([*process.cmdline(), *process.environ().values()]).encode())
    assert len(held) > 10
    assert not [found for one in held if (found := hidden.search(one))]
