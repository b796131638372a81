"""A store that is away for minutes, while a run works on a machine; the clock is the test's."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tasks.waiting import StoreWaits
from tests.fixtures.engine import Engine
from tests.fixtures.fault_proxy import Fault, FaultProxy, Kind, Matching, gets, puts
from tests.fixtures.stores import Server
from tests.fixtures.trees import differences, kept
from tests.markets.market import Clock
from torpor.control.store.patience import StorePatience
from torpor.control.store.s3 import S3Store
from torpor.shared.errors import StoreAway, StoreUnavailable
from torpor.shared.transfer.retries import Retries
from torpor.shared.transfer.transfer import Transfer
from torpor.shared.values import Away, Label, Machine, MachineId, ObjectKey, WorkspaceName

PATIENCE_S = 1800.0
MINUTES = [1, 10, 31]
CAUSES: list[tuple[Kind, int, str]] = [
    ("status", 503, "SlowDown"),
    ("status", 500, "InternalError"),
    ("reset", 0, ""),
]


class Store:
    """A real store behind a proxy; whoever waits for it moves the clock on."""

    def __init__(self, server: Server, clock: Clock) -> None:
        self.clock = clock
        self.proxy = FaultProxy(server.endpoint_url)
        self.began_unix: float | None = None
        self.back_unix = 0.0
        self.heard: list[Away] = []
        settings = server.settings(
            server.bucket(), endpoint_url=self.proxy.endpoint_url, patience_s=PATIENCE_S
        )
        self.store = S3Store.connect(settings, self.heard.append)

    def goes(self, when: Matching, minutes: float, cause: tuple[Kind, int, str]) -> None:
        """From the first request that ``when`` picks on, every request fails for so long."""
        self.began_unix = None

        def is_away(method: str, path: str) -> bool:
            if self.began_unix is None and when(method, path):
                self.began_unix = self.clock.now_unix
                self.back_unix = self.began_unix + 60 * minutes
            return self.began_unix is not None and self.clock.now_unix < self.back_unix

        kind, status, code = cause
        self.proxy.add(Fault(kind, is_away, 10**9, status, code))


@pytest.fixture
def away(seaweed: Server, monkeypatch: pytest.MonkeyPatch) -> Iterator[Store]:
    clock = Clock()
    for kind in (Retries, Transfer):
        defaults = kind.__init__.__kwdefaults__
        monkeypatch.setitem(defaults, "sleep", clock.advance)
        monkeypatch.setitem(defaults, "clock", lambda: clock.now_unix)
    store = Store(seaweed, clock)
    yield store
    store.proxy.close()


@pytest.fixture
def desk(away: Store, tmp_path: Path) -> Engine:
    return Engine(away.store, tmp_path / "agent")


def _work(tmp_path: Path) -> Path:
    root = tmp_path / "work"
    root.mkdir()
    for number in range(4):
        (root / f"{number}.bin").write_bytes(bytes([number]) * 3_000_000)
    return root


@pytest.mark.parametrize(("minutes", "cause"), [*zip(MINUTES, CAUSES, strict=True)])
def test_a_run_outlives_a_store_that_is_away_within_its_patience(
    minutes: int, cause: tuple[Kind, int, str], away: Store, desk: Engine, tmp_path: Path
) -> None:
    """After 30 minutes it ends, and what it had stored and fetched stays for the next one."""
    root, copy = _work(tmp_path), tmp_path / "copy"
    runs: list[tuple[Matching, Callable[[bool], object]]] = [
        (puts("/packs/"), lambda again: desk.snapshot([root])),
        (
            gets("/packs/"),
            lambda again: desk.restore(desk.snapshots()[-1], [copy], resume=again),
        ),
    ]
    for when, run in runs:
        away.goes(when, minutes, cause)
        if 60 * minutes < PATIENCE_S:
            run(False)
        else:
            with pytest.raises(StoreAway, match=r"given up after 3[01] min") as told:
                run(False)
            assert not told.value.retryable
            away.clock.now_unix = away.back_unix
            run(True)
        assert away.began_unix is not None
        assert away.clock.now_unix >= away.back_unix
    assert differences(kept(root), kept(copy)) == []


def test_the_control_side_waits_too_and_says_so(away: Store) -> None:
    key = ObjectKey("packs/one")
    away.store.put(key, b"work")
    away.goes(lambda method, path: True, 10, CAUSES[0])
    assert away.store.get(key, max_bytes=9) == b"work"
    assert away.heard
    assert all(heard.patience_s == PATIENCE_S for heard in away.heard)
    assert max(heard.away_s for heard in away.heard) < 600
    assert "SlowDown" in away.heard[0].error


def test_a_look_of_watch_does_not_wait(away: Store) -> None:
    """It comes back in two minutes, and has other stores to read."""
    away.store.put(ObjectKey("packs/one"), b"work")
    away.goes(lambda method, path: True, 10, CAUSES[0])
    began_unix = away.clock.now_unix
    with pytest.raises(StoreUnavailable, match="after 5 attempts"):
        StorePatience(PATIENCE_S).of(away.store).head(ObjectKey("packs/one"))
    assert away.clock.now_unix < began_unix + 60


def test_one_line_a_minute_says_what_the_waiting_costs(
    caplog: pytest.LogCaptureFixture,
) -> None:
    clock = Clock()
    waits = StoreWaits(logging.getLogger("waits"), clock=lambda: clock.now_unix)
    label = Label("me", WorkspaceName("demo"), "r1")
    waits.stands(Machine(MachineId("m1"), "vast", label, "running", None, price_usd_h=3.0))
    waits.stands(Machine(MachineId("own"), "", None, "running", None))
    for away_s in itertools.islice(itertools.count(10.0, 10.0), 30):  # every 10 s, of 8 parts
        for _ in range(8):
            waits.hear(Away("503 SlowDown", away_s, PATIENCE_S))
        clock.advance(10)
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == 5
    assert said[-1] == (
        "the store has been away for 250 s (503 SlowDown): asked again for up to 26 min more; "
        "the wait has cost $0.21 so far, at $3.00 an hour for machine m1"
    )
