"""Agents killed, connections dropped and servers killed, in each phase of hibernate and wake."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tasks.phases import phases_told_to
from tests.fixtures.fault_proxy import Fault, gets
from tests.fixtures.plain_flows import hibernate_plainly, wake_plainly
from tests.fixtures.short_agent import SMALL_PARTS, copy_agent, installing
from tests.fixtures.trees import differences, facts, fill
from tests.fixtures.world import World, kill, until_gone

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


@pytest.fixture
def workspace(world: World) -> Path:
    machine = world.rent()
    fill(world.workspace(machine.id), random.Random(2), big=2)
    return world.workspace(machine.id)


@pytest.mark.parametrize("strike", [drop_connections, kill_agents, kill_servers])
def test_flows_survive_what_is_killed_on_the_machine_in_each_phase(
    world: World, workspace: Path, short_agent: None, strike: Callable[[World], None]
) -> None:
    truth = facts(workspace)
    with _in_each(HIBERNATE, lambda: strike(world)):
        assert hibernate_plainly(world.opened).destroyed
    assert world.verify_listed() >= 1  # a killed agent scans again, and commits again
    with _in_each(WAKE, lambda: strike(world)):
        wake_plainly(world.opened)
    (machine,) = world.machines()
    assert not differences(truth, facts(world.workspace(machine.id)))


def test_a_part_goes_on_after_its_connection_drops(
    world: World, workspace: Path, tmp_path: Path
) -> None:
    """The agent waits as long as it really does: a slow connection would end the part."""
    dropped = 0

    def drop(method: str, path: str) -> bool:
        nonlocal dropped
        if gets("/packs/")(method, path) and not dropped:
            dropped = 1
            drop_connections(world)
        return False

    with installing(copy_agent(tmp_path / "agent", SMALL_PARTS)):
        hibernate_plainly(world.opened)
        world.proxy.clear()
        world.proxy.add(Fault("delay", drop))
        wake_plainly(world.opened, retries=0)
    assert dropped
    packs = [path for method, path in world.proxy.requests if gets("/packs/")(method, path)]
    assert len(packs) == len(set(packs))


@contextmanager
def _in_each(phases: tuple[str, ...], strike: Callable[[], None]) -> Iterator[None]:
    struck: set[str] = set()

    def begins(phase: str) -> None:
        if phase in phases and phase not in struck:
            struck.add(phase)
            strike()

    with phases_told_to(begins):
        yield
    assert struck == {*phases}


def _kill_all(world: World, find: Callable[..., list[int]]) -> None:
    for machine in world.machines():
        pids = find(machine.id)
        kill(pids)
        until_gone(pids)
