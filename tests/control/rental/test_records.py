"""Rentals are in the store, where the next run finds them, and stay there as history."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator

import pytest

from tests.fixtures.contested_store import HOUR_S, ContestedStore
from tests.fixtures.market import H100
from tests.fixtures.memory_store import MemoryStore
from tests.fixtures.records import put_record, read_record
from torpor.control.rental.records import NEXT, Rental, Rentals, State
from torpor.shared.errors import HandedOver, StoreError, StoreMissing, StoreUnavailable
from torpor.shared.values import MachineId, StoredObject, WorkspaceName

DEMO, OTHER = WorkspaceName("demo"), WorkspaceName("other")
STATES: tuple[State, ...] = tuple(NEXT)
WAYS: dict[State, tuple[State, ...]] = {
    "asked": (),
    "standing": ("standing",),
    "handed over": ("standing", "handed over"),
    "abandoned": ("abandoned",),
    "ended": ("ended",),
}


@pytest.fixture
def rentals(memory_store: MemoryStore) -> Rentals:
    return Rentals(memory_store, DEMO)


def _begin(rentals: Rentals) -> Rental:
    return rentals.begin(rentals.new_label("me"), H100, "ssh-ed25519 AAAA")


@pytest.mark.rule(5)
def test_a_rental_is_in_the_store_before_its_machine_is_asked_for(
    memory_store: MemoryStore, rentals: Rentals
) -> None:
    rental = _begin(rentals)
    assert (rental.label.owner, rental.label.workspace, rental.state) == ("me", DEMO, "asked")
    assert Rentals(memory_store, DEMO).open() == [rental]  # as the next run sees it
    assert rentals.of(rental.label) == rental
    assert Rentals(memory_store, OTHER).open() == []


@pytest.mark.rule(5)
def test_every_attempt_has_a_label_of_its_own(rentals: Rentals) -> None:
    assert _begin(rentals).label != _begin(rentals).label


@pytest.mark.rule(5)
@pytest.mark.parametrize(("now", "then"), list(itertools.product(STATES, STATES)))
def test_only_these_states_follow_each_other(now: State, then: State, rentals: Rentals) -> None:
    rental = _begin(rentals)
    for state in WAYS[now]:
        rental = rentals.change(rental, state=state)
    assert rental.state == now
    if then in NEXT[now]:
        assert rentals.change(rental, state=then).state == then
    else:
        with pytest.raises(HandedOver, match=f"was {now} by another run"):
            rentals.change(rental, state=then)


@pytest.mark.rule(5)
def test_what_was_handed_over_is_never_abandoned_again(rentals: Rentals) -> None:
    """A run that holds an old copy of the record cannot take it back."""
    old = rentals.change(_begin(rentals), state="standing", machine=MachineId("m1"))
    rentals.change(old, state="handed over")
    for state in ("standing", "abandoned"):
        with pytest.raises(HandedOver):
            rentals.change(old, state=state)
    with pytest.raises(HandedOver, match="was handed over by another run"):
        rentals.check_unclaimed(old.label)


@pytest.fixture
def contested() -> ContestedStore:
    return ContestedStore()


@pytest.mark.rule(18)
def test_a_run_that_slept_before_its_write_does_not_undo_a_hand_over(
    contested: ContestedStore,
) -> None:
    rentals = Rentals(contested, DEMO)
    rental = rentals.change(_begin(rentals), state="standing", machine=MachineId("m1"))
    contested.meanwhile = lambda: rentals.change(rental, state="handed over")
    late = rentals.change(rental, queued_unix=5.0)
    assert (late.state, late.queued_unix) == ("handed over", 5.0)
    assert rentals.open() == [late]
    other = rentals.change(_begin(rentals), state="standing")
    contested.meanwhile = lambda: rentals.change(other, state="handed over")
    with pytest.raises(HandedOver, match="was handed over by another run"):
        rentals.change(other, state="abandoned")
    assert rentals.of(other.label) is not None


def test_a_rental_that_another_run_took_up_during_a_write_stays_that_runs(
    contested: ContestedStore,
) -> None:
    """Also one of the same job, or of none. The host key of the first login takes nothing up."""
    rentals = Rentals(contested, DEMO)
    rental = rentals.change(_begin(rentals), state="standing")
    contested.meanwhile = lambda: rentals.change(rental, state="standing")
    with pytest.raises(HandedOver, match="may go on with its machine"):
        rentals.change_untaken(rental, state="abandoned")
    rental = rentals.change(rental, host_key=None)
    contested.meanwhile = lambda: rentals.pin(rental.label, "ssh-ed25519 AAAA")
    assert rentals.change_untaken(rental, state="abandoned").state == "abandoned"


@pytest.mark.rule(18)
def test_of_a_hand_over_and_an_end_at_once_the_first_counts(contested: ContestedStore) -> None:
    rentals = Rentals(contested, DEMO)
    rental = rentals.change(_begin(rentals), state="standing")
    contested.meanwhile = lambda: rentals.change(rental, state="ended", why="first")
    with pytest.raises(HandedOver, match="was ended by another run"):
        rentals.change(rental, state="handed over")
    assert (rentals.open(), rentals.history()[0].why) == ([], "first")


@pytest.mark.rule(18)
def test_a_write_that_arrives_late_does_not_undo_a_hand_over(
    memory_store: MemoryStore, rentals: Rentals
) -> None:
    """At a store that cannot refuse it."""
    rental = rentals.change(_begin(rentals), state="standing", machine=MachineId("m1"))
    late = memory_store.get(rentals.key(rental.label), max_bytes=10_000)
    over = rentals.change(rental, state="handed over", seen_unix=7.0)
    memory_store.put(rentals.key(rental.label), late)
    assert rentals.of(rental.label) == over
    assert rentals.open() == [over]
    with pytest.raises(HandedOver, match="was handed over by another run"):
        rentals.change(rental, state="abandoned")
    rentals.change(rental, state="ended")
    assert list(memory_store.list("workspaces/demo/rentals/open/")) == []


@pytest.mark.parametrize("filed", [False, True])
def test_an_end_that_was_killed_half_way_is_an_end(
    filed: bool, memory_store: MemoryStore, rentals: Rentals
) -> None:
    """Before it was filed, which the next look does, or before the open record was deleted."""
    rental = _begin(rentals)
    ended = rentals.change(rental, state="ended", why="gone")
    if not filed:
        memory_store.delete(
            [found.key for found in memory_store.list("workspaces/demo/rentals/ended/")]
        )
    put_record(memory_store, rentals.key(rental.label), rental if filed else ended)
    assert filed or rentals.of(rental.label) is None
    assert (rentals.open(), rentals.history()) == ([], [ended])
    assert len(list(memory_store.list("workspaces/demo/rentals/"))) == (2 if filed else 1)


@pytest.mark.rule(18)
@pytest.mark.parametrize("ahead_s", [HOUR_S, -HOUR_S])
def test_times_of_a_host_with_another_clock_are_read_by_this_host_s(
    ahead_s: float, contested: ContestedStore
) -> None:
    """When a rental began decides who may end it: an hour would end another run's machine."""
    rentals = Rentals(contested, DEMO)
    with contested.host(ahead_s):
        label = rentals.change(_begin(rentals), state="standing", seen_unix=time.time()).label
    contested.pass_time(60)
    with contested.host():
        (read,) = rentals.open()
        assert _is_about(60, time.time() - read.created_unix)
        assert _is_about(60, time.time() - (read.seen_unix or 0.0))
        rentals.change(read, state="ended")
    with contested.host(ahead_s):
        ended = rentals.ended(label.rental)
        assert _is_about(60, ended.ended_unix - ended.created_unix)
        assert _is_about(0, time.time() - ended.ended_unix)


