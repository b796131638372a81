"""Who fetches what from where: each part once from the store, unless peers do not win."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import msgspec
import pytest

from tests.fixtures.waiting import PATIENCE_S
from torpor.control.remote.part_tracker import (
    TRIALS,
    UPLOADS,
    Errand,
    Member,
    PartTracker,
    PeerMode,
)
from torpor.shared.errors import InvalidInput, RunCancelled
from torpor.shared.values import MIB, ObjectKey
from torpor.shared.wire.restore import Peer, RestoredPart, RestorePart, RestorePlan

PEER = Peer("https://127.0.0.1:1/token/", "pem")


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def _plan(count: int) -> RestorePlan:
    parts = [
        RestorePart(number, MIB, MIB, [ObjectKey(f"packs/{number}")]) for number in range(count)
    ]
    return RestorePlan(False, ["/w"], count, count * MIB, count * MIB, parts)


def _tracker(
    mode: PeerMode, machines: int, parts: int, clock: Callable[[], float] | None = None
) -> tuple[PartTracker, list[Member]]:
    tracker = PartTracker(mode, machines, clock or Clock())
    return tracker, [tracker.join(_plan(parts), PEER) for _ in range(machines)]


def _done(member: Member, errand: Errand, *, gave: bool = True, kept: bool = True) -> bool:
    stored = errand.part.stored_bytes
    peer = stored if errand.holder is not None and gave else 0
    return member.done(errand, RestoredPart(stored, peer, kept))


def _next(member: Member) -> Errand:
    errand = member.next()
    assert errand is not None
    return errand


def _fetch(member: Member, parts: int, *, kept: bool = True) -> list[Member | None]:
    """So many parts, and where they came from."""
    errands = []
    for _ in range(parts):
        errands.append(_next(member))
        _done(member, errands[-1], kept=kept)
    return [errand.holder for errand in errands]


def test_each_part_comes_from_the_store_once_and_the_others_from_peers() -> None:
    tracker, members = _tracker("always", 4, 12)
    lock, sources = threading.Lock(), []

    def work(member: Member) -> None:
        while (errand := member.next()) is not None:
            with lock:
                sources.append((errand.part.part, errand.holder is None))
            _done(member, errand)

    with ThreadPoolExecutor(16) as threads:
        list(threads.map(work, members * 4))
    from_store = [part for part, store in sources if store]
    assert sorted(from_store) == list(range(12))
    assert len(sources) == 48
    assert "as asked" in tracker.decision
    tracker.linger(members[0])


def test_the_first_machine_leaves_the_others_their_share() -> None:
    tracker, (first, other) = _tracker("auto", 2, 6)
    assert tracker.share() == 3
    mine = [_next(first) for _ in range(3)]
    with ThreadPoolExecutor(1) as thread:
        waiting = thread.submit(_next, first)
        theirs = [_next(other) for _ in range(3)]
        assert all(errand.holder is None for errand in mine + theirs)
        assert {errand.part.part for errand in mine + theirs} == set(range(6))
        assert not waiting.done()
        _done(other, theirs[0])
        assert waiting.result(PATIENCE_S).holder is other


def test_the_first_machine_goes_on_alone_where_the_others_are_late() -> None:
    tracker = PartTracker("auto", 4, Clock())
    first = tracker.join(_plan(8), PEER)
    assert _fetch(first, 8) == [None] * 8
    assert first.next() is None


def test_auto_does_not_share_fewer_parts_than_machines() -> None:
    tracker, members = _tracker("auto", 3, 2)
    assert [_fetch(member, 2) for member in members] == [[None] * 2] * 3
    assert "too few parts" in tracker.decision


def test_mode_never_uses_no_peers() -> None:
    tracker, members = _tracker("never", 2, 3)
    assert [_fetch(member, 3) for member in members] == [[None] * 3] * 2
    assert [member.next() for member in members] == [None, None]
    assert "from the store only, as asked" in tracker.decision
    with pytest.raises(InvalidInput, match="auto, never, always"):
        PartTracker("sometimes", 2)  # type: ignore[arg-type]


def test_one_machine_has_no_peers() -> None:
    tracker, (only,) = _tracker("always", 1, 2)
    assert not tracker.passing
    assert _fetch(only, 2) == [None, None]
    assert only.next() is None


@pytest.mark.parametrize(
    ("peer_s", "verdict"), [(0.1, "passed on"), (50.0, "until the store was faster")]
)
def test_auto_uses_peers_while_they_are_faster(peer_s: float, verdict: str) -> None:
    clock = Clock()
    tracker, (first, other) = _tracker("auto", 2, 2 * TRIALS + 4, clock)
    for _ in range(tracker.share()):
        for member in (first, other):
            errand = _next(member)
            assert errand.holder is None
            clock.now += 1.0
            _done(member, errand)
    for _ in range(TRIALS):
        errand = _next(other)
        assert errand.holder is first
        assert errand.floor_bytes_s > 0
        clock.now += peer_s
        _done(other, errand)
    last = _next(other)
    assert (last.holder is None) is (verdict != "passed on")
    assert verdict in tracker.decision
    assert "25 % of the bytes came from peers" in tracker.decision  # 4 parts of 16


def test_a_machine_that_died_costs_a_part_its_source_and_no_more() -> None:
    tracker, (first, other) = _tracker("always", 2, 2)
    claimed = _next(first)
    mine = _next(other)
    _done(other, mine)
    first.failed(claimed)
    first.leave()
    errand = _next(other)
    assert errand.holder is None
    assert errand.part == claimed.part
    _done(other, errand)
    assert other.next() is None
    tracker.linger(other)  # the dead one lacks nothing that anybody waits for


def test_a_peer_that_did_not_give_is_not_asked_again() -> None:
    _, (first, other) = _tracker("always", 2, 6)
    _fetch(first, 3)
    _fetch(other, 3)
    errand = _next(other)
    assert errand.holder is first
    _done(other, errand, gave=False)
    assert _next(other).holder is None


def test_no_member_uploads_more_than_its_share() -> None:
    tracker = PartTracker("always", 2, Clock())
    holder = tracker.join(_plan(UPLOADS + 2), PEER)
    _fetch(holder, UPLOADS + 2)
    other = tracker.join(_plan(UPLOADS + 2), PEER)
    errands = [_next(other) for _ in range(UPLOADS)]
    assert all(errand.holder is holder for errand in errands)
    with ThreadPoolExecutor(1) as thread:
        waiting = thread.submit(_next, other)
        assert not waiting.done()
        _done(other, errands[0])
        assert waiting.result(PATIENCE_S).holder is holder


def test_a_part_that_is_long_in_coming_is_fetched_from_the_store() -> None:
    clock = Clock()
    _, (first, other) = _tracker("auto", 2, 2, clock)
    slow = _next(first)
    quick = _next(other)
    clock.now += 1.0
    _done(other, quick)
    clock.now += 1000.0
    errand = _next(other)
    assert (errand.part, errand.holder) == (slow.part, None)


def test_what_is_not_kept_is_fetched_from_the_store_by_each() -> None:
    _, (first, other) = _tracker("always", 2, 2)
    assert [_fetch(member, 2, kept=False) for member in (first, other)] == [[None] * 2] * 2


def test_a_plan_of_its_own_is_fetched_whole() -> None:
    """A machine that had some of it already is cut into other parts."""
    tracker, (first,) = _tracker("always", 1, 3)
    rest = RestorePart(0, MIB, MIB, [ObjectKey("packs/1"), ObjectKey("packs/2")])
    resumed = tracker.join(RestorePlan(False, ["/w"], 1, 1, 1, [rest]), None)
    assert _next(resumed).part == rest
    assert _next(first).holder is None


# -- what comes first


def _ordered(first: int, others: int) -> RestorePlan:
    plan = _plan(first + others)
    parts = [msgspec.structs.replace(p, pieces=[1] * (p.part < first)) for p in plan.parts]
    return msgspec.structs.replace(plan, parts=parts, first=1)


def test_every_machine_fetches_what_comes_first_before_the_rest() -> None:
    tracker = PartTracker("always", 2, Clock())
    first, other = (tracker.join(_ordered(4, 4), PEER) for _ in range(2))
    taken = [(member, _next(member)) for _ in range(2) for member in (first, other)]
    assert {errand.part.part for _, errand in taken} == {0, 1, 2, 3}  # each from the store once
    assert all(errand.holder is None for _, errand in taken)
    assert not any(_done(member, errand) for member, errand in taken)
    last = [(member, _next(member)) for _ in range(2) for member in (first, other)]
    assert all(errand.part.first and errand.holder is not None for _, errand in last)
    assert [_done(member, errand) for member, errand in last] == [False, False, True, True]
    assert not any(_next(member).part.first for member in (first, other))


def test_a_machine_does_not_wait_for_what_comes_first() -> None:
    tracker = PartTracker("always", 2, Clock())
    first = tracker.join(_ordered(2, 2), PEER)
    claimed = _next(first)
    assert (claimed.part.first, _next(first).part.first) == (True, False)  # the other one's share


def test_a_failed_part_is_missing_from_what_comes_first() -> None:
    tracker = PartTracker("never", 1, Clock())
    only = tracker.join(_ordered(2, 1), None)
    failed, second = _next(only), _next(only)
    rest = _next(only)
    only.failed(failed)
    assert [_done(only, second), _done(only, rest)] == [False, False]
    again = _next(only)
    assert again.part == failed.part
    assert _done(only, again)


def test_pieces_of_one_pack_are_parts_of_their_own() -> None:
    pack = [ObjectKey("packs/0")]
    parts = [RestorePart(n, MIB, MIB, pack, pieces) for n, pieces in enumerate(([1], [2], []))]
    tracker = PartTracker("never", 1, Clock())
    only = tracker.join(RestorePlan(False, ["/w"], 2, 2, 2, parts, first=1), None)
    assert [_next(only).part for _ in parts] == parts


def test_stop_ends_all_waiting() -> None:
    tracker, (first, other) = _tracker("always", 2, 1)
    _next(first)
    with ThreadPoolExecutor(1) as thread:
        waiting = thread.submit(other.next)
        tracker.stop()
        with pytest.raises(RunCancelled):
            waiting.result(PATIENCE_S)
    tracker.linger(other)
