"""Attempts over offers, what becomes of lost answers, and ends that are proven."""

from __future__ import annotations

import itertools
import time
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import msgspec
import pytest

from tests.fixtures.market import H100, Market
from tests.fixtures.memory_store import MemoryStore
from tests.fixtures.rents import IDENTITY, Rents
from torpor.control.providers.provider import Order, Residue
from torpor.control.rental import ending, renting
from torpor.control.rental.markets import Markets
from torpor.control.rental.order import order_for
from torpor.control.rental.records import Rentals, with_host_key
from torpor.control.rental.sweep import close_if_gone
from torpor.control.safety import never_handed_over
from torpor.shared.errors import (
    CreateFailed,
    CreateUncertain,
    EndUnproven,
    HandedOver,
    InvalidInput,
    MachineUnreachable,
    MachineUnread,
    NoCapacity,
    OrderUnpaid,
    ProviderDenied,
    ProviderError,
    ProviderUnavailable,
    QuotaReached,
    RunCancelled,
    StoreUnavailable,
    TorporError,
    UnexpectedAnswer,
    WorkspaceBusy,
)
from torpor.shared.values import DRILL, Endpoint, Machine, SnapshotId, WorkspaceName, reserved_name

replace = msgspec.structs.replace
LOST = CreateUncertain("the connection was reset")


def test_a_machine_stands_is_handed_over_and_ends_by_a_warrant(rents: Rents) -> None:
    with rents.run() as run:
        tenancy = run.rent(rents.market.on_sale)
        rental = rents.open()
        assert (rental.state, rental.machine) == ("standing", tenancy.machine.id)
        assert tenancy.machine.endpoint == Endpoint("127.0.0.1", 22, "root", rental.host_key)
        assert rental.host_key is not None
        with tenancy:
            tenancy.hand_over()
    (machine,) = rents.market.list_own()
    rental = rents.open()
    assert (rental.state, rental.machine) == ("handed over", machine.id)
    with pytest.raises(HandedOver):
        run.end(rental)
    run.end(rental, never_handed_over(machine, rental.label))
    assert rents.market.alive == {}
    assert rents.ended().why == "404, and not in the list"


@pytest.mark.rule(5)
def test_what_was_not_handed_over_ends_with_the_run(rents: Rents) -> None:
    with rents.run() as run:
        run.rent(rents.market.on_sale)
        run.rent(rents.market.on_sale)
    assert rents.market.alive == {}
    assert rents.states() == ["ended", "ended"]


def test_the_record_says_when_a_machine_was_last_in_the_queue(
    rents: Rents, monkeypatch: pytest.MonkeyPatch
) -> None:
    rents.change_market(queue_s=3600.0)
    find = rents.market.find
    shown = itertools.chain(["queued"] * 3, itertools.repeat("running"))
    monkeypatch.setattr(rents.market, "find", lambda id: replace(find(id), state=next(shown)))
    with rents.run() as run:
        tenancy = run.rent(rents.market.on_sale, nap=lambda _: None)
        queued_unix = rents.open().queued_unix
        assert queued_unix is not None
        tenancy.hand_over()
    assert (rents.open().state, rents.open().queued_unix) == ("handed over", queued_unix)


@pytest.mark.rule(5)
def test_a_lost_answer_is_abandoned_and_never_sent_again(rents: Rents) -> None:
    """The machine appears in a listing later, and is ended then."""
    market = rents.market
    rents.change_market(settling_s=600.0)
    market.hidden, market.proofs = 1, False
    market.faults, market.after = [LOST], True
    with rents.run() as run:
        run.rent(market.on_sale * 2).hand_over()
        assert len({order.token for order in market.orders}) == 2
    lost, kept = (order.label for order in market.orders)
    states = {rental.label: rental.state for rental in rents.rentals.open()}
    assert states == {lost: "abandoned", kept: "handed over"}
    assert len(market.alive) == 2
    market.proofs = True
    assert [rental.label for rental in rents.run().end_abandoned()] == [lost]
    assert [machine.label for machine in market.alive.values()] == [kept]


