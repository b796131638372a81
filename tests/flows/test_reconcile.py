"""The providers' machines are compared with the rentals. Only named machines are destroyed."""

from __future__ import annotations

import random
import socket
import threading
from contextlib import suppress
from dataclasses import replace
from typing import Any

import msgspec
import pytest

from flows import reconcile
from tasks.machines import left_unfinished, renting
from tasks.reconciliation import check_silent
from tests.fixtures.lab import DEMO as WORKSPACE
from tests.fixtures.lab import FolderMarket, Lab
from tests.fixtures.machines import new_key_pair
from tests.fixtures.market import Market
from tests.fixtures.plain_flows import hibernate_plainly, plain, run_plainly, wake_plainly
from tests.fixtures.rentals import handed_over, standing
from tests.fixtures.trees import differences, facts, fill
from torpor.control.reconciliation import Kind, Reconciliation
from torpor.control.rental.ending import end_machine
from torpor.control.rental.records import Rental, Rentals
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
from torpor.shared.values import DRILL, Endpoint, Machine, WorkspaceName, reserved_name


def _reconcile(lab: Lab, **options: Any) -> Reconciliation:
    report: Reconciliation = run_plainly(lab.opened, reconcile, **options)
    return report


def _left(lab: Lab, name: WorkspaceName = WORKSPACE) -> tuple[Machine, Rental]:
    return standing(lab.opened.under(name))


def _silent(lab: Lab) -> tuple[Machine, Rental]:
    """The same, of a machine that does not answer any more."""
    machine, rental = _left(lab)
    lab.market.silent.add(machine.id)
    return machine, rental


def _machines(report: Reconciliation, kind: Kind) -> list[str]:
    return [one.machine.id for one in report.findings if one.kind == kind and one.machine]


def test_without_names_it_tells_all_and_changes_nothing(lab: Lab) -> None:
    mine = lab.rent()
    left, _ = _left(lab)
    drill, _ = _left(lab, reserved_name(DRILL, WORKSPACE))
    theirs, _ = _left(lab, WorkspaceName("theirs"))
    stray, rental = _left(lab)
    lab.opened.rentals.change(rental, state="ended")
    lost = lab.rent()
    assert lost.label is not None
    lab.market.destroy(lost, never_handed_over(lost, lost.label))
    before = [machine.id for machine in lab.machines()]
    report = _reconcile(lab)
    assert sorted(_machines(report, "unfinished")) == sorted([left.id, drill.id])
    assert _machines(report, "in use") == [mine.id]
    assert _machines(report, "without a rental") == [stray.id]
    assert _machines(report, "another workspace's") == [theirs.id]
    (gone,) = [one for one in report.findings if one.kind == "lost"]
    assert gone.rental is not None
    assert gone.rental.label == lost.label
    assert report.ended == []
    assert len(report.rows()) == 6
    assert [machine.id for machine in lab.machines()] == before
    assert _reconcile(lab).findings == report.findings


