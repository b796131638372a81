"""An adopted machine always holds work: nothing but the warrant of a verified snapshot ends it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from tests.fixtures.lab import Lab
from tests.fixtures.market import Market
from tests.fixtures.memory_store import MemoryStore
from tests.fixtures.rents import Rents
from torpor.control.reconciliation import choose_findings, compare
from torpor.control.rental import ending
from torpor.control.rental.adoption import provider_of
from torpor.control.rental.records import Rental, Rentals
from torpor.control.rental.renting import Renting
from torpor.control.rental.sweep import end_scratch
from torpor.control.safety import never_handed_over
from torpor.shared.errors import (
    HandedOver,
    InvalidInput,
    RunCancelled,
    StoreAway,
    StoreUnavailable,
    TorporError,
    UnsafeDestroy,
    WorkspaceBusy,
)
from torpor.shared.transfer.retries import Retries
from torpor.shared.values import DRILL, Label, Machine, MachineId, Want, WorkspaceName

replace = msgspec.structs.replace
HOST_KEY = "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIJxQ0OZzqlq0Jm2v4zGzVqk6pS1k0mWg2q0t0y3c2b1a"
Attempt = Callable[[Renting, Machine, Rental], Any]


def adopted(rents: Rents, **changes: Any) -> tuple[Machine, Rental]:
    """A machine that torpor did not rent, and its record; ``changes`` of the live machine."""
    label = rents.rentals.new_label("me")
    machine = Machine(MachineId("m-9"), rents.market.identity, label, "running", None, 2.0)
    rental = rents.rentals.adopt(label, machine, HOST_KEY, 2.0, "", Want())
    rents.market.alive[machine.id] = replace(machine, **changes)
    return machine, rental


def _fails_on_it(error: BaseException, *, claimed: bool) -> Attempt:
    """A run that took the machine for one that a killed run left, and fails."""

    def attempt(run: Renting, machine: Machine, rental: Rental) -> None:
        with run, run.tenancy(machine, replace(rental, state="standing")) as tenancy:
            if claimed:
                tenancy.holds_nothing_else()
            raise error

    return attempt


def _reconciles(run: Renting, machine: Machine, rental: Rental) -> None:
    shown = [live for live, _ in run.machines()]
    found = compare([machine.provider], [rental.label.workspace], [rental], shown, shown)
    ((chosen, of),) = choose_findings(found, [machine.id])
    run.end(of, None, chosen)


ATTEMPTS: dict[str, Attempt] = {
    "the end of what was never handed over": lambda run, machine, rental: run.end(rental),
    "a warrant without a snapshot": lambda run, machine, rental: run.end(
        rental, never_handed_over(machine, rental.label), machine
    ),
    "a failed wake": _fails_on_it(RuntimeError("the wake failed"), claimed=True),
    "a failed wake that claimed nothing": _fails_on_it(InvalidInput("no"), claimed=False),
    "a cancelled wake": _fails_on_it(KeyboardInterrupt(), claimed=True),
    "a job that is cancelled": _fails_on_it(RunCancelled("cancelled"), claimed=True),
    "a busy workspace": _fails_on_it(WorkspaceBusy("another run"), claimed=True),
    "the clean-up of abandoned attempts": lambda run, machine, rental: run.end_abandoned(),
    "a rental that a run took for its own": lambda run, machine, rental: (
        run.claim(rental),
        run.end_after(InvalidInput("failed"), [rental]),
    ),
    "reconcile with its id": _reconciles,
}


@pytest.mark.rule(2)
@pytest.mark.parametrize("live", [{}, {"state": "stopped"}, {"state": "starting"}, {"label": None}])
@pytest.mark.parametrize("attempt", ATTEMPTS.values(), ids=ATTEMPTS)
def test_nothing_ends_an_adopted_machine_without_a_snapshot(
    attempt: Attempt, live: dict[str, Any], rents: Rents
) -> None:
    for later_s in (0.0, 3600.0, 30 * 86_400.0):
        rents.later(0.0)
        machine, rental = adopted(rents, **live)
        rents.later(later_s)
        with suppress(TorporError, RuntimeError, KeyboardInterrupt, ValueError):
            attempt(rents.run(), machine, rental)
        assert [*rents.market.alive] == [machine.id]
        now = rents.rentals.of(rental.label)
        assert now is not None
        assert (now.state, now.adopted, now.failed) == ("handed over", True, False)
        rents.rentals.change(now, state="ended", why="the next turn")


def test_the_sweep_of_scratch_machines_ends_no_adopted_one(rents: Rents) -> None:
    machine, _ = adopted(rents)
    rents.later(30 * 86_400.0)
    end_scratch(rents.renter())
    assert [*rents.market.alive] == [machine.id]
    assert rents.states() == ["handed over"]


def test_one_that_was_given_up_during_its_end_is_left_alone(rents: Rents) -> None:
    machine, rental = adopted(rents)
    warrant: Any = SimpleNamespace(snapshot="20261120T000000Z-0a1b2c3d", is_accepted=False)
    rents.rentals.change(rental, state="ended", why="given up")
    with pytest.raises(HandedOver, match="given up"):
        rents.run().end(rental, warrant, machine)
    assert [*rents.market.alive] == [machine.id]


@pytest.mark.rule(2)
def test_it_is_handed_over_from_its_first_write(rents: Rents) -> None:
    _, rental = adopted(rents)
    assert (rental.state, rental.unfinished) == ("handed over", False)
    with pytest.raises(HandedOver):
        rents.rentals.check_unclaimed(rental.label)
    for state in ("asked", "standing", "abandoned"):
        with pytest.raises(HandedOver):
            rents.rentals.change(rental, state=state)


def test_no_machine_is_adopted_under_a_name_whose_machines_may_always_end(
    memory_store: MemoryStore,
) -> None:
    drills = Rentals(memory_store, WorkspaceName(f"{DRILL}demo"))
    machine = Machine(MachineId("m"), "vast:1", Label("me", drills.workspace, "1"), "running", None)
    with pytest.raises(UnsafeDestroy):
        drills.adopt(drills.new_label("me"), machine, HOST_KEY, 1.0, "", Want())
    assert drills.open() == []


def test_a_kill_before_the_mark_shows_what_to_do(rents: Rents) -> None:
    _, rental = adopted(rents, label=None)
    (found,) = compare([rental.provider], [rental.label.workspace], [rental], [], [])
    assert found.kind == "lost"
    assert "run `torpor adopt` again" in found.next_step


@pytest.mark.parametrize(
    ("wanted", "says"),
    [
        ("12345", "names no machine"),
        ("vast:", "names no machine"),
        ("nosuch:1", "names 0 of the accounts"),
        ("vast:1", "names 2 of the accounts"),
        ("local:1", "folders of this host"),
    ],
)
def test_what_cannot_be_adopted_is_refused_with_the_reason(wanted: str, says: str) -> None:
    names = ("vast://a", "vast://b", "local:///machines")
    every = [Market(name) for name in names]
    with pytest.raises(InvalidInput, match=says):
        provider_of(wanted, [], [], every)


def test_a_clean_up_waits_for_no_store_that_is_away(
    rents: Rents, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run has waited for as long as the block says, and each of its machines costs money."""
    waited: list[float] = []
    patient = Retries(patience_s=1800.0, sleep=waited.append, clock=lambda: sum(waited))

    def away(*_: object) -> None:
        raise StoreUnavailable("503 SlowDown")

    _, rental = adopted(rents)
    run = rents.run()
    run.claim(rental)
    monkeypatch.setattr(run, "end", lambda *_: patient.run(away))
    with pytest.raises(StoreAway, match="could not be destroyed either: 503 SlowDown"):
        run.end_after(StoreAway("GET pack: 503"), [rental, rental])
    assert sum(waited) < 120.0


def test_a_machine_that_has_ended_while_its_record_waited_is_proven_to_have(
    lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The time for its end is over, and the market shows it no more."""
    monkeypatch.setattr(ending.time, "sleep", lambda _: None)
    waited: list[float] = []
    patient = Retries(patience_s=1800.0, sleep=waited.append, clock=lambda: sum(waited))

    def away() -> None:
        raise StoreUnavailable("503 SlowDown")

    def record() -> None:
        with suppress(StoreUnavailable):
            patient.run(away)

    machine = lab.rent()
    (rental,) = lab.opened.rentals.open()
    warrant = never_handed_over(machine, rental.label)
    assert ending.destroy(lab.market, machine, warrant, rental, 0.0, accepts=record)
    assert sum(waited) < 120.0 and lab.machines() == []
