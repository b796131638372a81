"""The providers' machines are compared with the rentals. Only named machines are destroyed."""

from __future__ import annotations

import random
from contextlib import suppress
from dataclasses import replace
from typing import Any

import msgspec
import pytest

from flows import reconcile
from tasks.machines import left_unfinished, renting
from tasks.reconciliation import see_that_it_does_not_answer
from tests.fixtures.lab import Lab
from tests.fixtures.market import Market
from tests.fixtures.plain_flows import hibernate_plainly, plain, run_plainly, wake_plainly
from tests.fixtures.rentals import handed_over, standing
from tests.fixtures.trees import differences, facts, fill
from tests.fixtures.world import WORKSPACE, World, kill, until_gone
from torpor.control.providers.local import LocalProvider
from torpor.control.reconciliation import Kind, Reconciliation
from torpor.control.remote.session import SshSession
from torpor.control.rental import greeting
from torpor.control.rental.records import Rental, Rentals
from torpor.control.rental.renting import Renting
from torpor.control.safety import Warrant, never_handed_over
from torpor.shared.errors import (
    AgentLost,
    DiskFull,
    HandedOver,
    HostKeyChanged,
    InvalidInput,
    MachineDenied,
    MachineUnfit,
    MachineUnreachable,
    ProviderError,
    TorporError,
    UnsafeDestroy,
)
from torpor.shared.values import DRILL, Machine, WorkspaceName, reserved_name


def _reconcile(world: World, **options: Any) -> Reconciliation:
    report: Reconciliation = run_plainly(world.opened, reconcile, **options)
    return report


def _left(world: World, name: WorkspaceName = WORKSPACE) -> tuple[Machine, Rental]:
    return standing(world.opened.under(name))


def _silent(world: World) -> tuple[Machine, Rental]:
    """The same, of a machine that does not answer any more."""
    machine, rental = _left(world)
    servers = world.listener(machine.id)
    kill(servers)
    until_gone(servers)
    return machine, rental


def _machines(report: Reconciliation, kind: Kind) -> list[str]:
    return [one.machine.id for one in report.findings if one.kind == kind and one.machine]


def test_without_names_it_tells_all_and_changes_nothing(world: World) -> None:
    mine = world.rent()
    left, _ = _left(world)
    drill, _ = _left(world, reserved_name(DRILL, WORKSPACE))
    theirs, _ = _left(world, WorkspaceName("theirs"))
    stray, rental = _left(world)
    world.opened.rentals.change(rental, state="ended")
    lost = world.rent()
    assert lost.label is not None
    world.provider.destroy(lost, never_handed_over(lost, lost.label))
    before = [machine.id for machine in world.machines()]
    report = _reconcile(world)
    assert sorted(_machines(report, "unfinished")) == sorted([left.id, drill.id])
    assert _machines(report, "in use") == [mine.id]
    assert _machines(report, "without a rental") == [stray.id]
    assert _machines(report, "another workspace's") == [theirs.id]
    (gone,) = [one for one in report.findings if one.kind == "lost"]
    assert gone.rental is not None
    assert gone.rental.label == lost.label
    assert report.ended == []
    assert len(report.rows()) == 6
    assert [machine.id for machine in world.machines()] == before
    assert _reconcile(world).findings == report.findings


