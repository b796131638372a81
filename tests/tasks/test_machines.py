"""Which machine a flow works on."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import pytest

from tasks import machines
from tasks.jobs import machine_in_use
from tasks.machines import (
    chosen_machine,
    destroy_machine,
    left_unfinished,
    own_machine,
    renting,
)
from tasks.plain_runner import PlainRunner
from tests.fixtures.lab import Lab
from tests.fixtures.market import Market
from tests.fixtures.plain_flows import plain
from tests.fixtures.rentals import handed_over, standing
from torpor.control.rental.order import order_for
from torpor.control.safety import Warrant, never_handed_over
from torpor.shared.errors import InvalidInput, NotOurs, ProviderUnavailable, WorkspaceAwake
from torpor.shared.values import Machine, SnapshotId


def _late(lab: Lab) -> Machine:
    """The machine of a request whose answer was lost; it shows by now."""
    lost = lab.record(state="abandoned")
    order = order_for(lab.market.on_sale[0], lost.label, lab.opened.identity.load())
    return lab.market.create(order)


def test_a_machine_that_nobody_will_use_is_ended_and_not_in_the_way(lab: Lab) -> None:
    with plain(lab.opened):
        mine = lab.rent()
        late = _late(lab)
        assert late.id in lab.market.alive
        assert chosen_machine(lab.opened, "").id == mine.id
    assert [*lab.market.alive] == [mine.id]
    assert lab.states() == ["ended", "handed over"]


def test_a_machine_that_nobody_will_use_is_not_in_the_way_where_it_cannot_be_ended(
    lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(machine: Machine, warrant: object) -> None:
        raise ProviderUnavailable("try again later")

    with plain(lab.opened):
        mine = lab.rent()
        late = _late(lab)
        monkeypatch.setattr(lab.market, "destroy", refuse)
        monkeypatch.setattr(machines, "AT_ONCE_S", 0.0)
        assert chosen_machine(lab.opened, "").id == mine.id
    assert late.id in lab.market.alive
    assert lab.states() == ["abandoned", "handed over"]


def test_what_ends_machines_is_a_step_of_its_own_and_not_on_the_usual_way(lab: Lab) -> None:
    steps: list[str] = []
    with PlainRunner(lab.opened, before=steps.append):
        with pytest.raises(InvalidInput, match="on no machine"):
            chosen_machine(lab.opened, "")
        mine = lab.rent()
        del steps[:]
        assert chosen_machine(lab.opened, "").id == mine.id
        assert steps == ["find machines"]
        _late(lab)
        chosen_machine(lab.opened, "")
        assert steps[1:] == ["find machines", "end abandoned machines"]
        assert [*lab.market.alive] == [mine.id]


def test_an_end_that_another_run_recorded_meanwhile_is_an_end(
    lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It saw that the machine had gone, while this run destroyed it."""
    with plain(lab.opened):
        machine, rental = handed_over(lab.opened)
        destroy = lab.market.destroy

        def and_another_sees_it(machine: Machine, warrant: Warrant) -> None:
            destroy(machine, warrant)
            lab.opened.rentals.change(rental, state="ended", why="it was gone")

        monkeypatch.setattr(lab.market, "destroy", and_another_sees_it)
        destroy_machine(lab.opened, machine, never_handed_over(machine, rental.label))
    assert lab.market.alive == {}
    assert lab.states() == ["ended"]


def test_a_machine_of_a_wake_that_still_runs_is_not_said_to_be_left(lab: Lab) -> None:
    with plain(lab.opened):
        standing(lab.opened)
        with pytest.raises(InvalidInput, match=r"still runs, or did not finish\. Wait, or run it"):
            chosen_machine(lab.opened, "")


def test_a_machine_that_is_being_ended_is_no_place_to_work(lab: Lab) -> None:
    """Its provider accepted the end and may take hours. It may hold work that is not stored."""
    with plain(lab.opened):
        held, machine = renting(lab.opened), lab.rent()
        _is_stopping(lab, machine)
        with pytest.raises(InvalidInput, match="is being ended: its rent was cancelled") as told:
            left_unfinished(lab.opened, held, alone=True)
        assert "work there, or" not in str(told.value)
        assert chosen_machine(lab.opened, "").id == machine.id  # hibernate may store it


def test_a_machine_that_its_market_stopped_is_no_place_to_work_and_none_is_rented_beside_it(
    lab: Lab,
) -> None:
    """It cannot be hibernated either while it is stopped."""
    with plain(lab.opened):
        held, machine = renting(lab.opened), lab.rent()
        for note, words in (
            ("the account has no credit", "stopped: the account has no credit. No other"),
            ("", "stopped: its market does not say why. .* start the machine in the market's"),
        ):
            stopped = msgspec.structs.replace(machine, state="stopped", endpoint=None, note=note)
            lab.market.alive[machine.id] = stopped
            with pytest.raises(WorkspaceAwake, match=words) as told:
                left_unfinished(lab.opened, held, alone=True)
            assert "work there, or" not in str(told.value)


