"""Faults met by the flows as Prefect runs them: states, retries and messages included."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from blocks import Workspace
from deployments.server import Server as PrefectServer
from flows import hibernate, replicate, wake
from tests.fixtures.fault_proxy import Fault
from tests.fixtures.machines import destroy_all
from tests.fixtures.prefect_api import ask
from tests.fixtures.short_agent import installing
from tests.fixtures.standing import gets, lists, puts
from tests.fixtures.stores import Server as StoreServer
from tests.fixtures.trees import Tree, differences, facts, fill
from tests.fixtures.waiting import until
from tests.fixtures.world import World, make_world
from torpor.control.remote.session import SshSession
from torpor.control.remote.snapshot import RemoteSnapshot
from torpor.shared.errors import StoreDenied, WorkspaceInvalid

BLOCK = "faults"


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
    up = [
        Fault("status", puts("/packs/"), status=503),
        Fault("flip_up", puts("/packs/"), at_byte=999),
        Fault("status", puts("/snapshots/"), status=500, code="InternalError"),
        Fault("status", lists, status=503),
    ]
    down = [
        Fault("cut", gets("/packs/"), at_byte=10_000),
        Fault("flip_down", gets("/packs/"), at_byte=20_000),
        Fault("status", gets("/packs/"), status=503),
    ]
    for fault in up:
        world.proxy.add(fault)
    slept = _state(hibernate)
    assert slept.is_completed(), slept.message
    assert world.machines() == []
    for fault in down:
        world.proxy.add(fault)
    woken = _state(wake)
    assert woken.is_completed(), woken.message
    assert [fault.count for fault in up + down] == [0] * 7
    (machine,) = world.machines()
    assert not differences(truth, facts(world.workspace(machine.id)))


def test_a_wake_that_is_refused_fails_with_the_reason_and_leaves_no_machine(
    world: World, truth: Tree
) -> None:
    assert _state(hibernate).is_completed()
    world.proxy.add(Fault("status", gets("/packs/"), 1000, 403, "AccessDenied"))
    failed = _state(wake)
    assert failed.is_failed()
    with pytest.raises(StoreDenied, match="check the key id and secret"):
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
    assert (len(report.ready), [one.machine for one in report.failed]) == (2, [own])
    for machine in world.machines():
        if machine.id != full.id:
            assert not differences(truth, facts(world.workspace(machine.id)))
    assert (world.home(full.id) / "workspace" / "work").read_text() == "mine"
    wanted = {"flow_runs": {"id": {"any_": [str(state.state_details.flow_run_id)]}}}
    tasks = ask("POST", f"{prefect_server.api_url}/task_runs/filter", wanted)
    shares = [task["name"] for task in tasks if task["name"].startswith("restore share")]
    assert 0 < len(shares) <= 64
    assert {name.split(" of ")[1] for name in shares} == {one.machine for one in report.ready}


def test_a_hibernate_that_cannot_be_fails_at_once_and_keeps_the_machine(
    world: World, truth: Tree
) -> None:
    workspace = Workspace.of(BLOCK)
    workspace.paths = ["~/nowhere"]
    workspace.save(f"{BLOCK}-nowhere")
    failed = hibernate(f"{BLOCK}-nowhere", return_state=True)
    assert failed.is_failed()
    with pytest.raises(WorkspaceInvalid, match="check the path in the workspace block"):
        failed.result()
    (machine,) = world.machines()
    assert not differences(truth, facts(world.workspace(machine.id)))
    assert world.snapshots() == []


def test_a_workspace_that_another_run_holds_is_waited_for(world: World, truth: Tree) -> None:
    (machine,) = world.machines()
    assert machine.endpoint is not None
    opened = world.opened
    ended = threading.Event()
    with SshSession.open(machine.endpoint, opened.identity) as session:
        other = RemoteSnapshot(session, opened.store, opened.spec, opened.key, "another")
        other.begin()

        def end_soon() -> None:
            until(lambda: len(world.sessions(machine.id)) > 1, "the flow is attached")
            other.end(committed=False)
            ended.set()

        threading.Thread(target=end_soon).start()
        state = _state(hibernate)
        assert ended.is_set()
    assert state.is_completed(), state.message
    assert world.machines() == []
    assert world.verify_listed() == 1