@pytest.mark.rule(5)
def test_a_lost_answer_without_a_machine_closes_after_two_listings_once_settled(
    rents: Rents,
) -> None:
    rents.change_market(settling_s=600.0)
    rents.market.faults = [LOST]
    run = rents.run()
    with pytest.raises(CreateFailed):
        run.rent(rents.market.on_sale)
    for later_s, still in ((300, True), (700, True), (900, True), (1400, False)):
        rents.later(later_s)
        run.end_abandoned()
        assert bool(rents.rentals.open()) is still, later_s
    assert "two listings" in rents.ended().why


def test_a_machine_that_appears_between_the_two_listings_is_ended(rents: Rents) -> None:
    rents.change_market(settling_s=600.0)
    rents.market.hidden = 2
    rents.market.faults, rents.market.after = [LOST], True
    run = rents.run()
    with pytest.raises(CreateFailed):
        run.rent(rents.market.on_sale)
    for later_s in (700, 1400):
        rents.later(later_s)
        run.end_abandoned()
    assert rents.market.alive == {}
    assert rents.states() == ["ended"]


@pytest.mark.rule(5)
def test_a_machine_that_goes_without_us_closes_its_rental_by_the_proof(rents: Rents) -> None:
    """A spot machine that was taken back. Nothing is destroyed; while it may live, nothing ends."""
    rents.change_market(settling_s=600.0)
    rents.handed_over()
    rents.heard.events.clear()

    def look(later_s: float) -> list[str]:
        rents.later(later_s)
        rents.run().end_abandoned()
        assert rents.heard.events == []
        return rents.states()

    assert look(900) == ["handed over"]  # it is listed
    rents.market.alive.clear()
    assert look(300) == ["handed over"]  # it may be missing from answers still
    rents.market.proofs = False
    assert look(900) == ["handed over"]  # absent is not gone
    rents.market.proofs = True
    assert look(1000) == ["ended"]
    assert rents.ended().why.startswith("it was gone: ")


@pytest.mark.rule(5)
@pytest.mark.parametrize(
    "error",
    [KeyError("a bug"), UnexpectedAnswer("a list?"), RunCancelled("stop"), KeyboardInterrupt()],
)
def test_any_other_error_of_a_create_is_a_lost_answer(error: BaseException, rents: Rents) -> None:
    rents.market.faults, rents.market.after = [error], True
    with pytest.raises((type(error), CreateFailed)), rents.run() as run:
        run.rent(rents.market.on_sale)
    assert rents.market.alive == {}
    assert rents.ended().machine == "m1"


@pytest.mark.parametrize(
    ("error", "is_failure", "why"),
    [
        (CreateFailed("no"), True, "nothing was rented: no"),
        (NoCapacity("no"), True, "nothing was rented: no"),
        (QuotaReached("no"), False, "nothing was rented: no"),
        (ProviderDenied("no"), False, "nothing was rented: no"),
        (InvalidInput("no"), False, "nothing was rented: no"),
        (ProviderUnavailable("no"), False, "nothing was rented: no"),
        (MachineUnreachable("no"), True, "404, and not in the list"),
        (CreateUncertain("no"), False, "404, and not in the list"),
    ],
)
def test_the_record_says_what_failed_and_whether_the_market_did(
    error: TorporError, is_failure: bool, why: str, rents: Rents
) -> None:
    rents.market.faults, rents.market.after = [error], "nothing" not in why
    with pytest.raises((CreateFailed, InvalidInput)), rents.run() as run:
        run.rent(rents.market.on_sale)
    assert (rents.ended().failed, rents.ended().why) == (is_failure, why)