def _is_about(wanted_s: float, seconds: float) -> bool:
    """Far nearer than the clocks of both hosts are, however busy the host of the test is."""
    return wanted_s - 10 <= seconds <= wanted_s + HOUR_S / 2


def test_an_ended_rental_stays_as_history(rentals: Rentals) -> None:
    kept = _begin(rentals)
    rental = rentals.change(_begin(rentals), state="standing", machine=MachineId("m1"))
    ended = rentals.change(rental, state="ended", why="status terminated")
    assert rentals.open() == [kept]
    assert rentals.of(rental.label) is None
    assert rentals.history() == [ended]
    assert (ended.machine, ended.price_usd_h, ended.gpu, ended.why) == (
        "m1", 4.0, "H100 SXM", "status terminated",
    )  # fmt: skip
    assert ended.ended_unix >= ended.created_unix
    with pytest.raises(HandedOver, match="was ended by another run"):
        rentals.check_unclaimed(rental.label)


@pytest.mark.parametrize("is_paged", [True, False])
def test_a_look_at_open_and_ended_rentals_misses_none_that_ends_meanwhile(
    rentals: Rentals,
    memory_store: MemoryStore,
    monkeypatch: pytest.MonkeyPatch,
    *,
    is_paged: bool,
) -> None:
    """One rental ends after the first listing, or between its page of ended rentals and its page of
    open ones."""
    first, second = _begin(rentals), _begin(rentals)
    rentals.change(first, state="ended")
    listed, asked = memory_store.list, list[str]()

    def ends(prefix: str) -> Iterator[StoredObject]:
        before = [*listed(prefix)]
        if not asked:
            rentals.change(second, state="ended")
        asked.append(prefix)
        after = [*listed(prefix)] if is_paged else before
        yield from (one for one in before if "/ended/" in one.key)
        yield from (one for one in after if "/ended/" not in one.key)

    monkeypatch.setattr(memory_store, "list", ends)
    seen = rentals.since()
    assert sorted((one.label.rental, one.state) for one in seen) == sorted(
        (one.label.rental, "ended") for one in (first, second)
    )


@pytest.mark.rule(3)
def test_a_store_that_is_away_is_not_an_empty_list(
    memory_store: MemoryStore, rentals: Rentals
) -> None:
    memory_store.fails = StoreMissing("no such bucket")
    with pytest.raises(StoreMissing, match="no such bucket"):
        rentals.open()


def test_a_machine_is_left_alone_while_the_store_is_away(
    memory_store: MemoryStore, rentals: Rentals
) -> None:
    rental = _begin(rentals)
    memory_store.fails = StoreUnavailable("503")
    with pytest.raises(StoreUnavailable, match="torpor left it alone"):
        rentals.check_unclaimed(rental.label)


@pytest.mark.rule(3)
def test_a_damaged_record_is_not_an_absent_one(memory_store: MemoryStore, rentals: Rentals) -> None:
    rental = _begin(rentals)
    for damaged in (b'{"label": "x"}', b"", b"{", b"\xff"):
        put_record(memory_store, rentals.key(rental.label), damaged)
        with pytest.raises(
            StoreError, match=r"rentals/open/.* is not (what this torpor writes|believed)"
        ):
            rentals.open()


def test_a_record_of_an_older_version_is_read(rentals: Rentals, memory_store: MemoryStore) -> None:
    """Without what came later: the bound of a price, and the looks that showed no machine."""
    label = rentals.new_label("me")
    rental = rentals.begin(label, H100, None)
    written = read_record(memory_store, rentals.key(label))
    del written["most_usd_h"], written["absent_unix"]
    put_record(memory_store, rentals.key(label), written)
    assert rentals.of(label) == rental
