"""The smoke test at every fake market. Machines have no bodies, and the clock is the test's."""

from __future__ import annotations

import base64
import re
import secrets
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import asyncssh
import msgspec
import pytest

from tests.fixtures.machines import KeyPair
from tests.markets.every import FAKES, NAMES
from tests.markets.faults import Fault, Kind
from tests.markets.server import FakeMarket
from torpor.control.providers.provider import Absent, Order
from torpor.control.rental import ending
from torpor.control.rental.records import Rental
from torpor.control.smoke import ending as smoke_ending
from torpor.control.smoke.login import Inside
from torpor.control.smoke.plan import MAX_USD, SmokePlan, make_plan
from torpor.control.smoke.trial import SmokeReport, SmokeTrial
from torpor.shared.errors import (
    BudgetExceeded,
    EndUnproven,
    InvalidInput,
    ProviderError,
    UnsafeDestroy,
)
from torpor.shared.values import Endpoint, Label, Machine, MachineId, workspace_name

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
        self.name = name
        self.fake: FakeMarket = FAKES[name]()
        self.provider: Any = self.fake.connect()
        self.clock = Clock()
        self.told: list[Rental] = []
        self.before_order: Callable[[], None] = lambda: None  # of the machine, after the probe
        self._identity = asyncssh.import_private_key(identity.private)
        monkeypatch.setattr(ending.time, "sleep", lambda seconds: None)

    def plan(self, **options: Any) -> SmokePlan:
        return make_plan(self.provider, **{**DEAR, **options})

    def run(self, *, says: str | None = None, inside: Inside | None = None) -> SmokeReport:
        plan = self.plan()
        self.door = PaperDoor(inside or sound(plan), says)
        self.trial = SmokeTrial(
            self.provider,
            plan,
            self._identity,
            self.door,
            self._hear,
            (secrets.token_hex(8), secrets.token_hex(8)),
            nap=self.clock.nap,
            clock=self.clock,
        )
        return self.trial.run()

    def alive(self) -> list[str]:
        return [machine.label for machine in self.fake.market.alive()]

    def told_of_every_end(self) -> bool:
        """Whether whoever watches knows that nothing is left."""
        return {*self.states().values()} <= {"ended"}

    def states(self) -> dict[str, str]:
        """What was told last of each rental."""
        return {rental.label.rental: rental.state for rental in self.told}

    def _hear(self, rental: Rental) -> None:
        self.told.append(rental)
        if rental.state == "asked" and len({told.label for told in self.told}) == 2:
            self.before_order()


def sound(plan: SmokePlan) -> Inside:
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
    with pytest.raises(BudgetExceeded, match="nothing was rented"):
        bench.plan(max_usd=worst_usd * 0.99)
    assert bench.fake.market.rented == []
    assert bench.plan(max_usd=worst_usd * 1.01).worst_usd == worst_usd


@pytest.mark.parametrize("max_usd", [float("nan"), -1.0])
def test_a_maximum_that_is_no_amount_is_refused(vast: Bench, max_usd: float) -> None:
    with pytest.raises(InvalidInput, match="give an amount"):
        vast.plan(max_usd=max_usd)


def test_the_worst_case_has_the_time_until_the_market_has_settled(vast: Bench) -> None:
    plan = vast.plan()
    lives_s = plan.minutes * 60 + ending.GONE_S + vast.provider.abilities.settling_s
    assert plan.worst_usd >= plan.offer.bound_usd_h * lives_s / 3600
    assert vast.plan(max_usd=MAX_USD).worst_usd == plan.worst_usd


def test_a_machine_that_something_there_can_end_gets_a_lifetime(bench: Bench) -> None:
    plan = bench.plan(minutes=20.0)
    ender = bench.provider.abilities.ends_machines
    assert (plan.lifetime_s is not None, plan.ender) == (bool(ender), ender)
    assert ("watch its console" in plan.last_end) is not bool(ender)
    bench.run()
    ends = LIFETIMES.get(bench.name)
    assert bool(ender) == (ends is not None)
    if ends is not None:
        asked = str(bench.fake.market.rented[-1].request)
        packed = re.findall(r"echo ([A-Za-z0-9+/=]+) \| base64", asked)
        asked += "".join(base64.b64decode(script).decode() for script in packed)
        assert all(word in asked for word in ends), asked


