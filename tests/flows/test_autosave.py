"""Autosave: a machine that vanishes costs the work since its last own save, and nothing else."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from threading import Event
from typing import Any
from unittest.mock import patch

import msgspec
import pytest

from flows import backup, job
from flows.procedures.job import attempt
from flows.watch import watch
from tasks import autosave
from tasks.machines import session_with
from tasks.plain_runner import PlainRunner
from tasks.workspace import OpenWorkspace
from tests.fixtures.driver import hurried
from tests.fixtures.lab import DEMO, Lab
from tests.fixtures.plain_flows import hibernate_plainly, run_plainly, wake_plainly
from tests.fixtures.sshd import argv_of
from tests.fixtures.stores import Server
from tests.fixtures.supervised import end_all_of
from tests.fixtures.waiting import PATIENCE_S, background, until
from tests.fixtures.world import World, make_world
from torpor.control.store.manifests import list_snapshots, open_manifest
from torpor.control.store.receipts import newest_verified
from torpor.machine.sampler.save_lock import is_saving
from torpor.shared.values import MIB, Machine, SnapshotId
from torpor.shared.wire.autosave import AutosaveState, LookAtAutosave
from torpor.shared.wire.machine import Forget

_WRITES = """
import os, sys, time
for number in range(10**9):
    with open("counter.new", "w") as file:
        file.write(f"{number:012}" * 1000)
    os.replace("counter.new", "counter")
    time.sleep(0.2)
