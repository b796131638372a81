"""The smoke test at every fake market. Machines have no bodies, and the clock is the test's."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import asyncssh
import pytest

from tests.fixtures.machines import KeyPair
from tests.markets.every import FAKES, NAMES
from tests.markets.faults import Fault
from tests.markets.server import FakeMarket
from torpor.control.rental import ending
from torpor.control.rental.records import Rental
from torpor.control.smoke.login import Inside
from torpor.control.smoke.plan import Plan, make_plan
from torpor.control.smoke.trial import SmokeReport, Trial
from torpor.shared.errors import BudgetExceeded, EndUnproven, ProviderError, TorporError
from torpor.shared.values import Endpoint

DEAR = {"max_usd": 1000.0}
CLOSED = "the port is closed"


class Clock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def nap(self, seconds: float) -> None:
        self.now_s += seconds

    def __call__(self) -> float:
        return self.now_s


@dataclass
class PaperDoor:
    """A machine's SSH server that is not there: ``says`` instead of a fault, and ``inside``."""

    inside: Inside
    says: str | None = None
    logins: list[Endpoint] = field(default_factory=list)

    def fault(self, endpoint: Endpoint, host_key: str | None) -> str | None:
        return self.says

    def look(self, endpoint: Endpoint) -> Inside:
        self.logins.append(endpoint)
        return self.inside


class Bench:
    """One fake market, its adapter, and a trial there."""

    def __init__(self, name: str, identity: KeyPair, monkeypatch: pytest.MonkeyPatch) -> None:
        self.fake: FakeMarket = FAKES[name]()
        self.provider: Any = self.fake.connect(timeout_s=0.5)
        self.clock = Clock()
        self.told: list[Rental] = []
        self._identity = asyncssh.import_private_key(identity.private)
        monkeypatch.setattr(ending.time, "sleep", lambda seconds: None)

    def plan(self, **options: Any) -> Plan:
        return make_plan(self.provider, **{**DEAR, **options})

    def run(self, *, says: str | None = None, inside: Inside | None = None) -> SmokeReport:
        plan = self.plan()
        self.door = PaperDoor(inside or sound(plan), says)
        return Trial(
            self.provider,
            plan,
            self._identity,
            self.door,
            self.told.append,
            (secrets.token_hex(8), secrets.token_hex(8)),
            nap=self.clock.nap,
            clock=self.clock,
        ).run()

    def alive(self) -> list[str]:
        return [machine.label for machine in self.fake.market.alive()]

    def told_of_every_end(self) -> bool:
        """Whether whoever watches knows that nothing is left."""
        return {rental.label: rental.state for rental in self.told}.values() <= {"ended"}


def sound(plan: Plan) -> Inside:
    """What an adapter expects of the machine."""
    gpu = f"NVIDIA {plan.offer.gpu}, 81559 MiB, 570.86"
    return Inside(
        gpus=(gpu,) * plan.offer.gpu_count if plan.offer.gpu else (),
        umask="0022",
        python="Python 3.12.3",
        system="Ubuntu 24.04.2 LTS",
        variables=("HOME", "PATH"),
    )


@pytest.fixture(params=NAMES)
def bench(
    request: pytest.FixtureRequest, identity_key: KeyPair, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Bench]:
    made = Bench(request.param, identity_key, monkeypatch)
    with made.fake:
        yield made


@pytest.fixture
def vast(identity_key: KeyPair, monkeypatch: pytest.MonkeyPatch) -> Iterator[Bench]:
    made = Bench("vast", identity_key, monkeypatch)
    with made.fake:
        yield made


def test_nothing_differs_and_nothing_is_left(bench: Bench) -> None:
    report = bench.run()
    assert report.passed, report.rows()
    assert len(bench.fake.market.rented) == 1
    assert bench.alive() == []
    assert len(bench.door.logins) == 1
    assert len(report.ended) == 1
    assert bench.told_of_every_end()
    assert 0 < report.usd <= report.worst_usd


def test_a_price_over_the_maximum_rents_nothing(bench: Bench) -> None:
    worst_usd = bench.plan().worst_usd
    bench.fake.calls.clear()
    with pytest.raises(BudgetExceeded, match="nothing was rented"):
        bench.plan(max_usd=worst_usd * 0.99)
    assert bench.fake.market.rented == []
    assert bench.plan(max_usd=worst_usd * 1.01).offer == bench.plan().offer
