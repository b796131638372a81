"""Two hibernates of one workspace at once, over two connections, as from two control sides."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tasks.workspace import OpenWorkspace
from tests.fixtures.plain_flows import hibernate_plainly
from tests.fixtures.standing import raises
from tests.fixtures.trees import differences, facts
from tests.fixtures.waiting import until
from tests.fixtures.world import World
from torpor.control.reports import HibernateReport
from torpor.shared.errors import InvalidInput, WorkspaceBusy
from torpor.shared.values import Machine

HOLD = ["sh", "-c", "touch ~/held; while [ ! -e ~/go ]; do sleep 0.02; done"]
Starting = Callable[..., Future[HibernateReport]]


@pytest.fixture
def machine(world: World) -> Machine:
    rented = world.rent()
    world.workspace(rented.id).mkdir()
    (world.workspace(rented.id) / "work").write_bytes(b"mine" * 1000)
    return rented


@contextmanager
def _control_sides(opened: OpenWorkspace, retries: int | None) -> Iterator[Starting]:
    """Each call is a run of the hibernate flow in a thread, with a session of its own."""
    with ThreadPoolExecutor(2) as pool:

        def start(**options: Any) -> Future[HibernateReport]:
            return pool.submit(hibernate_plainly, opened, retries=retries, **options)

        yield start


@contextmanager
def _held(world: World, machine: Machine, start: Starting) -> Iterator[Future[HibernateReport]]:
    """A hibernate that stays inside its quiesce hook until the block ends."""
    home: Path = world.home(machine.id)
    first = start()
    try:
        until((home / "held").exists, "the first run is in its hook")
        yield first
    finally:
        (home / "go").touch()


def test_a_second_run_is_refused_and_the_first_goes_on(
    world: World, machine: Machine, short_agent: None
) -> None:
    opened = world.wanting(quiesce=HOLD)
    with _control_sides(opened, retries=0) as start:
        with _held(world, machine, start) as first:
            with raises(WorkspaceBusy, "workspace demo", "on this machine", "wait until"):
                start().result()
            assert not first.done()
            assert [m.id for m in world.machines()] == [machine.id]
            assert (world.workspace(machine.id) / "work").exists()
        assert first.result().destroyed
        assert world.verify_listed() == 1
        with raises(InvalidInput, "demo", "on no machine", "wake it first"):
            start().result()


def test_a_second_run_waits_for_the_first(
    world: World, machine: Machine, short_agent: None
) -> None:
    opened = world.wanting(quiesce=HOLD)
    truth = facts(world.workspace(machine.id))
    with _control_sides(opened, retries=None) as start:
        with _held(world, machine, lambda: start(destroy=False)) as first:
            second = start(destroy=False)
            until(lambda: len(world.sessions(machine.id)) >= 2, "the second is connected")
        one, other = first.result(), second.result()
    assert one.snapshot != other.snapshot
    assert world.verify_listed() == 2
    assert [m.id for m in world.machines()] == [machine.id]
    assert not differences(truth, facts(world.workspace(machine.id)))
