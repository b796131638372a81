"""Which machine a flow works on."""

from __future__ import annotations

import pytest

from tasks import machines
from tasks.machines import destroy_machine, find_machine, renting
from tests.fixtures.lab import Lab
from tests.fixtures.plain_flows import plain
from torpor.control.rental.order import order_for
from torpor.control.safety import Warrant, never_handed_over
from torpor.shared.errors import ProviderUnavailable
from torpor.shared.values import Machine


def _late(lab: Lab) -> Machine:
    """The machine of a request whose answer was lost; it shows by now."""
    lost = lab.record(state="abandoned")
    order = order_for(lab.market.on_sale[0], lost.label, lab.opened.identity.load())
    return lab.market.create(order)


def test_a_machine_that_nobody_will_use_is_ended_and_not_in_the_way(lab: Lab) -> None:
    with plain(lab.opened):
        mine = renting(lab.opened).rent(lab.market.on_sale)
        mine.hand_over()
        late = _late(lab)
        assert late.id in lab.market.alive
        assert find_machine(lab.opened, "").id == mine.machine.id
    assert [*lab.market.alive] == [mine.machine.id]
    assert lab.states() == ["ended", "handed over"]


def test_a_machine_that_nobody_will_use_is_not_in_the_way_where_it_cannot_be_ended(
    lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(machine: Machine, warrant: object) -> None:
        raise ProviderUnavailable("try again later")

    with plain(lab.opened):
        mine = renting(lab.opened).rent(lab.market.on_sale)
        mine.hand_over()
        late = _late(lab)
        monkeypatch.setattr(lab.market, "destroy", refuse)
        monkeypatch.setattr(machines, "AT_ONCE_S", 0.0)
        assert find_machine(lab.opened, "").id == mine.machine.id
    assert late.id in lab.market.alive
    assert lab.states() == ["abandoned", "handed over"]


def test_an_end_that_another_run_recorded_meanwhile_is_an_end(
    lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It saw that the machine had gone, while this run destroyed it."""
    with plain(lab.opened):
        tenancy = renting(lab.opened).rent(lab.market.on_sale)
        tenancy.hand_over()
        machine, rental = tenancy.machine, tenancy.rental
        assert rental is not None
        destroy = lab.market.destroy

        def and_another_sees_it(machine: Machine, warrant: Warrant) -> None:
            destroy(machine, warrant)
            lab.opened.rentals.change(rental, state="ended", why="it was gone")

        monkeypatch.setattr(lab.market, "destroy", and_another_sees_it)
        destroy_machine(lab.opened, machine, never_handed_over(machine, rental.label))
    assert lab.market.alive == {}
    assert lab.states() == ["ended"]
