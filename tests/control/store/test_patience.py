"""How long one store may hold up whoever asks many."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

import pytest

from tests.contracts.store_contract import KEY, StoreContract
from tests.fixtures.loopback import Handler, Loopback
from tests.fixtures.memory_store import MemoryStore
from tests.fixtures.waiting import PATIENCE_S
from tests.markets.market import Clock
from torpor.control.store import s3_requests
from torpor.control.store.object_store import ObjectStore
from torpor.control.store.patience import StorePatience
from torpor.control.store.s3 import S3Settings, S3Store
from torpor.shared.errors import StoreError
from torpor.shared.values import ObjectKey


class TestPatient(StoreContract):
    @pytest.fixture
    def store(self) -> Iterator[ObjectStore]:
        memory = MemoryStore()
        yield StorePatience(PATIENCE_S).of(memory)
        memory.close()


class Slow(MemoryStore):
    """Each call takes 50 s by its clock, once ``together`` of them are there."""

    def __init__(self, clock: Clock, name: str, together: int = 1) -> None:
        super().__init__()
        self.clock, self.name, self.calls = clock, name, 0
        self.met = Barrier(together)

    @property
    def address(self) -> str:
        return self.name

    def _check(self, key: ObjectKey | None = None) -> None:
        self.calls += 1
        if self.met.wait(PATIENCE_S) == 0:
            self.clock.advance(50)
        self.met.wait(PATIENCE_S)


def test_the_time_is_the_store_s_in_all_and_no_other_store_s() -> None:
    clock = Clock()
    patience = StorePatience(100, lambda: clock.now_unix)
    slow, other = Slow(clock, "slow"), Slow(clock, "other")
    for one in (patience.of(slow), patience.of(slow)):  # as of another workspace
        one.head(KEY)
    with pytest.raises(StoreError, match="the store slow has held up this run for 100 s") as told:
        patience.of(slow).head(KEY)
    assert not told.value.retryable
    assert slow.calls == 2, "it is not asked any more"
    assert patience.of(other).head(KEY) is None


def test_calls_at_the_same_time_count_once() -> None:
    clock = Clock()
    slow = Slow(clock, "slow", together=8)
    one = StorePatience(100, lambda: clock.now_unix).of(slow)
    with ThreadPoolExecutor(8) as threads:
        assert [*threads.map(one.head, [KEY] * 8)] == [None] * 8
    slow.met = Barrier(1)
    assert one.head(KEY) is None


def test_a_listing_whose_pages_never_end_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each has a token of its own, and nothing in it."""
    monkeypatch.setattr(s3_requests, "MOST_PAGES", 5)
    asked = []

    class Page(Handler):
        def do_GET(self) -> None:
            asked.append(self.path)
            more = f"<NextContinuationToken>{len(asked)}</NextContinuationToken>"
            self.reply(200, f"<R><IsTruncated>true</IsTruncated>{more}</R>".encode())

    server = Loopback(Page)
    store = S3Store.connect(S3Settings("b-1", "A", "s", endpoint_url=server.url, attempts=2))
    with pytest.raises(StoreError, match="no end after 5 pages"):
        [*store.list("")]
    server.close()
    assert len(asked) == 5
