"""Attempts over offers, what becomes of lost answers, and ends that are proven."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Iterator
from typing import Any

import asyncssh
import msgspec
import pytest

from tests.fixtures.market import H100, Hears, Market
from tests.fixtures.memory_store import MemoryStore
from torpor.control.providers.seam import Residue
from torpor.control.rental import ending, renting, search
from torpor.control.rental.markets import Markets
from torpor.control.rental.order import order_for
from torpor.control.rental.records import Rentals
from torpor.control.rental.renting import Renter, Renting
from torpor.control.safety import never_handed_over
from torpor.shared.errors import (
    CreateFailed,
    CreateUncertain,
    HandedOver,
    InvalidInput,
    MachineUnreachable,
    NoCapacity,
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
from torpor.shared.values import DRILL, Endpoint, Want, WorkspaceName, reserved_name

DEMO = WorkspaceName("demo")
replace = msgspec.structs.replace


@pytest.fixture(autouse=True)
def answers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every machine answers SSH at once; nothing is slept through."""
    monkeypatch.setattr(renting, "greeting_fault", lambda endpoint, host_key: None)
    monkeypatch.setattr(ending.time, "sleep", lambda seconds: None)


@pytest.fixture(scope="module")
def identity() -> asyncssh.SSHKey:
    return asyncssh.generate_private_key("ssh-ed25519")


@pytest.fixture
def market() -> Market:
    return Market()


@pytest.fixture
def rentals(memory_store: MemoryStore) -> Rentals:
    return Rentals(memory_store, DEMO)


@pytest.fixture
def held(market: Market, rentals: Rentals, identity: asyncssh.SSHKey) -> Iterator[Renting]:
    yield Renting(Renter(rentals, Markets([market]), "me", Want(), identity, Hears()))


def _states(rentals: Rentals) -> list[str]:
    return [rental.state for rental in (*rentals.history(), *rentals.open())]


def _never(seconds: float) -> None:
    raise AssertionError("nothing is to be waited for")


def test_a_machine_stands_is_handed_over_and_ends_by_a_warrant(
    held: Renting, market: Market, rentals: Rentals
) -> None:
    with held:
        tenancy = held.rent(market.on_sale)
        (rental,) = rentals.open()
        assert (rental.state, rental.machine) == ("standing", tenancy.machine.id)
        assert tenancy.machine.endpoint == Endpoint("127.0.0.1", 22, "root", rental.host_key)
        assert rental.host_key is not None
        with tenancy:
            tenancy.hand_over()
    (machine,) = market.list_own()
    (rental,) = rentals.open()
    assert (rental.state, rental.machine) == ("handed over", machine.id)
    with pytest.raises(HandedOver):
        held.end(rental)
    held.end(rental, never_handed_over(machine, rental.label))
    assert market.alive == {}
    (ended,) = rentals.history()
    assert ended.why == "404, and not in the list"


def test_what_was_not_handed_over_ends_with_the_run(
    held: Renting, market: Market, rentals: Rentals
) -> None:
    with held:
        held.rent(market.on_sale)
        held.rent(market.on_sale)
    assert market.alive == {}
    assert _states(rentals) == ["ended", "ended"]


def test_a_lost_answer_is_abandoned_and_never_sent_again(
    market: Market, rentals: Rentals, identity: asyncssh.SSHKey
) -> None:
    """The machine appears in a listing later, and is ended then."""
    market = Market(settling_s=600.0, hidden=1)
    market.on_sale *= 2
    held = Renting(Renter(rentals, Markets([market]), "me", Want(), identity, Hears()))
    market.faults, market.after = [CreateUncertain("the connection was reset")], True
    market.proofs = False
    with held:
        tenancy = held.rent(market.on_sale)
        assert len({order.token for order in market.orders}) == 2
        tenancy.hand_over()
    lost, kept = market.orders
    states = {rental.label: rental.state for rental in rentals.open()}
    assert states == {lost.label: "abandoned", kept.label: "handed over"}
    assert len(market.alive) == 2
    market.proofs = True
    later = Renting(Renter(rentals, Markets([market]), "me", Want(), identity, Hears()))
    assert [rental.label for rental in later.end_abandoned()] == [lost.label]
    assert [machine.label for machine in market.alive.values()] == [kept.label]


