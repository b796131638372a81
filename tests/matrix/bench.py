"""One workspace for each row of the matrix, and what must hold of it whatever was done to it."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from tests.fixtures.trees import Tree, differences, facts, fill, mutate
from tests.fixtures.world import World
from tests.matrix.runs import undisturbed
from torpor.control.safety import never_handed_over
from torpor.shared.values import Machine, SnapshotId

BIG_BYTES: Final = 1_000_000


class Bench:
    """Two snapshots, and a machine if the workspace is awake. ``saved``: its blocks are, too."""

    def __init__(self, world: World, saved: bool) -> None:
        self.world = world
        self.saved = saved
        self.name = str(world.opened.spec.name)
        self._states: list[Tree] = []
        self._last = SnapshotId("")

    def begin(self, awake: bool) -> None:
        machine = self.world.rent()
        place = self.world.workspace(machine.id)
        fill(place, random.Random(self.name), big=2, big_bytes=BIG_BYTES)
        (place / "model").write_text("small")
        for last in (False, True):
            self._states.append(_tree(self.world, machine))
            flow = "hibernate" if last and not awake else "backup"
            assert undisturbed(self.world.opened, flow) == "completed"
            if not last:
                mutate(place, random.Random(f"{self.name} later"))
        self._last = self.world.snapshots()[0].snapshot

    def oldest(self) -> SnapshotId:
        return self.world.snapshots()[-1].snapshot

    def machines(self) -> list[Machine]:
        return [
            machine
            for machine in self.world.machines()
            if machine.label is not None and machine.label.workspace == self.name
        ]

    def unnamed(self) -> list[str]:
        """Machines that no open rental names."""
        named = {rental.label for rental in self.world.opened.rentals.open()}
        return [
            f"machine {m.id} is in no open rental" for m in self.machines() if m.label not in named
        ]

    def lost(self) -> list[str]:
        """What is not as it was, on machines in use and in snapshots. Where no machine has the
        workspace, empty ones are ended, and the newest snapshot that holds it is woken."""
        found = []
        self.world.verify_listed()
        for snapshot in ("newest", self._last):
            if not self._whole_machines():
                self.end()
                self.world.forget_rentals()
                said = undisturbed(self.world.opened, "wake", snapshot=snapshot)
                found += [] if said == "completed" else [f"a wake of {snapshot} says {said}"]
        for machine in self._whole_machines():
            tree = _tree(self.world, machine)
            if tree not in self._states:
                wrong = differences(self._states[-1], tree)
                found += [f"on {machine.id}: {line}" for line in wrong]
        return found or ([] if self._whole_machines() else ["no machine has the workspace"])

    def _whole_machines(self) -> list[Machine]:
        """Those that a user has and that hold the workspace."""
        handed = {r.label for r in self.world.opened.rentals.open() if r.state == "handed over"}
        return [
            machine
            for machine in self.machines()
            if machine.label in handed and _tree(self.world, machine)
        ]

    def end(self) -> None:
        for machine in self.machines():
            assert machine.label is not None
            self.world.provider.destroy(machine, never_handed_over(machine, machine.label))


@contextmanager
def benched(world: World, name: str, *, awake: bool, saved: bool) -> Iterator[Bench]:
    bench = Bench(world.named(name), saved)
    if saved:
        bench.world.access.save_blocks(name)
    try:
        bench.begin(awake)
        yield bench
    finally:
        bench.end()


def _tree(world: World, machine: Machine) -> Tree:
    """All names but the logs of jobs, and the time of the directory that they are in."""
    place = world.workspace(machine.id)
    found = facts(place) if place.exists() else {}
    return {path: fact for path, fact in found.items() if path and not path.startswith(b".torpor-")}