def test_a_wake_passes_over_a_machine_that_is_being_ended_with_its_work_stored(lab: Lab) -> None:
    with plain(lab.opened):
        held, (old, rental) = renting(lab.opened), handed_over(lab.opened)
        _is_stopping(lab, old)
        lab.opened.rentals.change(rental, snapshot=SnapshotId("s-1"))
        assert left_unfinished(lab.opened, held, alone=True) == []
        with pytest.raises(InvalidInput, match="on no machine"):
            chosen_machine(lab.opened, "")
        assert chosen_machine(lab.opened, "", to_store=True).id == old.id
        assert machine_in_use(lab.opened, None) is None
        assert machine_in_use(lab.opened, old.id) is not None
        again = renting(lab.opened)
        again.machines()
        new = again.rent(lab.market.on_sale)
        new.hand_over(alone=True)
        for to_store in (False, True):
            assert chosen_machine(lab.opened, "", to_store).id == new.machine.id
        with pytest.raises(InvalidInput, match=f"already on machine {new.machine.id}"):
            left_unfinished(lab.opened, held, alone=True)


def test_a_wake_refuses_a_machine_without_a_rental_and_waits_where_that_has_just_ended(
    lab: Lab,
) -> None:
    with plain(lab.opened):
        held = renting(lab.opened)
        machine, rental = handed_over(lab.opened)
        lab.opened.rentals.change(rental, state="ended", why="it was gone")
        with pytest.raises(WorkspaceAwake, match=f"already on machine {machine.id}"):
            left_unfinished(lab.opened, held, alone=True)
        lab.market.alive[machine.id] = msgspec.structs.replace(
            machine, label=lab.opened.rentals.new_label("me")
        )
        with pytest.raises(NotOurs, match="has no rental for it"):
            left_unfinished(lab.opened, held, alone=True)


@pytest.mark.rule(5)
def test_nothing_is_rented_while_no_block_reaches_the_machine_of_an_open_rental(lab: Lab) -> None:
    """Its block was deleted, or names another account now: the machine may hold the newest work."""
    with plain(lab.opened):
        machine, rental = handed_over(lab.opened)
    other = replace(lab.opened, providers=(Market("runpod:2"),))
    with plain(other):
        for look in (
            lambda: left_unfinished(other, renting(other), alone=True),
            lambda: left_unfinished(other, renting(other), alone=False),
            lambda: machine_in_use(other, machine.id),
            lambda: chosen_machine(other, ""),
        ):
            with pytest.raises(InvalidInput, match="no provider block is for vast:1") as told:
                look()
            assert machine.id in str(told.value)
            assert f"--gone {rental.label.rental}`" in str(told.value)
        lab.opened.rentals.change(rental, snapshot=SnapshotId("s-1"))  # its end was accepted
        assert left_unfinished(other, renting(other), alone=True) == []


@pytest.mark.rule(5)
def test_a_block_that_the_workspace_does_not_name_shows_a_machine_under_its_new_name(
    lab: Lab,
) -> None:
    with plain(lab.opened):
        mine = lab.rent()
    after = Market("vast:after")
    after.alive[mine.id] = msgspec.structs.replace(mine, provider="vast:after")
    other = replace(lab.opened, providers=(Market("runpod:2"),), others=lambda: [after])
    with plain(other), pytest.raises(WorkspaceAwake, match=f"{mine.id} at vast:after"):
        left_unfinished(other, renting(other), alone=True)


def _is_stopping(lab: Lab, machine: Machine) -> None:
    seen = msgspec.structs.replace(machine, state="stopping", note="its rent was cancelled")
    lab.market.alive[machine.id] = seen


@pytest.mark.parametrize(
    ("text", "user", "host", "port"),
    [
        ("root@::1", "root", "::1", 22),
        ("root@[::1]", "root", "::1", 22),
        ("ssh://root@[2001:db8::7]:2222", "root", "2001:db8::7", 2222),
        ("root@fe80::1%eth0", "root", "fe80::1%eth0", 22),
        ("joe@corp.example@10.0.0.1", "joe@corp.example", "10.0.0.1", 22),
        ("user:target@bastion:2022", "user:target", "bastion", 2022),
        (" ubuntu@gpu.example:2222\n", "ubuntu", "gpu.example", 2222),
        ("me@192.0.2.1", "me", "192.0.2.1", 22),
    ],
)
def test_an_address_is_read_as_its_user_means_it(
    text: str, user: str, host: str, port: int
) -> None:
    endpoint = own_machine(text).endpoint
    assert endpoint is not None
    assert (endpoint.user, endpoint.host, endpoint.port) == (user, host, port)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("ssh -p 2222 root@gpu.example", r"Of that command: root@gpu\.example:2222$"),
        ("ssh root@gpu.example -p2222 -i ~/.ssh/id", r"Of that command: root@gpu\.example:2222$"),
        ("ssh root@gpu.example", r"Of that command: root@gpu\.example$"),
        ("root@gpu.example -p 2222", "write user@host"),
        ("root@::1:22:x", "IPv6 as user@"),
        ("root@a:b:22", "write user@host"),
        ("root@[gpu]:22", "write user@host"),
        ("-oProxyCommand=x@host", "write user@host"),
    ],
)
def test_what_is_no_address_is_refused_at_once(text: str, words: str) -> None:
    with pytest.raises(InvalidInput, match=words):
        own_machine(text)