"""


@pytest.fixture
def saving(seaweed: Server) -> Iterator[World]:
    """A world whose workspace is saved as soon as it is handed over, and then each few seconds."""
    with make_world(seaweed) as world, patch.object(autosave, "MINUTE_S", 1.0):
        world.access = msgspec.structs.replace(
            world.access, spec=msgspec.structs.replace(world.access.spec, save_minutes=1)
        )
        yield world
        world.lose_machines()


def _look(opened: OpenWorkspace, machine: Machine) -> AutosaveState:
    with session_with(opened, machine) as session:
        return session.call(LookAtAutosave(opened.spec.name), request_id=str(time.monotonic_ns()))


def _own_saves(world: World) -> list[SnapshotId]:
    opened = world.opened
    found = [one.snapshot for one in list_snapshots(world.direct, opened.spec.name)]
    return [
        one
        for one in found
        if open_manifest(world.direct, opened.spec.name, one, opened.seal)[0].statistics.get(
            "autosave"
        )
    ]


@pytest.mark.rule(13)
def test_a_machine_that_vanishes_while_a_program_writes_is_woken_as_it_saved_itself(
    saving: World,
) -> None:
    world = saving
    place = world.workspace(world.rent().id)
    place.mkdir()
    (place / "data").write_bytes(b"x" * 100_000)
    hibernate_plainly(world.opened)
    woken = wake_plainly(world.opened)
    (machine,) = world.machines()
    place = world.workspace(machine.id)
    with subprocess.Popen([sys.executable, "-c", _WRITES], cwd=place) as writer:
        until(lambda: (place / "counter").exists(), "it writes")
        reached = int((place / "counter").read_text()[:12])
        until(lambda: _own_saves(world), "the machine saves itself")
        writer.send_signal(signal.SIGKILL)
    last = int((place / "counter").read_text()[:12])
    world.lose_machines()
    own = _own_saves(world)  # it may have saved itself once more by then
    with PlainRunner(world.opened, wait_factor=0.001):
        watch.fn(dry_run=False, only_report=True)  # it closes the rental

    assert newest_verified(world.direct, world.opened.spec.name) == woken.snapshot
    again = wake_plainly(world.opened)
    assert again.snapshot == own[0]
    (words,) = [line for line in again.warnings if "saved by itself" in line]
    assert f"machine {machine.id} was found lost at " in words
    (machine,) = world.machines()
    text = (world.workspace(machine.id) / "counter").read_text()
    assert text == text[:12] * 1000  # whole, though it was replaced meanwhile
    assert reached <= int(text[:12]) <= last


@pytest.mark.rule(13)
def test_a_hibernation_ends_a_save_under_way(saving: World) -> None:
    world = saving
    with patch.object(autosave, "MINUTE_S", 6.0):
        place = world.workspace(world.rent().id)
        place.mkdir()
        (place / "data").write_bytes(b"x" * 100_000)
        hibernate_plainly(world.opened)
        wake_plainly(world.opened)
    (machine,) = world.machines()
    home = world.home(machine.id) / ".torpor"
    data = os.urandom(200 * MIB)
    (world.workspace(machine.id) / "big").write_bytes(data)
    until(lambda: is_saving(home), "it saves")
    report = hibernate_plainly(world.opened)
    assert report.destroyed
    assert newest_verified(world.direct, world.opened.spec.name) == report.snapshot
    assert wake_plainly(world.opened).snapshot == report.snapshot
    (machine,) = world.machines()
    assert (world.workspace(machine.id) / "big").read_bytes() == data


def test_watch_hands_over_what_is_needed_and_shows_the_saves(saving: World) -> None:
    """Also after the process was killed; and HOME can be removed under it."""
    world = saving
    machine = world.rent()
    place = world.workspace(machine.id)
    place.mkdir()
    (place / "data").write_bytes(b"x" * 100_000)

    def shown(dry_run: bool = False) -> str:
        with PlainRunner(world.opened, wait_factor=0.001):
            (row,) = watch.fn(dry_run=dry_run, only_report=True).rows()
        return str(row["own saves"])

    assert shown(dry_run=True) == ""
    assert shown() == "nothing saved it until now: it begins"
    state = until(lambda: _after_a_save(world, machine), "it has saved")
    assert (state.error, [state.saved and state.saved.snapshot]) == ("", _own_saves(world))
    assert shown().startswith("saved at ")
    for agent in world.agents(machine.id):
        os.kill(agent, signal.SIGKILL)
    assert _look(world.opened, machine).saved == state.saved  # the process outlives the agent
    (process,) = [one for one in world.processes(machine.id) if "autosave" in argv_of(one.pid)]
    process.kill()
    process.wait()
    assert shown() == "nothing saved it until now: it begins"
    assert _look(world.opened, machine).line == state.line
    with session_with(world.opened, machine) as session:
        session.call(Forget(), request_id="forget")
    until(lambda: not (world.home(machine.id) / ".torpor").exists(), "HOME is gone")
    left = [one for one in world.processes(machine.id) if "autosave" in argv_of(one.pid)]
    assert left == []


def _after_a_save(world: World, machine: Machine) -> AutosaveState | None:
    state = _look(world.opened, machine)
    return state if state.stored_unix or state.error else None


def test_a_backup_starts_no_autosave_on_the_machine_of_a_job(
    lab: Lab,
    needs_server: None,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    place = lab.workspace(lab.rent().id)
    place.mkdir()
    (place / "data").write_bytes(b"x" * 1000)
    hibernate_plainly(lab.opened)
    opened, stands_by, hand_over = lab.wanting(save_minutes=5), Event(), attempt.stand_by

    def note(*given: Any) -> float:
        again_s = hand_over(*given)
        stands_by.set()
        return again_s

    def run() -> None:
        with PlainRunner(opened, wait_factor=0.1):
            job.fn(DEMO, ["sh", "-c", "until [ -e stop ]; do sleep 0.05; done"])

    monkeypatch.setattr(attempt, "stand_by", note)
    with hurried(), background(run) as ended:
        assert stands_by.wait(PATIENCE_S)
        (machine,) = lab.machines()
        try:
            run_plainly(opened, backup)
            assert _look(opened, machine).job == lab.opened.jobs.open()[0].id
        finally:
            (lab.workspace(machine.id) / "stop").touch()
            ended()
            end_all_of(lab.folder)
    assert "does not save its workspace by itself" not in caplog.text
