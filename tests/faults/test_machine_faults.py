"""Agents killed, connections dropped and disks full, in each phase of hibernate and wake."""

from __future__ import annotations

import secrets
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from tasks.phases import phases_told_to
from tests.fixtures.fault_proxy import Fault
from tests.fixtures.plain_flows import hibernate_plainly, wake_plainly
from tests.fixtures.short_agent import SMALL_PARTS, copy_agent, installing
from tests.fixtures.standing import Asleep, Awake, gets, raises
from tests.fixtures.trees import differences, facts
from tests.fixtures.world import World, kill, until_gone
from torpor.control.remote.restore import RemoteRestore
from torpor.control.remote.session import SshSession
from torpor.control.store.snapshots import find_snapshot
from torpor.shared.errors import DiskFull, TorporError

HIBERNATE = ("scan", "store", "commit", "verify")
WAKE = ("plan", "restore", "finish", "check")


def drop_connections(world: World) -> None:
    _kill_all(world, world.sessions)


def kill_agents(world: World) -> None:
    _kill_all(world, world.agents)


def kill_servers(world: World) -> None:
    _kill_all(world, lambda machine: world.sessions(machine) + world.listener(machine))
    for machine in world.machines():
        assert world.revive_server(machine.id)


VICTIMS = [drop_connections, kill_agents, kill_servers]


@pytest.mark.parametrize("strike", VICTIMS)
@pytest.mark.parametrize("phase", HIBERNATE)
def test_a_hibernate_survives_what_is_killed_on_the_machine(
    awake: Awake, short_agent: None, phase: str, strike: Callable[[World], None]
) -> None:
    awake.work()
    awake.world.proxy.clear()
    with _once_in(phase, lambda: strike(awake.world)):
        report = awake.hibernate(destroy=False, retries=3)
    assert awake.world.snapshots()[0].snapshot == report.snapshot
    awake.unharmed()


@pytest.mark.parametrize("strike", VICTIMS)
def test_a_wake_survives_what_is_killed_on_the_machine_in_each_phase(
    asleep: Asleep, short_agent: None, strike: Callable[[World], None]
) -> None:
    asleep.world.proxy.clear()
    struck: set[str] = set()

    def begins(phase: str) -> None:
        if phase in WAKE and phase not in struck:
            struck.add(phase)
            strike(asleep.world)

    with phases_told_to(begins):
        wake_plainly(asleep.world.opened)
    assert struck == {*WAKE}
    (machine,) = asleep.world.machines()
    assert not differences(asleep.truth, facts(asleep.world.workspace(machine.id)))
    hibernate_plainly(asleep.world.opened)


def test_a_part_goes_on_after_its_connection_drops(asleep: Asleep, tmp_path: Path) -> None:
    """The agent waits as long as it really does: a slow connection would end the part."""
    proxy = asleep.world.proxy
    proxy.clear()
    dropped = 0

    def drop(method: str, path: str) -> bool:
        nonlocal dropped
        if gets("/packs/")(method, path) and not dropped:
            dropped = 1
            drop_connections(asleep.world)
        return False

    proxy.add(Fault("delay", drop))
    with installing(copy_agent(tmp_path / "agent", SMALL_PARTS)):
        wake_plainly(asleep.world.opened, retries=0)
        assert dropped
        packs = [path for method, path in proxy.requests if gets("/packs/")(method, path)]
        assert len(packs) == len(set(packs))
        hibernate_plainly(asleep.world.opened)


def test_a_machine_that_cannot_hold_the_agent_says_so(awake: Awake, short_agent: None) -> None:
    home = awake.world.home(awake.machine.id)
    assert awake.machine.endpoint is not None
    with (
        _small_disk(home / "small", "4m") as disk,
        raises(DiskFull, "127.0.0.1|small", "space|room"),
    ):
        SshSession.open(
            awake.machine.endpoint, awake.world.opened.identity, home=str(disk / "agent")
        ).close()
    awake.unharmed()
    awake.recovers()


def test_a_disk_too_small_for_a_snapshot_is_found_before_a_byte_is_written(
    awake: Awake, short_agent: None
) -> None:
    with (
        _small_disk(awake.world.home(awake.machine.id) / "small", "16m") as disk,
        _restore(awake, disk / "workspace") as restore,
    ):
        with raises(DiskFull, str(disk), "bytes free", "larger disk", "nothing was written"):
            restore.begin()
        assert not (disk / "workspace").exists()
    awake.unharmed()


def test_a_disk_that_fills_up_meanwhile_stops_the_restore_and_room_lets_it_go_on(
    awake: Awake, short_agent: None
) -> None:
    with (
        _small_disk(awake.world.home(awake.machine.id) / "small", "100m") as disk,
        _restore(awake, disk / "workspace") as restore,
    ):
        plan = restore.begin()
        filler = disk / "filler"
        with filler.open("wb") as file:
            file.write(bytes(96 << 20))
        with raises(DiskFull, "disk is full", "weights|small", "larger disk"):
            for part in plan.parts:
                restore.restore_part(part)
        filler.unlink()
        plan = restore.begin()
        for part in plan.parts:
            restore.restore_part(part)
        restore.finish()
        assert restore.check(full=True).difference_count == 0
        restore.end()
        assert not differences(awake.truth, facts(disk / "workspace"))
    awake.unharmed()


@contextmanager
def _once_in(phase: str, strike: Callable[[], None]) -> Iterator[None]:
    struck = False

    def begins(name: str) -> None:
        nonlocal struck
        if name == phase and not struck:
            struck = True
            strike()

    with phases_told_to(begins):
        yield
    assert struck, f"there was no phase {phase}"


@contextmanager
def _small_disk(at: Path, size: str) -> Iterator[Path]:
    """A real file system of that size."""
    at.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(at)], check=True)
    try:
        yield at
    finally:
        subprocess.run(["umount", "--lazy", str(at)], check=True)
        at.rmdir()


@contextmanager
def _restore(awake: Awake, target: Path) -> Iterator[RemoteRestore]:
    """A restore of the newest snapshot to another folder of the machine."""
    opened = awake.world.opened
    wanted = find_snapshot(opened.store, opened.spec.name, None)
    assert awake.machine.endpoint is not None
    with SshSession.open(awake.machine.endpoint, opened.identity) as session:
        restore = RemoteRestore(
            session,
            opened.store,
            wanted,
            opened.key,
            f"restore-{secrets.token_hex(6)}",
            roots=[str(target)],
        )
        try:
            yield restore
        finally:
            with suppress(TorporError):  # it may have ended already
                restore.end()


def _kill_all(world: World, find: Callable[..., list[int]]) -> None:
    for machine in world.machines():
        pids = find(machine.id)
        kill(pids)
        until_gone(pids)