def test_a_lost_answer_without_a_machine_closes_after_two_listings_once_settled(
    rentals: Rentals, identity: asyncssh.SSHKey, monkeypatch: pytest.MonkeyPatch
) -> None:
    market, now = Market(settling_s=600.0), time.time()
    held = Renting(Renter(rentals, Markets([market]), "me", Want(), identity, Hears()))
    market.faults = [CreateUncertain("the connection was reset")]
    with pytest.raises(CreateFailed):
        held.rent(market.on_sale)
    for later_s, still in ((300, True), (700, True), (900, True), (1400, False)):
        monkeypatch.setattr(time, "time", lambda later_s=later_s: now + later_s)
        held.end_abandoned()
        assert bool(rentals.open()) is still, later_s
    (ended,) = rentals.history()
    assert "two listings" in ended.why


def test_a_machine_that_goes_without_us_closes_its_rental_by_the_proof(
    rentals: Rentals, identity: asyncssh.SSHKey, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A spot machine that was taken back. Nothing is destroyed; while it may live, nothing ends."""
    market, now = Market(settling_s=600.0), time.time()
    with Renting(Renter(rentals, Markets([market]), "me", Want(), identity, Hears())) as held:
        held.rent(market.on_sale).hand_over()

    def look(later_s: float) -> list[str]:
        monkeypatch.setattr(time, "time", lambda: now + later_s)
        heard = Hears()
        Renting(Renter(rentals, Markets([market]), "me", Want(), identity, heard)).end_abandoned()
        assert heard.events == []
        return _states(rentals)

    assert look(900) == ["handed over"]  # it is listed
    market.alive.clear()
    assert look(300) == ["handed over"]  # it may be missing from answers still
    market.proofs = False
    assert look(900) == ["handed over"]  # absent is not gone
    market.proofs = True
    assert look(1000) == ["ended"]
    (ended,) = rentals.history()
    assert ended.why.startswith("it was gone: ")


def test_a_machine_that_appears_between_the_two_listings_is_ended(
    rentals: Rentals, identity: asyncssh.SSHKey, monkeypatch: pytest.MonkeyPatch
) -> None:
    market, now = Market(settling_s=600.0, hidden=2), time.time()
    held = Renting(Renter(rentals, Markets([market]), "me", Want(), identity, Hears()))
    market.faults, market.after = [CreateUncertain("the connection was reset")], True
    with pytest.raises(CreateFailed):
        held.rent(market.on_sale)
    for later_s in (700, 1400):
        monkeypatch.setattr(time, "time", lambda later_s=later_s: now + later_s)
        held.end_abandoned()
    assert market.alive == {}
    assert _states(rentals) == ["ended"]


@pytest.mark.parametrize(
    "error",
    [KeyError("a bug"), UnexpectedAnswer("a list?"), RunCancelled("stop"), KeyboardInterrupt()],
)
def test_any_other_error_of_a_create_is_a_lost_answer(
    error: BaseException, held: Renting, market: Market, rentals: Rentals
) -> None:
    market.faults, market.after = [error], True
    with pytest.raises((type(error), CreateFailed)), held:
        held.rent(market.on_sale)
    assert market.alive == {}
    (ended,) = rentals.history()
    assert ended.machine == "m1"


@pytest.mark.parametrize(
    "error", [CreateFailed("no"), NoCapacity("no"), ProviderDenied("no"), InvalidInput("no")]
)
def test_a_refusal_ends_its_rental_at_once(
    error: TorporError, held: Renting, market: Market, rentals: Rentals
) -> None:
    market.faults = [error]
    with pytest.raises((CreateFailed, InvalidInput)), held:
        held.rent(market.on_sale)
    (ended,) = rentals.history()
    assert ended.why == "nothing was rented: no"
    assert rentals.open() == []


def test_the_next_offer_is_tried_but_not_in_a_domain_that_is_blocked(
    held: Renting, market: Market
) -> None:
    def offer(id: str, **changes: Any) -> Any:
        return replace(H100, id=id, **changes)

    market.faults = [NoCapacity("sold out"), QuotaReached("none left"), MachineUnreachable("?")]
    offers = [
        offer("1"),
        offer("2"),  # of the same domain
        offer("3", domain="b"),
        offer("4", domain="c"),  # of the same region and GPU
        offer("5", domain="d", region="EU"),
        offer("6", domain="d", region="EU"),
    ]
    tenancy = held.rent(offers)
    assert [order.offer.id for order in market.orders] == ["1", "3", "5", "6"]
    assert [one.outcome for one in held.tried] == [
        "sold out",
        "not tried: sold out",
        "none left",
        "not tried: none left",
        "?",
        f"machine {tenancy.machine.id}",
    ]


def test_attempts_are_bounded(held: Renting, market: Market) -> None:
    market.faults = [CreateFailed("no")] * 50
    with pytest.raises(CreateFailed, match=rf"of 50 offers.* {renting.MOST_ATTEMPTS} were tried"):
        held.rent([H100] * 50)


def test_a_busy_provider_is_waited_for_and_does_not_end_the_run(
    held: Renting, market: Market, rentals: Rentals
) -> None:
    busy = ProviderUnavailable("429")
    busy.retry_after_s = 7.0
    market.faults, naps = [busy, busy], list[float]()
    held.rent(market.on_sale, naps.append)
    assert naps == [7.0, 7.0]
    assert _states(rentals) == ["ended", "ended", "standing"]  # each was an attempt of its own


def test_a_machine_that_never_answers_is_ended_and_the_next_offer_tried(
    held: Renting, market: Market, rentals: Rentals, monkeypatch: pytest.MonkeyPatch
) -> None:
    faults = iter(["it shows another host key"] * 100)
    monkeypatch.setattr(
        renting,
        "greeting_fault",
        lambda endpoint, key: next(faults) if len(market.orders) == 1 else None,
    )
    market.abilities = replace(market.abilities, ready_s=0.0)
    tenancy = held.rent([H100, H100], nap=lambda _: None)
    assert tenancy.machine.id == "m2"
    assert list(market.alive) == ["m2"]
    (ended,) = rentals.history()
    assert "another host key" in ended.why or ended.machine == "m1"


def test_an_end_without_a_proof_is_no_end(held: Renting, market: Market, rentals: Rentals) -> None:
    """Absent is not gone: AWS says NotFound of machines that live."""
    tenancy = held.rent(market.on_sale)
    assert tenancy.rental is not None
    market.proofs = False
    with pytest.raises(ProviderError, match=r"not proven after 0 s.*may still cost money"):
        held.end(tenancy.rental, within_s=0.1)
    (rental,) = rentals.open()
    assert rental.state == "standing"
    market.proofs = True
    held.end(rental)
    assert rentals.open() == []


def test_a_destroy_that_is_answered_and_not_done_is_no_end(
    held: Renting, market: Market, rentals: Rentals
) -> None:
    tenancy = held.rent(market.on_sale)
    market.immortal = True
    with pytest.raises(ProviderError, match="not proven"):
        held.end(tenancy.rental, within_s=0.1)  # type: ignore[arg-type]
    assert len(rentals.open()) == 1


def test_a_proof_before_the_provider_has_settled_is_none(
    rentals: Rentals, identity: asyncssh.SSHKey
) -> None:
    """A machine that was just created is not listed yet, and its id is answered with 404."""
    market = Market(settling_s=600.0, hidden=100)
    held = Renting(Renter(rentals, Markets([market]), "me", Want(), identity, Hears()))
    market.abilities = replace(market.abilities, ready_s=0.0)
    with pytest.raises(CreateFailed), pytest.MonkeyPatch.context() as patch:
        patch.setattr(renting, "AT_ONCE_S", 0.0)
        held.rent(market.on_sale, nap=lambda _: None)
    assert [rental.state for rental in rentals.open()] == ["abandoned"]


def test_what_outlived_its_machine_is_ended_too(
    held: Renting, market: Market, rentals: Rentals
) -> None:
    tenancy = held.rent(market.on_sale)
    assert tenancy.rental is not None
    label = tenancy.rental.label
    market.left_over = [Residue(id="d", provider=market.identity, kind="disk", label=label)]
    del market.alive[tenancy.machine.id]
    held.end(tenancy.rental)
    assert market.left_over == []
    assert rentals.open() == []


def test_a_failed_tenancy_is_ended_and_the_error_stays(held: Renting, market: Market) -> None:
    with pytest.raises(KeyError), held, held.rent(market.on_sale):
        raise KeyError("a restore failed")
    assert market.alive == {}


def test_if_the_end_fails_too_both_causes_are_named_and_it_is_abandoned(
    held: Renting, market: Market, rentals: Rentals
) -> None:
    with (
        pytest.raises(MachineUnreachable, match=r"lost it.*could not be destroyed either.*denied"),
        held,
        held.rent(market.on_sale),
    ):
        market.away = ProviderDenied("denied")
        raise MachineUnreachable("lost it")
    assert [rental.state for rental in rentals.open()] == ["abandoned"]


def test_a_machine_that_another_run_works_on_is_left(
    held: Renting, market: Market, rentals: Rentals
) -> None:
    with pytest.raises(WorkspaceBusy), held, held.rent(market.on_sale):
        raise WorkspaceBusy("another run holds it")
    assert len(market.alive) == 1
    assert _states(rentals) == ["standing"]


def test_what_another_run_left_is_ended_only_once_it_is_claimed(
    held: Renting, market: Market, rentals: Rentals, identity: asyncssh.SSHKey
) -> None:
    """It may hold that run's restore: only its agent knows."""
    held.rent(market.on_sale)
    second = Renting(Renter(rentals, Markets([market]), "me", Want(), identity, Hears()))
    (left,) = [second.tenancy(machine, one) for machine, one in second.machines() if one]
    with pytest.raises(KeyError), second, second.take_up(left) as tenancy:
        assert not tenancy.fresh
        raise KeyError("it failed before the agent was asked")
    assert len(market.alive) == 1
    with pytest.raises(KeyError), second, second.take_up(left) as tenancy:
        tenancy.holds_nothing_else()
        raise KeyError("it failed afterwards")
    assert market.alive == {}


def test_what_was_created_by_a_run_that_was_killed_before_it_knew_is_taken_up(
    held: Renting, market: Market, rentals: Rentals, identity: asyncssh.SSHKey
) -> None:
    offer = market.on_sale[0]
    label = rentals.new_label("me")
    rentals.begin(label, offer, None)
    market.create(order_for(offer, label, identity))
    ((machine, rental),) = held.machines()
    assert rental is not None
    with held.take_up(held.tenancy(machine, rental)) as tenancy:
        assert _states(rentals) == ["standing"]
        tenancy.hand_over()
    assert _states(rentals) == ["handed over"]


def test_one_that_was_left_and_never_answers_is_not_ended(
    held: Renting, market: Market, rentals: Rentals, identity: asyncssh.SSHKey
) -> None:
    held.rent(market.on_sale)
    second = Renting(Renter(rentals, Markets([market]), "me", Want(), identity, Hears()))
    ((machine, rental),) = second.machines()
    market.alive[machine.id] = replace(machine, state="stopped")
    assert rental is not None
    with pytest.raises(CreateFailed, match="name it in `end` of reconcile"), second:
        second.take_up(second.tenancy(machine, rental))
    assert len(market.alive) == 1


def test_an_unfinished_rental_whose_machine_has_provably_gone_is_closed(
    held: Renting, market: Market, rentals: Rentals, identity: asyncssh.SSHKey
) -> None:
    tenancy = held.rent(market.on_sale)
    later = Renting(Renter(rentals, Markets([market]), "me", Want(), identity, Hears()))
    assert later.end_abandoned() == []
    del market.alive[tenancy.machine.id]
    market.proofs = False
    assert later.end_abandoned() == []
    market.proofs = True
    assert len(later.end_abandoned()) == 1


def test_end_abandoned_ends_nothing_that_was_handed_over(
    held: Renting, market: Market, rentals: Rentals, identity: asyncssh.SSHKey
) -> None:
    held.rent(market.on_sale).hand_over()
    later = Renting(Renter(rentals, Markets([market]), "me", Want(), identity, Hears()))
    assert later.end_abandoned() == []
    assert len(market.alive) == 1


def test_a_host_key_of_the_first_login_is_the_rental_s_only_one(
    held: Renting, market: Market, rentals: Rentals
) -> None:
    """Not the address's: the next machine there has another key."""
    market.abilities = replace(market.abilities, host_key="first use")
    tenancy = held.rent(market.on_sale)
    assert tenancy.rental is not None
    assert tenancy.rental.host_key is None
    held.pin(tenancy.rental.label, "ssh-ed25519 AAAA")
    held.pin(tenancy.rental.label, "ssh-ed25519 BBBB")
    pinned = held.pinned(tenancy.machine, rentals.of(tenancy.rental.label))
    assert pinned.endpoint is not None
    assert pinned.endpoint.host_key == "ssh-ed25519 AAAA"
    other = held.rent(market.on_sale)  # at the same address
    assert other.machine.endpoint is not None
    assert other.machine.endpoint.host_key is None


def test_nothing_is_rented_while_the_store_is_away(
    held: Renting, market: Market, memory_store: MemoryStore
) -> None:
    memory_store.fails = StoreUnavailable("503")
    with pytest.raises(StoreUnavailable), held:
        held.rent(market.on_sale)
    assert market.orders == []


def test_a_scratch_machine_ends_also_while_the_store_is_away(
    market: Market, memory_store: MemoryStore, identity: asyncssh.SSHKey
) -> None:
    rentals = Rentals(memory_store, reserved_name(DRILL, DEMO))
    held = Renting(Renter(rentals, Markets([market]), "me", Want(), identity, Hears()))
    with pytest.raises(StoreUnavailable), held:
        held.rent(market.on_sale)
        memory_store.fails = StoreUnavailable("503")
    assert market.alive == {}


def test_machines_of_open_rentals_are_found_at_providers_that_the_workspace_no_longer_names(
    held: Renting, market: Market, rentals: Rentals, identity: asyncssh.SSHKey
) -> None:
    held.rent(market.on_sale).hand_over()
    other = Market("lambda:2")
    markets = Markets([other], lambda: [market])
    moved = Renting(Renter(rentals, markets, "me", Want(), identity, Hears()))
    ((machine, rental),) = moved.machines()
    assert machine.provider == market.identity
    assert rental is not None
    other.away = ProviderUnavailable("down")  # no open rental names it
    assert len(moved.machines()) == 1
    other.away, market.away = None, ProviderUnavailable("down")
    with pytest.raises(ProviderUnavailable):
        moved.machines()


def test_a_market_that_is_silent_says_nothing_of_its_machines(
    market: Market, rentals: Rentals, identity: asyncssh.SSHKey
) -> None:
    other = Market("lambda:2")
    held = Renting(Renter(rentals, Markets([market, other]), "me", Want(), identity, Hears()))
    tenancy = held.rent(market.on_sale)
    assert held.states() == {tenancy.machine.id: "running"}
    market.away = ProviderUnavailable("down")
    with pytest.raises(ProviderUnavailable):
        held.states()


def test_a_wake_goes_on_from_market_to_market_until_a_machine_is_ready(
    rentals: Rentals, identity: asyncssh.SSHKey, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No capacity, then a quota, then a market that hangs, then one whose machine never answers."""
    names = ("sold-out", "at-quota", "hangs", "deaf", "good")
    markets = {name: Market(name) for name in names}
    for price, market in enumerate(markets.values(), 1):
        market.on_sale = [replace(market.on_sale[0], id=f"{price}-usd", price_usd_h=float(price))]
    free = threading.Event()
    monkeypatch.setattr(markets["hangs"], "offers", lambda want: free.wait(60))
    monkeypatch.setattr(search, "ANSWER_S", 0.2)
    markets["sold-out"].faults = [NoCapacity("no machine of this offer is free")]
    markets["at-quota"].faults = [QuotaReached("0 of 8 vCPUs are left")]
    markets["deaf"].abilities = replace(markets["deaf"].abilities, ready_s=0.0)
    ours = {market.identity: market for market in markets.values()}
    monkeypatch.setattr(
        renting,
        "greeting_fault",
        lambda endpoint, key: None if ours["good"].alive else "connection refused",
    )
    renter = Renter(rentals, Markets([*ours.values()]), "me", Want(), identity, Hears())
    with Renting(renter) as held:
        offers = search.find_offers([*ours.values()], Want())
        free.set()
        tenancy = held.rent(offers.fitting, nap=lambda _: None)
        tenancy.hand_over(alone=True)
    assert tenancy.machine.provider == "good"
    rows = [one.row() for one in (*held.tried, *offers.refused)]
    assert [(row["provider"], row["outcome"]) for row in rows] == [
        ("sold-out", "no machine of this offer is free"),
        ("at-quota", "0 of 8 vCPUs are left"),
        (
            "deaf",
            "machine m1 at deaf was not reachable by SSH within 0 s: connection refused",
        ),
        ("good", "machine m1"),
        ("hangs", "hangs did not answer within 0 s"),
    ]
    assert {name: len(market.alive) for name, market in ours.items()} == {
        **dict.fromkeys(names, 0),
        "good": 1,
    }
    assert _states(rentals) == ["ended", "ended", "ended", "handed over"]


@pytest.mark.parametrize("error", [ProviderUnavailable("down"), CreateUncertain("no answer")])
def test_a_market_that_does_not_answer_is_asked_again_after_all_others(
    error: TorporError, rentals: Rentals, identity: asyncssh.SSHKey
) -> None:
    """Each question to a market that hangs takes minutes, and it may have many cheap offers."""
    silent, good = Market("vast:1"), Market("lambda:2")
    silent.faults, good.faults = [error], [CreateFailed("no")]
    renter = Renter(rentals, Markets([silent, good]), "me", Want(), identity, Hears())
    cheap = [replace(silent.on_sale[0], id=name, domain=name) for name in ("a", "b")]
    with Renting(renter) as held:
        tenancy = held.rent([*cheap, *good.on_sale])
        tenancy.hand_over()
    assert [(one.provider, one.offer) for one in held.tried] == [
        ("vast:1", "a"),
        ("lambda:2", "1"),
        ("vast:1", "b"),
    ]


def test_a_lost_answer_of_a_market_that_stays_silent_fails_no_run(
    rentals: Rentals, identity: asyncssh.SSHKey, monkeypatch: pytest.MonkeyPatch
) -> None:
    silent, good = Market("vast:1"), Market("lambda:2")
    silent.faults, silent.after = [CreateUncertain("the connection was reset")], True
    silent.away = ProviderUnavailable("down")
    monkeypatch.setattr(renting, "AT_ONCE_S", 0.0)
    monkeypatch.setattr(ending, "GONE_S", 0.0)
    told = Hears()
    renter = Renter(rentals, Markets([silent, good]), "me", Want(), identity, told)
    with Renting(renter) as held:
        held.rent([*silent.on_sale, *good.on_sale]).hand_over()
    assert {one.provider: one.state for one in rentals.open()} == {
        "vast:1": "abandoned",
        "lambda:2": "handed over",
    }
    assert "down" in told.warnings[-1]
    with pytest.raises(KeyError), Renting(renter) as held:
        silent.faults = [CreateUncertain("the connection was reset")]
        held.rent([*silent.on_sale, *good.on_sale])
        raise KeyError("the restore failed")
    assert [one.state for one in rentals.open()].count("abandoned") == 2
    silent.away = None
    Renting(renter).end_abandoned()
    assert silent.alive == {}
    assert len(good.alive) == 1


def test_no_further_offer_is_tried_once_the_time_is_over(
    held: Renting, market: Market, monkeypatch: pytest.MonkeyPatch
) -> None:
    quarters = itertools.count(0, renting.RENT_S / 4)
    market.faults = [CreateFailed("no")] * 50
    monkeypatch.setattr(time, "monotonic", lambda: next(quarters))
    with pytest.raises(CreateFailed, match=r"of 50 offers.* 4 were tried"):
        held.rent([H100] * 50)