def test_a_machine_whose_market_lost_our_label_is_not_used_and_stays_on_record(
    rents: Rents, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torpor may not end it, so the user must hear of it until it is gone."""
    made = rents.market.create

    def create(order: Order) -> Machine:
        machine = made(order)
        rents.market.alive[machine.id] = replace(machine, label=None)
        return machine

    monkeypatch.setattr(rents.market, "create", create)
    rents.change_market(ready_s=0.0)
    run = rents.run()
    with pytest.raises(EndUnproven, match="does not show the label"):
        run.rent(rents.market.on_sale, nap=lambda _: None)
    rental = rents.open()
    assert (rental.state, rental.machine) == ("abandoned", "m1")
    assert list(rents.market.alive) == ["m1"]
    rents.market.alive.clear()
    run.end(rental)
    assert rents.states() == ["ended"]


def test_the_next_offer_is_tried_but_not_in_a_domain_that_is_blocked(rents: Rents) -> None:
    def offer(id: str, **changes: Any) -> Any:
        return replace(H100, id=id, **changes)

    rents.market.faults = [NoCapacity("sold out"), QuotaReached("none left"), LOST]
    offers = [
        offer("1"),
        offer("2"),  # of the same domain
        offer("3", domain="b"),
        offer("4", domain="c"),  # of the same region and GPU
        offer("5", domain="d", region="EU"),
        offer("6", domain="d", region="EU"),
    ]
    run = rents.run()
    tenancy = run.rent(offers)
    assert [order.offer.id for order in rents.market.orders] == ["1", "3", "5", "6"]
    assert [tried.outcome for tried in run.tried] == [
        "sold out",
        "not tried: sold out",
        "none left",
        "not tried: none left",
        "the connection was reset",
        f"machine {tenancy.machine.id}",
    ]


def test_attempts_are_bounded_in_number_and_time(
    rents: Rents, monkeypatch: pytest.MonkeyPatch
) -> None:
    rents.market.faults = [CreateFailed("no")] * 50
    with pytest.raises(CreateFailed, match=rf"of 50 offers.* {renting.MOST_ATTEMPTS} were tried"):
        rents.run().rent([H100] * 50)
    quarters = itertools.count(0, renting.RENT_S / 4)
    clock = SimpleNamespace(monotonic=lambda: next(quarters), time=time.time)
    monkeypatch.setattr(renting, "time", clock)
    with pytest.raises(CreateFailed, match=r"of 50 offers.* 4 were tried"):
        rents.run().rent([H100] * 50)


def test_a_busy_provider_is_waited_for_and_does_not_end_the_run(rents: Rents) -> None:
    busy = ProviderUnavailable("429")
    busy.retry_after_s = 7.0
    rents.market.faults, naps = [busy, busy], list[float]()
    rents.run().rent(rents.market.on_sale, naps.append)
    assert naps == [7.0, 7.0]
    assert rents.states() == ["ended", "ended", "standing"]  # each was an attempt of its own


@pytest.mark.parametrize("error", [ProviderUnavailable("down"), CreateUncertain("no answer")])
def test_a_market_that_does_not_answer_is_asked_again_after_all_others(
    error: TorporError, rents: Rents
) -> None:
    """Each question to a market that hangs takes minutes, and it may have many cheap offers."""
    good = Market("lambda:2")
    rents.market.faults, good.faults = [error], [CreateFailed("no")]
    cheap = [replace(H100, id=name, domain=name) for name in ("a", "b")]
    run = rents.run(rents.market, good)
    run.rent([*cheap, *good.on_sale])
    assert [(tried.provider, tried.offer) for tried in run.tried] == [
        ("vast:1", "a"),
        ("lambda:2", "1"),
        ("vast:1", "b"),
    ]


def test_a_machine_that_never_answers_is_ended_and_the_next_offer_tried(
    rents: Rents, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fault(*_: object) -> str | None:
        return "it shows another host key" if len(rents.market.orders) == 1 else None

    monkeypatch.setattr(renting, "greeting_fault", fault)
    rents.change_market(ready_s=0.0)
    tenancy = rents.run().rent([H100, H100], nap=lambda _: None)
    assert tenancy.machine.id == "m2"
    assert list(rents.market.alive) == ["m2"]
    assert [rental.machine for rental in rents.rentals.history()] == ["m1"]


def test_an_unpaid_order_stays_abandoned_and_no_other_offer_is_tried(rents: Rents) -> None:
    """A payment would start its server, and each further order would leave one more invoice."""
    rents.change_market(settling_s=600.0)
    rents.market.faults = [OrderUnpaid("invoice 7")] * 12
    with pytest.raises(CreateFailed, match="1 were tried"):
        rents.run().rent(rents.market.on_sale * 12)
    assert len(rents.market.orders) == 1
    assert rents.states() == ["abandoned"]


@pytest.mark.rule(5)
@pytest.mark.parametrize("trouble", ["no proof", "answered and not done"])
def test_an_end_without_a_proof_is_no_end(trouble: str, rents: Rents) -> None:
    """Absent is not gone: AWS says NotFound of machines that live."""
    run = rents.run()
    run.rent(rents.market.on_sale)
    rents.market.proofs, rents.market.immortal = trouble != "no proof", trouble != "no proof"
    with pytest.raises(ProviderError, match=r"not proven after 0 s.*may still cost money"):
        run.end(rents.open(), within_s=0.1)
    assert rents.states() == ["standing"]
    rents.market.proofs, rents.market.immortal = True, False
    run.end(rents.open())
    assert rents.states() == ["ended"]


def test_an_end_that_takes_hours_keeps_the_rental_open_and_names_the_snapshot(
    rents: Rents, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ending, "SLOW_S", 0.0)
    rents.market.slow = True
    rents.change_market(ending_s=12 * 3600.0)
    rental = rents.handed_over()
    (machine,) = rents.market.list_own()
    warrant = never_handed_over(machine, rental.label)
    object.__setattr__(warrant, "snapshot", SnapshotId("s-1"))
    with pytest.raises(EndUnproven, match=r"accepted and may take up to 12 h .* do not work on it"):
        rents.run().end(rental, warrant)
    assert (rents.open().state, rents.open().snapshot) == ("handed over", "s-1")
    rents.market.alive.clear()
    assert [ended.label for ended in rents.run().end_abandoned()] == [rental.label]
    assert (rents.ended().state, rents.ended().snapshot) == ("ended", "s-1")


@pytest.mark.rule(5)
@pytest.mark.parametrize("killed", [True, False])
def test_an_accepted_end_that_is_not_carried_out_leaves_no_snapshot_on_record(
    rents: Rents, monkeypatch: pytest.MonkeyPatch, killed: bool
) -> None:
    """Its user may work there again: what is lost later is in no snapshot."""

    def interrupted(seconds: float) -> None:
        raise KeyboardInterrupt

    rents.market.immortal = True
    rental = rents.handed_over()
    (machine,) = rents.market.list_own()
    warrant = never_handed_over(machine, rental.label)
    object.__setattr__(warrant, "snapshot", SnapshotId("s-1"))
    if killed:
        monkeypatch.setattr(ending.time, "sleep", interrupted)
    with pytest.raises(KeyboardInterrupt if killed else EndUnproven):
        rents.run().end(rental, warrant, within_s=0.1)
    assert (rents.open().state, rents.open().snapshot) == ("handed over", "s-1" if killed else None)
    close_if_gone(rents.renter(), rents.open(), shown=machine)
    assert rents.open().snapshot is None
    rents.market.alive.clear()
    rents.run().end_abandoned()
    assert rents.ended().snapshot is None


@pytest.mark.rule(5)
def test_a_proof_before_the_provider_has_settled_is_none(
    rents: Rents, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A machine that was just created is not listed yet, and its id is answered with 404."""
    rents.market.hidden = 100
    rents.change_market(settling_s=600.0, ready_s=0.0)
    monkeypatch.setattr(renting, "AT_ONCE_S", 0.0)
    with pytest.raises(EndUnproven, match="no other machine is rented"):
        rents.run().rent(rents.market.on_sale * 2, nap=lambda _: None)
    assert rents.states() == ["abandoned"], "the machine may appear, and no second one was rented"


@pytest.mark.rule(5)
def test_what_outlived_its_machine_is_ended_too(rents: Rents) -> None:
    run = rents.run()
    run.rent(rents.market.on_sale)
    rental = rents.open()
    disk = Residue(id="d", provider=rents.market.identity, kind="disk", label=rental.label)
    rents.market.left_over = [disk]
    rents.market.alive.clear()
    run.end(rental)
    assert rents.market.left_over == []
    assert rents.states() == ["ended"]


@pytest.mark.rule(5)
def test_if_the_end_fails_too_both_causes_are_named_and_it_is_abandoned(rents: Rents) -> None:
    with (
        pytest.raises(MachineUnreachable, match=r"lost it.*could not be destroyed either.*denied"),
        rents.run() as run,
        run.rent(rents.market.on_sale),
    ):
        rents.market.away = ProviderDenied("denied")
        raise MachineUnreachable("lost it")
    assert rents.states() == ["abandoned"]


def test_a_lost_answer_of_a_market_that_stays_silent_fails_no_run(
    rents: Rents, monkeypatch: pytest.MonkeyPatch
) -> None:
    silent, good = rents.market, Market("lambda:2")
    silent.faults, silent.after = [LOST], True
    silent.away = ProviderUnavailable("down")
    monkeypatch.setattr(renting, "AT_ONCE_S", 0.0)
    monkeypatch.setattr(ending, "GONE_S", 0.0)
    offers = [*silent.on_sale, *good.on_sale]
    with rents.run(silent, good) as run:
        run.rent(offers).hand_over()
    assert {rental.provider: rental.state for rental in rents.rentals.open()} == {
        "vast:1": "abandoned",
        "lambda:2": "handed over",
    }
    assert "down" in rents.heard.warnings[-1]
    with pytest.raises(KeyError), rents.run(silent, good) as run:
        silent.faults = [LOST]
        run.rent(offers)
        raise KeyError("the restore failed")
    assert rents.states().count("abandoned") == 2
    silent.away = None
    rents.run(silent, good).end_abandoned()
    assert silent.alive == {}
    assert len(good.alive) == 1


def test_a_machine_that_another_run_works_on_is_left(rents: Rents) -> None:
    with pytest.raises(WorkspaceBusy), rents.run() as run, run.rent(rents.market.on_sale):
        raise WorkspaceBusy("another run holds it")
    assert len(rents.market.alive) == 1
    assert rents.states() == ["standing"]


@pytest.mark.rule(5)
def test_what_another_run_left_is_ended_only_once_it_is_claimed(rents: Rents) -> None:
    """It may hold that run's restore: only its agent knows."""
    rents.run().rent(rents.market.on_sale)
    run = rents.run()
    ((machine, rental),) = run.machines()
    left = run.tenancy(machine, rental)
    with pytest.raises(KeyError), run, run.take_up(left) as tenancy:
        assert not tenancy.fresh
        raise KeyError("it failed before the agent was asked")
    assert len(rents.market.alive) == 1
    with pytest.raises(KeyError), run, run.take_up(left) as tenancy:
        tenancy.holds_nothing_else()
        raise KeyError("it failed afterwards")
    assert rents.market.alive == {}


@pytest.mark.parametrize("job", ["", "5d1e8a77b2c3"], ids=["a person", "the next job"])
def test_what_another_run_left_is_rented_for_the_job_of_the_run_that_takes_it_up(
    rents: Rents, job: str
) -> None:
    """Also where that one is killed before it hands it over."""
    rents.run(job="3f2a9c81d04e").rent(rents.market.on_sale)
    run = rents.run(job=job)
    ((machine, rental),) = run.machines()
    tenancy = run.take_up(run.tenancy(machine, rental))
    assert (rents.open().state, rents.open().job) == ("standing", job)
    tenancy.hand_over()
    assert (rents.open().state, rents.open().job) == ("handed over", job)


def test_what_one_run_took_up_first_is_of_the_job_of_the_one_that_hands_it_over(
    rents: Rents,
) -> None:
    rents.run().rent(rents.market.on_sale)
    first, second = rents.run(job="3f2a9c81d04e"), rents.run(job="5d1e8a77b2c3")
    ((machine, rental),) = first.machines()
    first.take_up(first.tenancy(machine, rental))
    late = second.take_up(second.tenancy(machine, rental))
    assert rents.open().job == "3f2a9c81d04e"
    late.hand_over()
    assert rents.open().job == "5d1e8a77b2c3"


@pytest.mark.parametrize("job", ["3f2a9c81d04e", "5d1e8a77b2c3"], ids=["its own", "another"])
@pytest.mark.parametrize("does", ["hands over", "abandons"])
def test_what_another_run_has_taken_up_since_is_left_to_that_one(
    rents: Rents, does: str, job: str
) -> None:
    """As reconcile does, which goes on with no machine."""
    rents.run(job="3f2a9c81d04e").rent(rents.market.on_sale)
    first = rents.run(job="3f2a9c81d04e")
    ((machine, rental),) = first.machines()
    with pytest.raises(HandedOver, match="may go on with its machine"), first:
        tenancy = first.take_up(first.tenancy(machine, rental))
        second = rents.run(job=job)
        second.take_up(second.tenancy(*second.machines()[0]))
        with tenancy:
            tenancy.hand_over(untaken=True) if does == "hands over" else tenancy.abandon("killed")
    assert (rents.open().state, rents.open().job) == ("standing", job)
    assert len(rents.market.alive) == 1


def test_what_is_abandoned_is_taken_up_by_no_other_run_and_ended(rents: Rents) -> None:
    rents.run().rent(rents.market.on_sale)
    first, second = rents.run(), rents.run()
    ((machine, rental),) = first.machines()
    with pytest.raises(KeyError), first, first.take_up(first.tenancy(machine, rental)) as tenancy:
        tenancy.abandon("its run was killed")
        with pytest.raises(HandedOver, match="was abandoned by another run"):
            second.take_up(second.tenancy(machine, rental))
        raise KeyError("it restored nothing")
    assert rents.market.alive == {} and rents.ended().why == "404, and not in the list"


def test_what_was_created_by_a_run_that_was_killed_before_it_knew_is_taken_up(
    rents: Rents,
) -> None:
    label = rents.rentals.new_label("me")
    rents.rentals.begin(label, H100, None)
    rents.market.create(order_for(H100, label, IDENTITY))
    run = rents.run()
    ((machine, rental),) = run.machines()
    with run.take_up(run.tenancy(machine, rental)) as tenancy:
        assert rents.states() == ["standing"]
        tenancy.hand_over()
    assert rents.states() == ["handed over"]


def test_one_that_was_left_and_never_answers_is_not_ended(rents: Rents) -> None:
    rents.run().rent(rents.market.on_sale)
    run = rents.run()
    ((machine, rental),) = run.machines()
    rents.market.alive[machine.id] = replace(machine, state="stopped")
    with pytest.raises(CreateFailed, match="name it in `end` of reconcile"), run:
        run.take_up(run.tenancy(machine, rental))
    assert len(rents.market.alive) == 1


def test_an_unfinished_rental_whose_machine_has_provably_gone_is_closed(rents: Rents) -> None:
    rents.run().rent(rents.market.on_sale)
    later = rents.run()
    assert later.end_abandoned() == []
    rents.market.alive.clear()
    rents.market.proofs = False
    assert later.end_abandoned() == []
    rents.market.proofs = True
    assert len(later.end_abandoned()) == 1


@pytest.mark.rule(5)
def test_end_abandoned_ends_nothing_that_was_handed_over(rents: Rents) -> None:
    rents.handed_over()
    assert rents.run().end_abandoned() == []
    assert len(rents.market.alive) == 1


@pytest.mark.rule(8)
def test_a_host_key_of_the_first_login_is_the_rental_s_only_one(rents: Rents) -> None:
    """Not the address's: the next machine there has another key."""
    rents.change_market(host_key="first use")
    run = rents.run()
    machine = run.rent(rents.market.on_sale).machine
    label = rents.open().label
    assert rents.open().host_key is None
    rents.rentals.pin(label, "ssh-ed25519 AAAA")
    rents.rentals.pin(label, "ssh-ed25519 BBBB")
    assert with_host_key(machine, rents.open()).endpoint.host_key == "ssh-ed25519 AAAA"
    other = run.rent(rents.market.on_sale)  # at the same address
    assert other.machine.endpoint.host_key is None


def test_nothing_is_rented_while_the_store_is_away(rents: Rents, memory_store: MemoryStore) -> None:
    memory_store.fails = StoreUnavailable("503")
    with pytest.raises(StoreUnavailable), rents.run() as run:
        run.rent(rents.market.on_sale)
    assert rents.market.orders == []


def test_a_scratch_machine_ends_also_while_the_store_is_away(
    rents: Rents, memory_store: MemoryStore
) -> None:
    rentals = Rentals(memory_store, reserved_name(DRILL, WorkspaceName("demo")))
    with pytest.raises(StoreUnavailable), rents.run(rentals=rentals) as run:
        run.rent(rents.market.on_sale)
        memory_store.fails = StoreUnavailable("503")
    assert rents.market.alive == {}


def test_machines_of_open_rentals_are_found_at_providers_that_the_workspace_no_longer_names(
    rents: Rents,
) -> None:
    rents.handed_over()
    other = Market("lambda:2")
    moved = rents.run(markets=Markets([other], lambda: [rents.market]))
    assert [machine.provider for machine, _ in moved.machines()] == [rents.market.identity]
    other.away = ProviderUnavailable("down")  # no open rental names it
    assert len(moved.machines()) == 1
    other.away, rents.market.away = None, ProviderUnavailable("down")
    with pytest.raises(ProviderUnavailable):
        moved.machines()


def test_a_market_that_is_silent_says_nothing_of_its_machines(rents: Rents) -> None:
    run = rents.run(rents.market, Market("lambda:2"))
    tenancy = run.rent(rents.market.on_sale)
    assert run.states() == {tenancy.machine.id: "running"}
    rents.market.away = ProviderUnavailable("down")
    with pytest.raises(ProviderUnavailable):
        run.states()


@pytest.mark.parametrize("trouble", ["the key was revoked", "answered and not done", "away"])
def test_no_second_machine_is_rented_while_the_first_can_neither_be_used_nor_ended(
    trouble: str, rents: Rents, monkeypatch: pytest.MonkeyPatch
) -> None:
    market = rents.market

    def fault(*_: object) -> str:
        if trouble == "the key was revoked":
            market.away = ProviderDenied("401")
        elif trouble == "away":
            market.away = ProviderUnavailable("503")
        market.immortal = True
        return "nobody answers"

    monkeypatch.setattr(renting, "greeting_fault", fault)
    monkeypatch.setattr(renting, "AT_ONCE_S", 0.0)
    rents.change_market(ready_s=0.1)
    words = r"m1 .*neither be used .* nor be ended .*4\.000 \$/h.*reconcile demo --abandoned"
    with pytest.raises(EndUnproven, match=words):
        rents.run().rent(market.on_sale * 3, nap=lambda _: None)
    assert list(market.alive) == ["m1"], "a second machine was rented"
    assert (rents.open().state, rents.open().machine) == ("abandoned", "m1")
    market.away, market.immortal = None, False
    rents.run().end_abandoned()
    assert market.alive == {}


def test_a_machine_whose_end_its_market_has_accepted_keeps_nobody_from_the_next_offer(
    rents: Rents, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fault(*_: object) -> str | None:
        return "nobody answers" if len(rents.market.orders) == 1 else None

    monkeypatch.setattr(renting, "greeting_fault", fault)
    monkeypatch.setattr(renting, "AT_ONCE_S", 0.1)
    rents.change_market(ready_s=0.0)
    rents.market.slow = True
    assert rents.run().rent([H100, H100], nap=lambda _: None).machine.id == "m2"


def test_a_machine_that_cannot_be_read_stops_only_what_it_may_concern(rents: Rents) -> None:
    """Its label cannot be read. What the list shows of ours can be used and ended."""
    market, other = rents.market, Market("lambda:2")
    rents.handed_over()
    market.unread = "machine 7: `label`: Expected `str`, got `int`"
    run = rents.run()
    (machine,) = [machine for machine, _ in run.machines()]
    assert "machine 7" in rents.heard.warnings[-1]
    run.end(rents.open(), never_handed_over(machine, machine.label))
    assert market.alive == {}
    with pytest.raises(MachineUnread, match="machine 7"):
        rents.run().machines()  # the only market: the machine may be the workspace's
    assert rents.run(market, other).machines() == []
    market.faults = [MachineUnread(market.unread)]
    with rents.run(market, other) as run:
        run.rent([*market.on_sale * 2, *other.on_sale]).hand_over()
    assert (len(market.orders), market.alive, len(other.alive)) == (2, {}, 1)


def test_a_lost_answer_is_no_end_while_a_machine_cannot_be_read(rents: Rents) -> None:
    """That machine may be the one that the lost answer was about."""
    rents.market.faults, rents.market.unread = [LOST], "machine 7: no label"
    with pytest.raises(EndUnproven, match=r"the machine that may exist .*machine 7: no label"):
        rents.run().rent(rents.market.on_sale * 2)
    assert len(rents.market.orders) == 1
    for later_s in (700, 1400, 2100):
        rents.later(later_s)
        with pytest.raises(MachineUnread):
            rents.run(rents.market, Market("lambda:2")).end_abandoned()
        assert rents.states() == ["abandoned"], "absent from what can be read is not gone"


@pytest.mark.parametrize("trouble", ["not done", "denied"])
def test_a_later_run_rents_nothing_while_the_machine_of_an_earlier_one_cannot_be_ended(
    trouble: str, rents: Rents, monkeypatch: pytest.MonkeyPatch
) -> None:
    market, machine = rents.market, rents.run().rent([H100]).machine
    rents.rentals.change(rents.open(), state="abandoned", why="SSH did not answer")
    monkeypatch.setattr(renting, "AT_ONCE_S", 0.0)
    market.immortal = True
    if trouble == "denied":
        monkeypatch.setattr(market, "destroy", Mock(side_effect=ProviderDenied("403")))
    words = (
        r"m1 .*SSH did not answer.*nor be ended.*4\.000 \$/h.*`torpor reconcile demo --abandoned`"
    )
    later = rents.run()
    later.end_abandoned(within_s=0.0)  # as a wake and a replicate do first
    for run in (later, rents.run()):
        with pytest.raises(EndUnproven, match=words):
            run.rent([H100, H100], nap=lambda _: None)
    assert [*market.alive] == [machine.id]
    monkeypatch.undo()
    market.immortal = False
    monkeypatch.setattr(renting, "greeting_fault", lambda *_: None)
    rents.run().end_abandoned()  # as the message says
    assert rents.run().rent([H100]).machine.id in market.alive
    assert machine.id not in market.alive


@pytest.mark.parametrize("known", ["it is being ended", "nobody has seen it"])
def test_a_later_run_rents_where_no_machine_of_an_earlier_one_goes_on(
    known: str, rents: Rents, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(renting, "AT_ONCE_S", 0.1)
    if known == "it is being ended":
        rents.run().rent([H100])
        rents.market.slow = True
        rents.rentals.change(rents.open(), state="abandoned")
    else:
        rents.change_market(settling_s=600.0)
        rental = rents.rentals.begin(rents.rentals.new_label("me"), H100, None)
        rents.rentals.change(rental, state="abandoned")
    assert rents.run().rent([H100]).machine.id in rents.market.alive