def test_a_machine_whose_rental_ends_meanwhile_is_not_lost(
    lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A hibernate ends it right after its machine has gone."""
    hibernated = lab.rent()
    assert hibernated.label is not None
    lab.market.destroy(hibernated, never_handed_over(hibernated, hibernated.label))
    read = Rentals.open

    def just_before(self: Rentals, *how: Any) -> list[Rental]:
        found = read(self, *how)
        for rental in found:
            self.change(rental, state="ended")
        return found

    monkeypatch.setattr(Rentals, "open", just_before)
    assert _reconcile(lab).findings == []


def test_a_machine_that_never_answers_again_is_ended_by_name_and_wake_comes_through(
    lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine = lab.rent()
    fill(lab.workspace(machine.id), random.Random(3))
    truth = facts(lab.workspace(machine.id))
    hibernate_plainly(lab.opened)
    left, rental = _left(lab)
    with monkeypatch.context() as patch:
        lab.market.silent.add(left.id)
        able = msgspec.structs.replace(lab.market.abilities, ready_s=0.5)
        patch.setattr(lab.market, "abilities", able)
        with pytest.raises(MachineUnreachable, match=r"nobody answers.*in `end` of reconcile"):
            wake_plainly(lab.opened, retries=0)
    assert [one.id for one in lab.machines()] == [left.id]  # unknown is not idle
    lab.market.silent.add(left.id)
    report = _reconcile(lab, end=[left.id])
    assert report.ended == [left.id]
    assert report.findings == []
    ended = {one.label for one in lab.opened.rentals.history()}
    assert ended == {machine.label, rental.label}
    assert lab.machines() == []
    woken = wake_plainly(lab.opened)
    assert not differences(truth, facts(lab.workspace(woken.machine)))
    report = _reconcile(lab)
    assert [(one.kind, one.machine and one.machine.id) for one in report.findings] == [
        ("in use", woken.machine)
    ]


def test_what_a_drill_left_is_ended_by_name_though_it_answers(lab: Lab) -> None:
    left, _ = _left(lab, reserved_name(DRILL, WORKSPACE))
    assert _reconcile(lab, end=[left.id]).ended == [left.id]
    assert lab.machines() == []


def test_where_one_of_the_named_may_not_be_ended_none_is(lab: Lab) -> None:
    mine, (answers, _), (dead, _) = lab.rent(), _left(lab), _silent(lab)
    with pytest.raises(UnsafeDestroy, match=f"{mine.id} was handed over"):
        _reconcile(lab, end=[dead.id, mine.id])
    with pytest.raises(InvalidInput, match="no machine 'm-nowhere'"):
        _reconcile(lab, end=[dead.id, "m-nowhere"])
    with pytest.raises(UnsafeDestroy, match=f"{answers.id} answers .its agent.*nothing was ended"):
        _reconcile(lab, end=[dead.id, answers.id])
    assert {machine.id for machine in lab.machines()} == {mine.id, answers.id, dead.id}


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
    lab: Lab, monkeypatch: pytest.MonkeyPatch, error: TorporError
) -> None:
    """It may hold a whole restore, and the user's work."""
    machine, _ = _left(lab)

    def refuses(*_: object, **__: object) -> None:
        raise error

    refused = replace(lab, opened=replace(lab.opened, log_in=refuses))
    with pytest.raises(UnsafeDestroy, match=f"answers .{error}.*use the provider's console"):
        _reconcile(refused, end=[machine.id])
    assert [one.id for one in lab.machines()] == [machine.id]


def test_a_starting_machine_is_not_ended(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    machine, _ = _left(lab)
    starting = msgspec.structs.replace(machine, state="starting", endpoint=None)
    monkeypatch.setattr(FolderMarket, "find", lambda *_: starting)
    with pytest.raises(UnsafeDestroy, match="is starting, so a run may be about to use it"):
        check_silent(lab.opened, machine)


@pytest.mark.parametrize("greets", [False, True])
def test_a_machine_is_not_ended_because_the_jump_host_before_it_lets_nobody_through(
    lab: Lab, monkeypatch: pytest.MonkeyPatch, greets: bool
) -> None:
    """Nothing listens there; or a server greets, and then resets each login."""
    machine, _ = _silent(lab)
    assert machine.endpoint is not None
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1] if greets else 1

        def serve() -> None:
            with suppress(OSError):
                while True:
                    peer, _ = server.accept()
                    peer.sendall(b"SSH-2.0-jump\r\n")
                    peer.close()

        threading.Thread(target=serve, daemon=True).start()
        jump = Endpoint("127.0.0.1", port, "jump", new_key_pair().public)
        endpoint = msgspec.structs.replace(machine.endpoint, jump=jump)
        behind = msgspec.structs.replace(machine, endpoint=endpoint)
        monkeypatch.setattr(FolderMarket, "find", lambda *_: behind)
        silent = r"the jump host before machine .* lets nobody through"
        with plain(lab.opened), pytest.raises(UnsafeDestroy, match=silent):
            check_silent(lab.opened, machine)
        server.shutdown(socket.SHUT_RDWR)


def test_a_machine_that_answers_again_meanwhile_is_not_ended(
    lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = _silent(lab)[0], _silent(lab)[0]
    destroy = FolderMarket.destroy

    def slow(self: FolderMarket, machine: Machine, warrant: Warrant) -> None:
        destroy(self, machine, warrant)
        if machine.id == first.id:
            lab.market.silent.remove(second.id)

    monkeypatch.setattr(FolderMarket, "destroy", slow)
    with pytest.raises(UnsafeDestroy, match=f"{second.id} answers"):
        _reconcile(lab, end=[first.id, second.id])
    assert [one.id for one in lab.machines()] == [second.id]


def test_a_machine_that_cannot_be_ended_does_not_stop_the_others(
    lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = _silent(lab)[0], _silent(lab)[0]
    destroy = FolderMarket.destroy

    def stubborn(self: FolderMarket, machine: Machine, warrant: Warrant) -> None:
        if machine.id != first.id:
            destroy(self, machine, warrant)

    with monkeypatch.context() as patch:
        patch.setattr(FolderMarket, "destroy", stubborn)
        patch.setattr(end_machine, "__kwdefaults__", {"within_s": 0.2})
        with pytest.raises(ProviderError, match=f"{first.id}.*not proven after"):
            _reconcile(lab, end=[first.id, second.id])
    assert [machine.id for machine in lab.machines()] == [first.id]
    assert _reconcile(lab, end=[first.id]).ended == [first.id]


@pytest.mark.parametrize("meanwhile", ["handed over", "ended"])
def test_a_machine_that_was_handed_over_by_the_time_of_its_destroy_is_left(
    lab: Lab, monkeypatch: pytest.MonkeyPatch, meanwhile: str
) -> None:
    machine, rental = _silent(lab)
    destroy = FolderMarket.destroy

    def slow(self: FolderMarket, machine: Machine, warrant: Warrant) -> None:
        with suppress(HandedOver):
            lab.opened.rentals.change(rental, state=meanwhile)
        destroy(self, machine, warrant)

    monkeypatch.setattr(FolderMarket, "destroy", slow)
    with pytest.raises(HandedOver, match=f"was {meanwhile} by another run"):
        _reconcile(lab, end=[machine.id])
    assert [one.id for one in lab.machines()] == [machine.id]


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
