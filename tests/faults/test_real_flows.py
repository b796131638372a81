"""Faults of a real store, met by the flows as Prefect runs them: states, retries, messages."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import asyncssh
import pytest

from deployments.server import Server as PrefectServer
from flows import hibernate, replicate, wake
from tests.fixtures.errors import raises
from tests.fixtures.fault_proxy import Fault, gets, lists, puts
from tests.fixtures.machines import destroy_all
from tests.fixtures.plain_flows import hibernate_plainly
from tests.fixtures.prefect_api import ask
from tests.fixtures.short_agent import installing
from tests.fixtures.stores import Server as StoreServer
from tests.fixtures.trees import Tree, differences, facts, fill
from tests.fixtures.waiting import until
from tests.fixtures.world import World, kill, make_world, until_gone
from torpor.shared.errors import HostKeyChanged, StoreDenied, StoreFull

BLOCK = "faults"
FOREVER = 1_000_000
HOST = r"127\.0\.0\.1:\d+"
UP = [  # at each object fewer than the agent has attempts
    Fault("status", lists, status=503),
    Fault("status", puts("/packs/"), status=500, code="InternalError"),
    Fault("status", puts("/packs/"), status=503, count=2),
    Fault("status", puts("/packs/"), status=503, reads_body=False),
    Fault("timeout", puts("/packs/")),
    Fault("flip_up", puts("/packs/"), at_byte=999),
    Fault("reset", puts("/packs/")),
    Fault("after", puts("/packs/")),
    Fault("flip_up", puts("/snapshots/"), at_byte=100),
    Fault("after", puts("/snapshots/")),
    Fault("cut", gets("/snapshots/"), at_byte=50),
]
DOWN = [
    Fault("status", gets("/snapshots/"), status=503),
    Fault("cut", gets("/snapshots/"), at_byte=40),
    Fault("cut", gets("/packs/"), at_byte=10_000),
    Fault("flip_down", gets("/packs/"), at_byte=20_000),
    Fault("reset", gets("/packs/"), at_byte=70_000),
    Fault("timeout", gets("/packs/")),
    Fault("status", gets("/packs/"), status=503),
]


@pytest.fixture(scope="module")
def made(
    prefect_server: PrefectServer, seaweed: StoreServer, short_agent_source: Path
) -> Iterator[World]:
    """A world whose workspace, store and provider are saved blocks."""
    with installing(short_agent_source), make_world(seaweed) as world:
        world.access.save_blocks(BLOCK)
        yield world


@pytest.fixture
def world(made: World) -> Iterator[World]:
    """It is empty before and after each test."""
    yield made
    made.proxy.clear()
    destroy_all(made.provider)
    made.direct.delete([found.key for found in made.direct.list("")])


@pytest.fixture
def truth(world: World) -> Tree:
    machine = world.rent()
    fill(world.workspace(machine.id), random.Random(8), big=3)
    return facts(world.workspace(machine.id))


def _state(flow: Any, **options: Any) -> Any:
    return flow(BLOCK, return_state=True, **options)


def test_faults_that_pass_leave_completed_flows_and_the_same_workspace(
    world: World, truth: Tree
) -> None:
    for fault in UP:
        world.proxy.add(fault)
    slept = _state(hibernate)
    assert slept.is_completed(), slept.message
    assert world.machines() == []
    for fault in DOWN:
        world.proxy.add(fault)
    woken = _state(wake)
    assert woken.is_completed(), woken.message
    assert [fault.count for fault in UP + DOWN] == [0] * len(UP + DOWN)
    (machine,) = world.machines()
    assert not differences(truth, facts(world.workspace(machine.id)))


def test_what_is_refused_fails_with_the_reason_and_harms_nothing(world: World, truth: Tree) -> None:
    """The words of a store go from a machine to the user."""
    full = ("XMinioStorageFull", "no space left on the disk")
    world.proxy.add(Fault("status", puts("/packs/"), FOREVER, 507, *full))
    failed = _state(hibernate)
    with raises(StoreFull, "PUT workspaces/demo/packs/", HOST, *full, "free space", "run it again"):
        failed.result()
    (machine,) = world.machines()
    assert not differences(truth, facts(world.workspace(machine.id)))
    assert world.snapshots() == []

    world.proxy.clear()
    assert _state(hibernate).is_completed()
    world.proxy.add(Fault("status", gets("/packs/"), FOREVER, 403, "AccessDenied"))
    failed = _state(wake)
    with raises(StoreDenied, "workspaces/demo/packs/", HOST, "check the key id and secret"):
        failed.result()
    assert world.machines() == []
    world.proxy.clear()
    assert _state(wake).is_completed()


def test_a_replicate_brings_all_it_can_and_names_the_machine_that_failed(
    world: World, truth: Tree, prefect_server: PrefectServer
) -> None:
    """Each machine in a thread of its own: its tasks, retries and artifacts are this run's."""
    full = world.rent()
    (world.home(full.id) / "workspace").mkdir()
    (world.home(full.id) / "workspace" / "work").write_text("mine")
    (first,) = [machine for machine in world.machines() if machine.id != full.id]
    assert _state(hibernate, machine=first.id).is_completed()
    world.proxy.add(Fault("status", gets("/packs/"), status=503))
    world.proxy.add(Fault("cut", gets("/packs/"), at_byte=10_000))
    assert full.endpoint is not None
    own = f"{full.endpoint.user}@{full.endpoint.host}:{full.endpoint.port}"
    state = _state(replicate, count=2, machines=[own])
    assert state.is_completed(), state.message
    report = state.result()
    assert (len(report.ready), [replica.machine for replica in report.failed]) == (2, [own])
    for machine in world.machines():
        if machine.id != full.id:
            assert not differences(truth, facts(world.workspace(machine.id)))
    assert (world.home(full.id) / "workspace" / "work").read_text() == "mine"
    wanted = {"flow_runs": {"id": {"any_": [str(state.state_details.flow_run_id)]}}}
    ready = {replica.machine for replica in report.ready}

    def shares() -> list[str] | None:
        tasks = ask("POST", f"{prefect_server.api_url}/task_runs/filter", wanted)
        names = [task["name"] for task in tasks if ": restore share" in task["name"]]
        return names if {name.split(": ")[0] for name in names} == ready else None

    # Prefect's server learns of task runs by events, after their ends.
    assert len(until(shares, "each machine has fetched a share", every_s=0.5)) <= 64


def test_a_host_key_pinned_at_first_use_is_the_only_one_from_then_on(
    world: World, truth: Tree
) -> None:
    (machine,) = world.machines()
    assert machine.endpoint is not None
    own = f"{machine.endpoint.user}@127.0.0.1:{machine.endpoint.port}"
    hibernate_plainly(world.opened, machine=own, destroy=False)
    stranger = asyncssh.generate_private_key("ssh-ed25519")
    world.machine_folder(machine.id).host_key.write_bytes(stranger.export_private_key())
    listeners = world.listener(machine.id)
    kill(listeners)
    until_gone(listeners)
    assert world.revive_server(machine.id)  # as a stranger does who took the machine's address
    with raises(HostKeyChanged, "127.0.0.1", "pinned", "Nothing was sent", "recorded key"):
        hibernate_plainly(world.opened, machine=own, destroy=False, retries=0)
    assert world.verify_listed() == 1