LIFETIMES = {
    "ec2": ("'InstanceInitiatedShutdownBehavior': 'terminate'", "shutdown -P +15"),
    "gcp": ("'maxRunDuration': {'seconds': '900'}", "'instanceTerminationAction': 'DELETE'"),
    "kubernetes": ("'activeDeadlineSeconds': 900",),
    "runpod": ("+ 900))", '/v2/pods/"$RUNPOD_POD_ID" RUNPOD_API_KEY'),
    "vast": ("+ 900))", '/api/v0/instances/"$CONTAINER_ID"/ CONTAINER_API_KEY'),
}
"""What such a create says: ten minutes, and the time that an end may take."""


def test_no_machine_that_may_hold_work_is_ordered_with_a_lifetime(vast: Bench) -> None:
    label = Label("torpor", workspace_name("mywork"), "0" * 16)
    with pytest.raises(UnsafeDestroy, match="may hold work"):
        Order(
            offer=vast.plan().offer,
            label=label,
            public_key="",
            host_key="",
            jump_host_key="",
            lifetime_s=900.0,
        )


def test_an_account_with_too_little_money_rents_nothing(vast: Bench) -> None:
    vast.fake.market.balance_usd = 0.01
    with pytest.raises(BudgetExceeded, match=r"the account has 0\.01 \$: nothing was rented"):
        vast.plan()


def test_a_machine_whose_ssh_never_answers_is_ended_in_time(bench: Bench) -> None:
    report = bench.run(says=CLOSED)
    assert CLOSED in report.fault
    assert bench.clock.now_s < bench.plan().minutes * 60
    assert (bench.alive(), bench.told_of_every_end()) == ([], True)
    assert len(bench.fake.market.rented) == 1


def test_a_create_without_an_answer_is_not_repeated_and_its_machine_is_ended(
    bench: Bench,
) -> None:
    bench.before_order = lambda: bench.fake.faults.arm(Fault("lost", "create"))
    report = bench.run()
    assert len(bench.fake.market.rented) == 1
    assert report.fault
    assert (bench.alive(), bench.told_of_every_end()) == ([], True)


def test_a_machine_that_was_rented_without_an_answer_and_is_listed_late_is_ended(
    vast: Bench,
) -> None:
    def lose() -> None:
        vast.fake.faults.arm(Fault("lost", "create"))
        vast.fake.market.next_hidden_looks = 2

    vast.before_order = lose
    vast.run()
    assert vast.alive() == []
    assert vast.clock.now_s > vast.provider.abilities.settling_s


@pytest.mark.parametrize("kind", ["lost", "denied", "lives", "wrong shape"])
def test_a_destroy_that_fails_is_repeated(vast: Bench, kind: Kind) -> None:
    vast.before_order = lambda: vast.fake.faults.arm(Fault(kind, "destroy"))
    report = vast.run()
    assert report.passed, report.rows()
    assert vast.alive() == []


