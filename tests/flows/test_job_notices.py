"""A job's machine that is taken away while nobody drives the job: its own save counts."""

from __future__ import annotations

import json
import os
import re
import signal
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any
from unittest.mock import patch

import msgspec
import psutil
import pytest

from flows import attending, job
from tasks.plain_runner import PlainRunner
from tests.fixtures.kill_points import killed_in_a_child
from tests.fixtures.machines import destroy_all
from tests.fixtures.metadata import PREEMPTED, Metadata
from tests.fixtures.plain_flows import hibernate_plainly, wake_plainly
from tests.fixtures.stores import Server
from tests.fixtures.waiting import until
from tests.fixtures.world import WORKSPACE, World, kill, make_world
from tests.jobs import training
from tests.jobs.campaign import hurried
from torpor.control.jobs.records import Jobs
from torpor.control.jobs.report import JobReport
from torpor.control.safety import see_whole
from torpor.control.store.snapshots import find_snapshot
from torpor.machine.supervisor.folder import JobFolder
from torpor.shared.values import MIB, MachineId
from torpor.shared.wire.job import JobState

_LONG = 200
_TRAINING = ["python3", "training.py", str(_LONG), "0.1"]


@pytest.fixture(autouse=True)
def _hurried(short_agent: None) -> Iterator[None]:
    with hurried():
        yield


@pytest.fixture(params=[False, True], ids=["plain", "sealed"])
def noticed(seaweed: Server, request: pytest.FixtureRequest) -> Iterator[World]:
    """A world whose market has a metadata service."""
    with make_world(seaweed, sealed=request.param) as made:
        yield made


def test_the_machine_saves_itself_while_nobody_is_there_and_the_job_goes_on_from_that(
    noticed: World, metadata: Metadata
) -> None:
    world = noticed
    world.access = msgspec.structs.replace(world.access, notices=[metadata.source("gcp")])
    machine = world.rent().id
    place = world.workspace(machine)
    place.mkdir()
    (place / "training.py").write_text(Path(training.__file__).read_text())
    (place / "weights.bin").write_bytes(os.urandom(3 * MIB))
    hibernate_plainly(world.opened, destroy=False)
    (basis,) = [one.snapshot for one in world.snapshots()]

    assert killed_in_a_child(lambda: _die_once_it_stands_by(world))
    (left,) = _jobs(world).open()
    assert (left.saves, left.newest) == (0, None)
    reached = _step(place)
    until(lambda: _step(place) > reached + 3, "the command goes on")
    noticed_at = _step(place)
    (place / "checkpoint.bin").write_bytes(os.urandom(5 * MIB))
    metadata.says[PREEMPTED] = b"TRUE"
    state = until(lambda: _after_save(world, machine, left.id), "the machine has saved itself")
    assert state.save_error == ""
    assert state.notice is not None and state.notice.kind == "gcp"
    assert state.saved is not None
    own = state.saved.snapshot
    checkpoint = (place / "checkpoint.bin").read_bytes()
    _assert_hidden(world, machine)
    kill([process.pid for process in world.processes(machine)])
    destroy_all(world.provider)

    assert [one.snapshot for one in world.snapshots()] == [own, basis]
    manifest = see_whole(world.direct, find_snapshot(world.direct, WORKSPACE, own), world.seal)
    assert (manifest.parent, manifest.statistics["own_save"]) == (basis, 1)

    metadata.says[PREEMPTED] = b"FALSE"
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


def _run(world: World, command: list[str], **options: Any) -> JobReport:
    with PlainRunner(world.opened, wait_factor=0.1):
        report: JobReport = job.fn(WORKSPACE, command, **options)
    return report


def _die_once_it_stands_by(world: World) -> None:
    """Drive a job until its machine has what it needs to save by itself."""
    hand_over = attending.stand_by

    def die(*given: Any) -> None:
        hand_over(*given)
        os.kill(os.getpid(), signal.SIGKILL)

    with patch.object(attending, "stand_by", die):
        _run(world, _TRAINING, save_minutes=1000)


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