def test_a_machine_whose_rental_ends_meanwhile_is_not_lost(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A hibernate ends it right after its machine has gone."""
    hibernated = world.rent()
    assert hibernated.label is not None
    world.provider.destroy(hibernated, never_handed_over(hibernated, hibernated.label))
    read = Rentals.open

    def just_before(self: Rentals) -> list[Rental]:
        found = read(self)
        for rental in found:
            self.change(rental, state="ended")
        return found

    monkeypatch.setattr(Rentals, "open", just_before)
    assert _reconcile(world).findings == []


def test_a_machine_that_never_answers_again_is_ended_by_name_and_wake_comes_through(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine = world.rent()
    fill(world.workspace(machine.id), random.Random(3))
    truth = facts(world.workspace(machine.id))
    hibernate_plainly(world.opened)
    left, rental = _left(world)
    with monkeypatch.context() as patch:
        patch.setattr(greeting, "ssh_banner_fault", lambda endpoint: f"no route to {endpoint.host}")
        able = msgspec.structs.replace(LocalProvider.abilities, ready_s=0.5)
        patch.setattr(LocalProvider, "abilities", able)
        with pytest.raises(MachineUnreachable, match=r"no route.*name it in `end` of reconcile"):
            wake_plainly(world.opened, retries=0)
    assert [one.id for one in world.machines()] == [left.id]  # unknown is not idle
    servers = world.listener(left.id)
    kill(servers)
    until_gone(servers)
    report = _reconcile(world, end=[left.id])
    assert report.ended == [left.id]
    assert report.findings == []
    ended = {one.label for one in world.opened.rentals.history()}
    assert ended == {machine.label, rental.label}
    assert world.machines() == []
    woken = wake_plainly(world.opened)
    assert not differences(truth, facts(world.workspace(woken.machine)))
    report = _reconcile(world)
    assert [(one.kind, one.machine and one.machine.id) for one in report.findings] == [
        ("in use", woken.machine)
    ]


def test_what_a_drill_left_is_ended_by_name_though_it_answers(world: World) -> None:
    left, _ = _left(world, reserved_name(DRILL, WORKSPACE))
    assert _reconcile(world, end=[left.id]).ended == [left.id]
    assert world.machines() == []


def test_where_one_of_the_named_may_not_be_ended_none_is(world: World) -> None:
    mine, (answers, _), (dead, _) = world.rent(), _left(world), _silent(world)
    with pytest.raises(UnsafeDestroy, match=f"{mine.id} was handed over"):
        _reconcile(world, end=[dead.id, mine.id])
    with pytest.raises(InvalidInput, match="no machine 'm-nowhere'"):
        _reconcile(world, end=[dead.id, "m-nowhere"])
    with pytest.raises(UnsafeDestroy, match=f"{answers.id} answers .its agent.*nothing was ended"):
        _reconcile(world, end=[dead.id, answers.id])
    assert {machine.id for machine in world.machines()} == {mine.id, answers.id, dead.id}


@pytest.mark.parametrize(
    "error",
    [
        MachineDenied("it refuses the key"),
        HostKeyChanged("it shows another host key"),
        DiskFull("there is no room for the agent"),
        MachineUnfit("it has no Python"),
        AgentLost("the agent went away"),
        MachineUnreachable("no common SSH algorithms"),
    ],
)
def test_a_machine_that_refuses_the_login_has_answered(
    world: World, monkeypatch: pytest.MonkeyPatch, error: TorporError
) -> None:
    """It may hold a whole restore, and the user's work."""
    machine, _ = _left(world)

    def refuses(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(SshSession, "open", refuses)
    with pytest.raises(UnsafeDestroy, match=f"answers .{error}.*use the provider's console"):
        _reconcile(world, end=[machine.id])
    assert [one.id for one in world.machines()] == [machine.id]


def test_a_starting_machine_is_not_ended(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    machine, _ = _left(world)
    starting = msgspec.structs.replace(machine, state="starting", endpoint=None)
    monkeypatch.setattr(LocalProvider, "find", lambda *_: starting)
    with pytest.raises(UnsafeDestroy, match="is starting, so a run may be about to use it"):
        see_that_it_does_not_answer(world.opened, machine)


def test_a_machine_that_answers_again_meanwhile_is_not_ended(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = _silent(world)[0], _silent(world)[0]
    destroy = LocalProvider.destroy

    def slow(self: LocalProvider, machine: Machine, warrant: Warrant) -> None:
        destroy(self, machine, warrant)
        if machine.id == first.id:
            assert world.revive_server(second.id)

    monkeypatch.setattr(LocalProvider, "destroy", slow)
    with pytest.raises(UnsafeDestroy, match=f"{second.id} answers"):
        _reconcile(world, end=[first.id, second.id])
    assert [one.id for one in world.machines()] == [second.id]


def test_a_machine_that_cannot_be_ended_does_not_stop_the_others(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = _silent(world)[0], _silent(world)[0]
    destroy = LocalProvider.destroy

    def stubborn(self: LocalProvider, machine: Machine, warrant: Warrant) -> None:
        if machine.id != first.id:
            destroy(self, machine, warrant)

    with monkeypatch.context() as patch:
        patch.setattr(LocalProvider, "destroy", stubborn)
        patch.setattr(Renting.end, "__kwdefaults__", {"within_s": 0.2})
        with pytest.raises(ProviderError, match=f"{first.id}.*not proven after"):
            _reconcile(world, end=[first.id, second.id])
    assert [machine.id for machine in world.machines()] == [first.id]
    assert _reconcile(world, end=[first.id]).ended == [first.id]


@pytest.mark.parametrize("meanwhile", ["handed over", "ended"])
def test_a_machine_that_was_handed_over_by_the_time_of_its_destroy_is_left(
    world: World, monkeypatch: pytest.MonkeyPatch, meanwhile: str
) -> None:
    machine, rental = _silent(world)
    destroy = LocalProvider.destroy

    def slow(self: LocalProvider, machine: Machine, warrant: Warrant) -> None:
        with suppress(HandedOver):
            world.opened.rentals.change(rental, state=meanwhile)
        destroy(self, machine, warrant)

    monkeypatch.setattr(LocalProvider, "destroy", slow)
    with pytest.raises(HandedOver, match=f"was {meanwhile} by another run"):
        _reconcile(world, end=[machine.id])
    assert [one.id for one in world.machines()] == [machine.id]


def test_a_rental_at_an_account_without_a_block_is_closed_by_name_and_wake_may_rent(
    lab: Lab,
) -> None:
    machine, rental = handed_over(lab.opened)
    other = replace(lab.opened, providers=(Market("runpod:2"),))
    (found,) = run_plainly(other, reconcile).findings
    assert found.kind == "at another provider"
    assert f"name rental {rental.label.rental} in `gone`" in found.next_step
    report = run_plainly(other, reconcile, gone=[rental.label.rental])
    assert report.findings == [] and report.closed == [rental.label.rental]
    (ended,) = lab.opened.rentals.history()
    assert ended.why == "its user told reconcile that the machine is gone"
    assert machine.id in lab.market.alive  # nothing was destroyed
    with plain(other):
        assert left_unfinished(other, renting(other), alone=True) == []