def test_a_market_that_never_ends_it_is_no_success(
    vast: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(smoke_ending, "GONE_S", 0.0)
    vast.before_order = lambda: vast.fake.faults.arm(Fault("lives", "destroy", count=1000))
    with pytest.raises(EndUnproven, match="may still cost money"):
        vast.run()
    assert "standing" in vast.states().values()  # so the watchdog goes on


def test_what_was_seen_is_kept_when_the_market_takes_hours_to_end_it(
    vast: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    def slowly(*given: object, **options: object) -> str:
        error = EndUnproven("it may take up to 12 h")
        error.accepted = True
        raise error

    monkeypatch.setattr(smoke_ending, "destroy", slowly)
    with pytest.raises(EndUnproven, match="12 h"):
        vast.run()
    report = vast.trial.report()
    assert report.inside is not None
    (seen,) = [row["seen"] for row in report.rows() if row["what"] == "end"]
    assert seen.startswith("ending: the market has accepted it")
    assert report.passed


def test_an_interrupted_command_ends_its_machine(vast: Bench) -> None:
    def interrupt(endpoint: Endpoint) -> Inside:
        raise KeyboardInterrupt

    look = PaperDoor.look
    try:
        PaperDoor.look = lambda door, endpoint: interrupt(endpoint)  # type: ignore[method-assign]
        with pytest.raises(KeyboardInterrupt):
            vast.run()
    finally:
        PaperDoor.look = look  # type: ignore[method-assign]
    assert (vast.alive(), vast.told_of_every_end()) == ([], True)


def test_nothing_is_rented_when_nobody_watches(vast: Bench) -> None:
    def deaf() -> None:
        raise ProviderError("the watchdog has ended")

    vast.before_order = deaf
    report = vast.run()
    assert report.fault == "the watchdog has ended"
    assert vast.fake.market.rented == []


def test_nothing_is_rented_when_half_of_the_watchdog_s_time_is_over(
    vast: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    create = vast.provider.create

    def slow(order: Order) -> Machine:
        vast.clock.nap(301.0)
        made: Machine = create(order)
        return made

    monkeypatch.setattr(vast.provider, "create", slow)
    report = vast.run()
    assert "none was rented" in report.fault
    assert (vast.fake.market.rented, vast.told_of_every_end()) == ([], True)


@pytest.mark.parametrize("minutes", [0.1, 0.0, -1.0, 1e9, float("nan")])
def test_a_time_that_leaves_none_to_end_the_machine_is_refused(vast: Bench, minutes: float) -> None:
    with pytest.raises(InvalidInput, match="give 1 to 1440"):
        vast.plan(minutes=minutes)


def test_a_dead_offer_that_becomes_a_machine_stops_the_test(
    vast: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    create = vast.provider.create
    real = vast.plan().offer
    monkeypatch.setattr(
        vast.provider,
        "create",
        lambda order: create(msgspec.structs.replace(order, offer=real)),
    )
    report = vast.run()
    assert [check.what for check in report.checks if check.differs] == ["order of a dead offer"]
    assert len(vast.fake.market.rented) == 1
    assert vast.alive() == []


def test_what_differs_is_named(vast: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    finds = vast.provider.find

    def dearer(machine: MachineId) -> Machine | Absent:
        found: Machine | Absent = finds(machine)
        if isinstance(found, Absent):
            return found
        return msgspec.structs.replace(found, price_usd_h=found.price_usd_h * 1.1)

    monkeypatch.setattr(vast.provider, "find", dearer)
    inside = Inside(gpus=("Tesla T4, 15360 MiB, 535.1",), umask="0077", python="Python 3.8.10")
    report = vast.run(inside=inside)
    differ = [row["what"] for row in report.rows() if row["differs"]]
    assert differ == ["price of the machine", "GPUs", "Python", "umask", "system", "environment"]
    assert not report.passed
    assert report.title().startswith(f"{vast.provider.identity}: 6 of ")


def test_a_machine_that_is_listed_later_than_assumed_is_named(
    vast: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    able = msgspec.structs.replace(vast.provider.abilities, settling_s=1.0)
    monkeypatch.setattr(vast.provider, "abilities", able)
    vast.fake.market.next_starting_looks = 3
    lists = vast.provider.list_own
    late = lambda: lists() if vast.clock.now_s > 2.0 else []  # noqa: E731
    monkeypatch.setattr(vast.provider, "list_own", late)
    report = vast.run()
    assert [row["what"] for row in report.rows() if row["differs"]] == ["listed by its label"]


def test_a_market_is_not_asked_for_its_list_all_the_time(
    vast: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    lists, looks = vast.provider.list_own, []

    def hidden() -> list[Machine]:
        if vast.alive():
            looks.append(vast.clock.now_s)
        return [] if vast.clock.now_s < 60.0 else lists()

    monkeypatch.setattr(vast.provider, "list_own", hidden)
    vast.run(says=CLOSED)
    early = [look for look in looks if look < 60.0]
    assert len(early) > 2
    # The clock is a sum of random pauses: a pause of 5 s may be off in its last digits.
    assert all(round(later - look, 6) >= 5.0 for look, later in pairwise(early))
