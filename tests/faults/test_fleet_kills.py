"""The control side of a fleet is killed at each of its steps, and the next replicate goes on."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any, Final

import msgspec
import pytest

from tests.campaign.controls import Control, Controls
from tests.campaign.judge import Judge
from tests.fixtures.fault_proxy import Fault
from tests.fixtures.kill_points import Moment, Told
from tests.fixtures.machines import destroy_all
from tests.fixtures.plain_flows import hibernate_plainly
from tests.fixtures.short_agent import SOON_ABANDONED
from tests.fixtures.stores import Server
from tests.fixtures.trees import Tree, differences, facts, fill
from tests.fixtures.waiting import until
from tests.fixtures.world import World, make_world
from torpor.control.rental.records import Rentals
from torpor.shared.values import MIB, Machine, MachineId

COUNT: Final = 2
AT_ONCE: Final = (*SOON_ABANDONED[:2], "abandon_s: float = 1.0")
"""No connection is lost here but by a death, so its runs need not be waited for."""

ASK = "torpor.control.rental.records:Rentals.begin"
CREATE = "torpor.control.providers.local.provider:LocalProvider.create"
REACHABLE = "torpor.control.rental.renting:wait_until_reachable"
BEGIN = "torpor.control.remote.restore:RemoteRestore.begin"
PART = "torpor.control.remote.restore:RemoteRestore.restore_part"
FINISH = "torpor.control.remote.restore:RemoteRestore.finish"
CHECK = "torpor.control.remote.restore:RemoteRestore.check"
HAND_OVER = "torpor.control.rental.renting:Renting.hand_over"
ENDING = "torpor.control.providers.local.provider:end_processes"
MOMENTS: Final = (
    (Moment(ASK, 2, over=True), 0),
    (Moment(CREATE, 1, over=True), 0),
    (Moment(REACHABLE, 2, over=True), 0),
    (Moment(BEGIN, 1, over=True), 0),
    (Moment(PART, 1, over=True), 0),
    (Moment(FINISH, 1, over=True), 0),
    (Moment(CHECK, 1, over=True), 0),
    (Moment(HAND_OVER, 1, over=True), 0),
    (Moment(ENDING), 1),
)
"""With how many spares: one that is not needed is destroyed."""


class Fleets:
    """Two snapshots that no machine holds (``truth`` is the newest), and control sides."""

    def __init__(self, world: World, controls: Controls, truth: Tree) -> None:
        self.world = world
        self.controls = controls
        self.truth = truth
        self._judge = Judge(world)

    def start(self, dies_at: Moment | None = None, **options: Any) -> Control:
        fleet = {"count": COUNT, "peers": "always", **options}
        return self.controls.start("replicate", fleet, dies_at=dies_at)

    def end(self, control: Control) -> Told:
        """What a run came to; no process of it is left."""
        until(control.ended, "the control side ends")
        assert self.controls.left() == []
        return control.told()

    def handed_over(self) -> set[MachineId]:
        """The machines that were handed over, each with the same workspace. Check that every other
        machine has a lease, and that the snapshots are whole."""
        theirs = set()
        for machine in self.world.machines():
            assert machine.label is not None
            rental = self._rentals.of(machine.label)
            assert rental is not None, f"{machine.id} is forgotten"
            if rental.state == "handed over":
                assert not differences(self.truth, self._tree(machine))
                theirs.add(machine.id)
        assert self.world.verify_listed() == 2
        return theirs

    def is_completed(self) -> None:
        """The next replicate brings what it is asked for, and nothing else is left. A machine that
        was whole already counts whenever it says so: then it may be one more."""
        before, machines = self.handed_over(), self.world.machines()
        whole = {m.id for m in machines if not differences(self.truth, self._tree(m))} - before
        assert str(self.end(self.start())) == "completed"
        after = self.handed_over()
        assert before < after == {machine.id for machine in self.world.machines()}
        more = after - before
        assert len(more) == COUNT or (len(more) > COUNT and whole <= more)
        assert len(more) <= COUNT + len(whole)
        assert self._judge.leaks() == []
        until(lambda: self.world.leaks() == [], "the killed run's agents give up")

    @property
    def _rentals(self) -> Rentals:
        return Rentals(self.world.direct, self.world.access.spec.name)

    def _tree(self, machine: Machine) -> Tree:
        workspace = self.world.workspace(machine.id)
        return facts(workspace) if workspace.is_dir() else {}


@pytest.fixture(scope="module")
def made(seaweed: Server, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleets]:
    with make_world(seaweed) as world:
        spec = msgspec.structs.replace(world.access.spec, parts=16, part_bytes=1 * MIB)
        world.access = msgspec.structs.replace(world.access, spec=spec)
        workspace = world.workspace(world.rent().id)
        fill(workspace, random.Random(5), big=3, big_bytes=1_500_000)
        hibernate_plainly(world.opened, destroy=False)
        (workspace / "more").write_bytes(b"work")
        truth = facts(workspace)
        hibernate_plainly(world.opened)
        controls = Controls(tmp_path_factory.mktemp("controls"), world, AT_ONCE)
        yield Fleets(world, controls, truth)


@pytest.fixture
def fleets(made: Fleets) -> Iterator[Fleets]:
    yield made
    made.world.proxy.clear()
    destroy_all(made.world.provider)
    made.world.forget_rentals()


@pytest.mark.rule(5)
@pytest.mark.parametrize(("moment", "spares"), MOMENTS, ids=lambda given: str(given))
def test_a_fleet_killed_at_any_step_is_completed_by_the_next(
    fleets: Fleets, moment: Moment, spares: int
) -> None:
    assert fleets.end(fleets.start(moment, spares=spares)).killed
    fleets.is_completed()


def test_a_hand_over_that_comes_after_the_death_of_its_sender_changes_nothing(
    fleets: Fleets,
) -> None:
    proxy = fleets.world.proxy
    proxy.clear()
    control = fleets.start(Moment(HAND_OVER, 2))
    asked = proxy.requests
    until(lambda: sum(_writes_rental(*call) for call in list(asked)) == 2 * COUNT, "all stand")
    proxy.add(Fault("delay", _writes_rental, delay_s=2.0))
    assert fleets.end(control).killed
    fleets.is_completed()


@pytest.mark.rule(5)
def test_what_a_killed_fleet_left_of_another_snapshot_takes_no_place(fleets: Fleets) -> None:
    older = fleets.world.snapshots()[-1].snapshot
    assert fleets.end(fleets.start(Moment(PART, 1, over=True), snapshot=older)).killed
    assert len(fleets.world.machines()) == COUNT
    fleets.is_completed()


@pytest.mark.rule(5)
def test_a_wake_ends_what_was_left_of_another_snapshot_and_comes_through(fleets: Fleets) -> None:
    older = fleets.world.snapshots()[-1].snapshot
    killed = fleets.start(Moment(PART, 1, over=True), snapshot=older, count=1)
    assert fleets.end(killed).killed
    (left,) = fleets.world.machines()
    assert str(fleets.end(fleets.controls.start("wake", {}))) == "completed"
    (machine,) = fleets.world.machines()
    assert machine.id != left.id
    assert fleets.handed_over() == {machine.id}


def _writes_rental(verb: str, path: str) -> bool:
    return verb == "PUT" and "/rentals/open/" in path
