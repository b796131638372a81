"""Several machines of one workspace: no order of flows takes work back without a word."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import flows
from tests.fixtures.lab import Lab, make_lab
from tests.fixtures.plain_flows import (
    hibernate_plainly,
    replicate_plainly,
    run_plainly,
    wake_plainly,
)
from tests.fixtures.trees import let_settle
from torpor.control.store.manifests import open_manifest
from torpor.shared.errors import LacksWork, UnsavedWork
from torpor.shared.values import MachineId, SnapshotId

MOST_MACHINES = 3


class Fleet:
    """Up to three machines of one workspace, on which each piece of work is a file."""

    def __init__(self, lab: Lab) -> None:
        self.lab = lab
        self.works = 0
        self._stored: dict[SnapshotId, frozenset[str]] = {}

    @property
    def machines(self) -> list[MachineId]:
        return sorted(machine.id for machine in self.lab.machines())

    def work(self, machine: MachineId) -> str:
        self.works += 1
        folder = self.lab.workspace(machine)
        folder.mkdir(exist_ok=True)
        (folder / f"work-{self.works}").write_text(f"{self.works}")
        return f"work-{self.works}"

    def on(self, machine: MachineId) -> set[str]:
        return {path.name for path in self.lab.workspace(machine).glob("work-*")}

    def stored(self) -> dict[SnapshotId, frozenset[str]]:
        """The work in each snapshot, newest first."""
        for found in self.lab.snapshots():
            if found.snapshot not in self._stored:
                name = self.lab.opened.spec.name
                manifest, _ = open_manifest(self.lab.store, name, found.snapshot, self.lab.seal)
                names = frozenset(entry.path.decode() for entry in manifest.entries if entry.path)
                self._stored[found.snapshot] = names
        return {found.snapshot: self._stored[found.snapshot] for found in self.lab.snapshots()}

    @property
    def deleted(self) -> bool:
        """Whether retention has deleted a snapshot."""
        return len(self.stored()) < len(self._stored)

    def everything(self) -> set[str]:
        return set().union(*map(self.on, self.machines), *self.stored().values())

    def backup(self, machine: MachineId, **options: Any) -> Any:
        return run_plainly(self.lab.opened, flows.backup, machine=machine, **options).hibernated

    def sync(self, machine: MachineId, **options: Any) -> Any:
        return run_plainly(self.lab.opened, flows.sync, machine=machine, **options)


@contextmanager
def _fleet(machines: int) -> Iterator[Fleet]:
    """Machines that hold one snapshot."""
    with make_lab() as lab:
        fleet = Fleet(lab)
        lab.rent()
        fleet.work(fleet.machines[0])
        fleet.backup(fleet.machines[0])
        if machines > 1:
            replicate_plainly(lab.opened, count=machines - 1)
        yield fleet


@pytest.mark.rule(12)
def test_newer_work_of_another_machine_is_not_taken_back_without_a_word() -> None:
    with _fleet(3) as fleet:
        a, b, c = fleet.machines
        work = fleet.work(a)
        stored = fleet.backup(a)
        assert stored.warnings == []
        assert fleet.sync(b).warnings == []
        unchanged = fleet.backup(c)
        assert f"{unchanged.snapshot} has no work of its own" in unchanged.warnings[0]
        assert stored.snapshot in unchanged.warnings[0]
        assert fleet.sync(b).snapshot == stored.snapshot  # the newest work, if not the last backup
        fleet.work(c)
        behind = fleet.backup(c)
        with pytest.raises(LacksWork, match=f"{stored.snapshot} of machine {a}"):
            fleet.sync(b)
        assert work in fleet.on(b)
        assert fleet.sync(b, snapshot=stored.snapshot).removed == 0
        named = fleet.sync(b, snapshot=behind.snapshot)
        assert stored.snapshot in named.warnings[0]
        assert work not in fleet.on(b)
        a_hibernated, *_ = (
            hibernate_plainly(fleet.lab.opened, machine=machine) for machine in (a, b, c)
        )
        woken = wake_plainly(fleet.lab.opened)
        assert f"lacks the work in {a_hibernated.snapshot} of machine {a}" in woken.warnings[0]
        assert work not in fleet.on(woken.machine)


STEPS = st.sampled_from(
    ["work", "hibernate", "backup", "sync", "save and sync", "sync by name", "wake",
     "wake by name", "replicate", "replicate by name"]
)  # fmt: skip


@pytest.mark.rule(12)
@settings(max_examples=20)
@given(steps=st.lists(st.tuples(STEPS, st.integers(0, 5)), min_size=4, max_size=14))
def test_no_order_of_flows_loses_work_that_nobody_has_given_up(
    steps: list[tuple[str, int]],
) -> None:
    with _fleet(2) as fleet:
        for step, number in steps:
            before = fleet.everything()
            _take(fleet, step, number)
            assert before <= fleet.everything()
        assert len(fleet.everything()) == fleet.works


def _take(fleet: Fleet, step: str, number: int) -> None:
    """One step on one of the machines, or of the snapshots; what cannot be is left out."""
    machines, stored = fleet.machines, fleet.stored()
    by_name = {"snapshot": [*stored][number % len(stored)]} if "by name" in step else {}
    opened = fleet.lab.opened
    if step.startswith("wake"):
        if not machines:
            said = wake_plainly(opened, **by_name).warnings
            _check(fleet, fleet.machines[0], said)
    elif step.startswith("replicate"):
        if len(machines) < MOST_MACHINES:
            for replica in replicate_plainly(opened, count=1, **by_name).replicas:
                _check(fleet, MachineId(replica.machine), replica.warnings)
    elif machines:
        machine = machines[number % len(machines)]
        if step == "work":
            fleet.work(machine)
            let_settle()
        elif step == "hibernate":
            hibernate_plainly(opened, machine=machine)
        elif step == "backup":
            fleet.backup(machine, keep_last=1)
        else:
            _sync(fleet, machine, by_name, save_first=step.startswith("save"))


def _sync(fleet: Fleet, machine: MachineId, by_name: dict[str, Any], *, save_first: bool) -> None:
    before = fleet.on(machine)
    stored = set().union(*fleet.stored().values())
    try:
        report = fleet.sync(machine, save_first=save_first, **by_name)
    except (LacksWork, UnsavedWork):
        assert before == fleet.on(machine)
        return
    _check(fleet, machine, report.warnings)
    if not by_name:
        assert stored <= fleet.on(machine)
        assert save_first or before <= fleet.on(machine)


def _check(fleet: Fleet, machine: MachineId, said: list[str]) -> None:
    """What is stored and not on the machine is said. Nothing else is, unless a snapshot was
    deleted: a machine that goes on from that one cannot tell that it is unchanged since."""
    lacks = set().union(*fleet.stored().values()) - fleet.on(machine)
    says = any("lacks" in words for words in said)
    assert says if lacks else not says or fleet.deleted, (lacks, said)
