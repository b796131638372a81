"""The campaign of rentals: wakes over the fake markets with faults and kills, hibernations
between them, then reconcile.

    python -m tests.markets.campaign --wakes 500
    python -m tests.markets.campaign --wakes 60 --seed 99024

Without a seed, those in ``FOUND`` come first where there are wakes for them, then a fresh one.
Exits with 1 on any violation, and with 2 where no machine can boot. Each flow runs in a process of
its own. Hours pass between two flows, for the markets and for the flows alike: what a machine costs
does not depend on this host's speed.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import os
import random
import re
import secrets
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Final, cast

import msgspec

from flows import create, hibernate, reconcile, wake
from tasks.plain_runner import PlainRunner
from tasks.workspace import OpenWorkspace
from tests.fixtures.kill_points import killed_in_a_child
from tests.fixtures.machines import new_key_pair
from tests.fixtures.short_agent import SOON_ABANDONED, copy_agent, installing
from tests.fixtures.stores import Server
from tests.fixtures.trees import Tree, differences, facts, let_settle
from tests.fixtures.world import BUCKET, own_store
from tests.markets.boot import Machines, unfit
from tests.markets.disturbance import Plan, calm, disturbed
from tests.markets.every import DEMO, NAMES, Markets, opened_markets
from tests.markets.kills import killing_at_request
from tests.markets.market import Clock, Rented
from torpor.control.providers.seam import Provider
from torpor.control.remote.ssh import Identity
from torpor.control.reports import HibernateReport, WakeReport
from torpor.control.store.clock import StoreClock
from torpor.control.store.s3 import S3Store
from torpor.shared.errors import TorporError
from torpor.shared.values import Want, WorkspaceSpec

SETTLING_S: Final = 2.0
READY_S: Final = 30.0
DEAF_S: Final = 3.0
TIMEOUT_S: Final = 2.0
HOUR_S: Final = 3600.0
ROUNDS_TO_RECONCILE: Final = 20
SPEND_SLACK: Final = 0.01
LATE_S: Final = 300.0  # hours pass between two flows
FOUND: Final = {99024: 60}
"""Seeds that have found a fault, and after how many wakes at the latest."""

_real_time = time.time


class AheadClock(Clock):
    """The time of this host, and the hours that have passed at once."""

    def __init__(self) -> None:
        self.ahead_s = 0.0

    @property
    def now_unix(self) -> float:  # type: ignore[override]
        return _real_time() + self.ahead_s

    def advance(self, seconds: float) -> None:
        self.ahead_s += seconds


@dataclass
class Told:
    """How a flow's process ended."""

    killed: bool
    report: dict[str, Any] | None = None
    error: str = ""

    def __str__(self) -> str:
        return "killed" if self.killed else self.error or "completed"


@dataclass
class Campaign:
    """One workspace that is woken, used and hibernated again and again."""

    markets: Markets
    opened: OpenWorkspace
    clock: AheadClock
    rng: random.Random
    violations: list[str] = field(default_factory=list)
    outcomes: Counter[str] = field(default_factory=Counter)
    wakes: int = 0
    mine: Rented | None = None  # the machine that was handed over and not hibernated since
    truth: Tree = field(default_factory=dict)  # the workspace on that machine
    stored: list[Tree] = field(default_factory=list)  # what the newest snapshot may hold
    spend: tuple[float, float] = (0.0, 0.0)
    late: int = 0  # rentals whose end was found later
    foreign: list[Rented] = field(default_factory=list)

    # -- the story

    def begin(self) -> None:
        """Create the first machine, and machines that are not ours beside it."""
        for name in NAMES:
            if self.markets.fakes[name].rents_by_hand:
                self.foreign.append(self.markets.fakes[name].rent_by_hand())
        told = self._flow(calm(self.rng), lambda opened: create.fn(opened.spec.name))
        assert told.report is not None, told
        self._settle_mine(f"create ({told})")
        self._work()

    def round(self, number: int) -> str:
        """Hibernate, then wake until the workspace is awake; returns what happened."""
        said = []
        if self.mine is not None:
            plan = calm(self.rng) if self.rng.random() < 0.6 else disturbed(self.rng, of_wake=False)
            told = self._flow(plan, lambda opened: hibernate.fn(opened.spec.name))
            said.append(f"hibernate [{plan}] {told}")
            self._pass()
            if told.report is not None:
                self._see_gone(str(plan))
            elif plan.is_calm:
                self._violate(f"an undisturbed hibernate failed: {told}")
            self._settle_mine(f"hibernate [{plan}] {told}")
            ended = self.mine is None
            self.stored = [self.truth] if ended else [*self.stored, self.truth]
            if not ended:
                return "; ".join(said)
        self.wakes += 1
        plan = calm(self.rng) if self.rng.random() < 0.15 else disturbed(self.rng, of_wake=True)
        told = self._flow(plan, lambda opened: wake.fn(opened.spec.name))
        said.append(f"wake [{plan}] {told}")
        self.outcomes[_short(told)] += 1
        self._settle_mine(f"wake [{plan}] {told}")
        if told.report is not None:
            self._see_woken(str(plan))
            self._work()
        elif not self._ended_by_name(told) and plan.is_calm:
            self._violate(f"an undisturbed wake failed: {told}")
        self._pass()
        if self.mine is not None and self.rng.random() < 0.1:
            said.append(self._take_back(self.mine))
        if (number + 1) % ROUNDS_TO_RECONCILE == 0:
            self.reconcile()
        return "; ".join(said)

    def reconcile(self) -> None:
        """Wake calmly, let all settle, reconcile: nothing is left but what was handed over."""
        if self.mine is None:
            told = self._flow(calm(self.rng), lambda opened: wake.fn(opened.spec.name))
            if self._ended_by_name(told):
                told = self._flow(calm(self.rng), lambda opened: wake.fn(opened.spec.name))
            self._settle_mine(f"calm wake {told}")
            if told.report is None:
                self._violate(f"an undisturbed wake failed: {told}")
            else:
                self._see_woken("undisturbed")
        for _ in range(3):
            self._pass()
            told = self._flow(
                calm(self.rng), lambda opened: reconcile.fn(opened.spec.name, abandoned=True)
            )
            if told.report is None:
                self._violate(f"an undisturbed reconcile failed: {told}")
        for name, machine in self._alive():
            if machine is not self.mine:
                self._violate(f"machine {machine.id} at {name} is alive after reconcile")
        left = [one for one in self.opened.rentals.open() if one.state != "handed over"]
        for rental in left:
            self._violate(f"rental {rental.label.rental} is {rental.state} after reconcile")
        self._see_spend()

    def _ended_by_name(self, told: Told) -> bool:
        """Do what the error of a wake says, if a killed run left a machine that never answers: only
        the user may say that it holds nothing."""
        found = re.match(r"MachineUnreachable: machine (\S+) at .* name it in `end` of", told.error)
        if found is None:
            return False
        ended = self._flow(
            calm(self.rng), lambda opened: reconcile.fn(opened.spec.name, end=[found[1]])
        )
        if ended.report is None:
            self._violate(f"machine {found[1]} never answers and was not ended: {ended}")
        return True

    def end(self) -> None:
        """Hibernate at last; nothing alive, nothing left over."""
        self.reconcile()
        told = self._flow(calm(self.rng), lambda opened: hibernate.fn(opened.spec.name))
        if told.report is None:
            self._violate(f"the last hibernate failed: {told}")
        self.mine = None
        for name, machine in self._alive():
            self._violate(f"machine {machine.id} at {name} is alive at the end")
        for name in NAMES:
            for one in self._provider(name, "").residue():
                self._violate(f"{one.kind} {one.id} at {name} is left at the end")
        for rental in self.opened.rentals.open():
            self._violate(f"rental {rental.label.rental} is {rental.state} at the end")
        for machine in self.foreign:
            if not machine.alive:
                self._violate(f"the foreign machine {machine.id} was ended")
        self._see_spend()

    # -- what must hold

    def _settle_mine(self, after: str) -> None:
        """Which machine is the user's now; never two, and none of ours is gone."""
        over = [one for one in self.opened.rentals.open() if one.state == "handed over"]
        alive = {(name, m.id): m for name, m in self._alive()}
        by_market = {self._provider(name, "").identity: name for name in NAMES}
        live = [(by_market[one.provider], str(one.machine)) for one in over]
        held = [alive[one] for one in live if one in alive]
        if len(held) > 1:
            self._violate(f"{len(held)} machines are handed over after {after}")
        was = self.mine
        if was is not None and not was.alive and "hibernate" not in after:
            self._violate(f"machine {was.id} was ended though it was handed over: {after}")
        self.mine = held[0] if held else None
        if was is not None and was.alive and self.mine is not was:
            self._violate(f"machine {was.id} is alive and not handed over any more: {after}")

    def _see_gone(self, plan: str) -> None:
        for name, machine in self._alive():
            if machine is self.mine:
                self._violate(f"{machine.id} at {name} lives after a hibernate ({plan})")

    def _see_woken(self, plan: str) -> None:
        if self.mine is None:
            self._violate(f"a wake completed and no machine is handed over ({plan})")
            return
        now = facts(self._workspace(self.mine))
        if now not in self.stored:
            found = differences(self.stored[-1], now)
            self._violate(f"the woken workspace differs ({plan}): {found[:3]}")
        self.truth = now

    def _see_spend(self) -> None:
        """What the records say was spent, and what the markets count.

        A run that was killed right after the end of its machine left the record to a later run,
        and only its market knows when it took a machine back: there the end must lie between the
        last sight and the proof.
        """
        now_unix = self.clock.now_unix
        markets = [self.markets.fakes[name].market for name in NAMES]
        machines = {one.id: one for market in markets for one in market.rented}
        recorded = counted = 0.0
        self.late = 0
        for rental in [*self.opened.rentals.open(), *self.opened.rentals.history()]:
            machine = machines.pop(str(rental.machine), None)
            if machine is None:
                continue
            ended, proven = machine.ended_unix or now_unix, rental.ended_unix or now_unix
            if proven - ended > LATE_S:
                self.late += 1
                if ended < (rental.seen_unix or rental.created_unix):
                    self._violate(f"machine {machine.id} was seen after its end")
                continue
            recorded += (proven - rental.created_unix) / HOUR_S * rental.price_usd_h
            counted += (ended - machine.created_unix) / HOUR_S * machine.usd_h
        for machine in machines.values():
            if machine not in self.foreign:
                self._violate(f"no rental has a record of machine {machine.id}")
        self.spend = (recorded, counted)
        if abs(recorded - counted) > SPEND_SLACK * counted:
            self._violate(f"the records say {recorded:.2f} USD, the markets {counted:.2f} USD")

    # -- one flow

    def _flow(self, plan: Plan, work: Callable[[OpenWorkspace], Any]) -> Told:
        heard, speak = os.pipe()
        for name, fault in plan.faults:
            self.markets.fakes[name].faults.arm(fault)
        for name in NAMES:
            market = self.markets.fakes[name].market
            market.next_hidden_looks = plan.hidden_looks
            self._boot(name, deaf=name == plan.deaf)

        def child() -> None:
            time.time = lambda: _real_time() + self.clock.ahead_s
            hear = StoreClock.hear

            def heard(clock: StoreClock, date: str, asked: float, answered: float) -> None:
                """The hours have passed at the store, too."""
                hear(clock, date, asked - self.clock.ahead_s, answered - self.clock.ahead_s)

            StoreClock.hear = heard  # type: ignore[method-assign]
            told: dict[str, Any]
            try:
                told = {"report": self._run(plan, work)}
            except TorporError as error:
                told = {"error": f"{type(error).__name__}: {error}"}
            except Exception:  # noqa: BLE001 - an error that is not ours is a finding
                told = {"error": f"TRACEBACK {traceback.format_exc()}"}
            os.write(speak, json.dumps(told).encode()[:60_000])

        fakes = [self.markets.fakes[name] for name in NAMES]
        try:
            with killing_at_request(fakes, plan.at_request) as announced:
                killed = killed_in_a_child(lambda: (announced(), child()))
        finally:
            os.close(speak)
            with os.fdopen(heard, "rb") as pipe:
                said = pipe.read()
            for fake in fakes:
                fake.faults.clear()
                for machine in fake.market.rented:
                    machine.hidden_looks = 0
        if killed:
            return Told(killed=True)
        told = Told(killed=False, **json.loads(said))
        if told.error.startswith("TRACEBACK"):
            self._violate(told.error)
        return told

    def _run(self, plan: Plan, work: Callable[[OpenWorkspace], Any]) -> dict[str, Any]:
        """In the flow's own process."""
        steps = 0

        def before(label: str) -> None:
            nonlocal steps
            steps += 1
            if steps == plan.at_step:
                os.kill(os.getpid(), signal.SIGKILL)

        known = {name: self._provider(name, plan.deaf) for name in NAMES}
        spec = msgspec.structs.replace(
            self.opened.spec,
            want=msgspec.structs.replace(self.opened.spec.want, rank=plan.rank, spot=plan.spot),
        )
        opened = replace(
            self.opened,
            spec=spec,
            providers=tuple(known[name] for name in plan.named),
            others=lambda: tuple(known.values()),
        )
        with PlainRunner(opened, wait_factor=0.1, before=before):
            report = work(opened)
        if isinstance(report, WakeReport | HibernateReport):
            return {"snapshot": report.snapshot}
        return {}

    def _provider(self, name: str, deaf: str) -> Provider:
        provider = self.markets.provider(name, timeout_s=TIMEOUT_S)
        ready_s = DEAF_S if name == deaf else READY_S
        provider.__dict__["abilities"] = msgspec.structs.replace(
            provider.abilities, settling_s=SETTLING_S, ready_s=ready_s
        )
        return provider

    def _boot(self, name: str, *, deaf: bool) -> None:
        fake, boot = self.markets.fakes[name], self.markets.machines.boot
        usual = partial(boot, kind=fake.body)
        fake.market.boot = (lambda _: boot(["sleep", "1000000"])) if deaf else usual

    # -- the world

    def _alive(self) -> Iterator[tuple[str, Rented]]:
        for name in NAMES:
            for machine in self.markets.fakes[name].market.alive():
                if machine not in self.foreign:
                    yield name, machine

    def _workspace(self, machine: Rented) -> Path:
        return cast("Any", machine.body).root / "root/workspace"

    def _work(self) -> None:
        """The user changes something."""
        if self.mine is None:
            return
        place = self._workspace(self.mine)
        (place / "sub").mkdir(parents=True, exist_ok=True)
        (place / f"sub/{self.rng.randrange(5)}").write_bytes(self.rng.randbytes(2000))
        (place / "count").write_text(f"{self.wakes}\n")
        let_settle()
        self.truth = facts(place)

    def _take_back(self, machine: Rented) -> str:
        """Its market ends it, as markets do with spot machines; what was not stored is lost."""
        name = next(name for name, one in self._alive() if one is machine)
        if not self.markets.fakes[name].rents_by_hand or not self.stored:
            return ""
        self.markets.fakes[name].market.end(machine)
        self.mine = None
        return f"{name} took {machine.id} back"

    def _pass(self) -> None:
        self.clock.advance(HOUR_S * self.rng.uniform(5, 40))

    def _violate(self, what: str) -> None:
        self.violations.append(what)
        print(f"     VIOLATION: {what}", flush=True)


def _short(told: Told) -> str:
    return "killed" if told.killed else told.error.split(":")[0] or "completed"


@contextlib.contextmanager
def open_campaign(seed: int) -> Iterator[Campaign]:
    folder = Path(tempfile.mkdtemp(prefix="torpor-market-"))
    clock = AheadClock()
    keys = new_key_pair()
    with own_store(folder / "store") as store:
        server: Server = store.server
        machines_folder = folder / "machines"
        machines_folder.mkdir()
        machines = Machines(machines_folder)
        agent = copy_agent(folder / "agent", SOON_ABANDONED)
        with opened_markets(machines) as markets, installing(agent):
            for fake in markets.fakes.values():
                fake.market.clock = clock
                fake.market.page = 2
            settings = server.settings(BUCKET, "kept")
            opened = OpenWorkspace(
                spec=WorkspaceSpec(
                    DEMO, ["~/workspace"], want=Want(gpu="H100", disk_gib=20), parts=2
                ),
                store=S3Store.connect(settings),
                providers=(),
                identity=Identity(keys.private),
                owner="tests",
                key=secrets.token_bytes(32),
            )
            try:
                yield Campaign(markets, opened, clock, random.Random(seed))
            finally:
                machines.end()
    shutil.rmtree(folder, ignore_errors=True)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.markets.campaign")
    parser.add_argument("--wakes", type=int, default=500)
    parser.add_argument("--seed", type=int, help="this one alone")
    given = parser.parse_args(argv)
    if why := unfit():
        print(why, file=sys.stderr)
        return 2
    began = time.monotonic()
    done = [_carry_out(seed, wakes) for seed, wakes in plan(given.wakes, given.seed)]
    if len(done) > 1:
        print(
            f"in all {given.wakes} wakes of {len(done)} seeds in {time.monotonic() - began:.0f} s; "
            f"{sum(done)} violations"
        )
    return 1 if any(done) else 0


def plan(wakes: int, seed: int | None) -> list[tuple[int, int]]:
    """The seeds of a campaign, and how many wakes of each."""
    if seed is not None:
        return [(seed, wakes)]
    known = list(FOUND.items()) if wakes > sum(FOUND.values()) else []
    fresh = random.SystemRandom().randrange(1 << 32)
    return [*known, (fresh, wakes - sum(count for _, count in known))]


def _carry_out(seed: int, wakes: int) -> int:
    """The number of violations."""
    print(f"market campaign: {wakes} wakes, seed {seed}", flush=True)
    began, number = time.monotonic(), 0
    with open_campaign(seed) as campaign:
        campaign.begin()
        while campaign.wakes < wakes:
            said = campaign.round(number)
            print(f"{campaign.wakes:4} {time.monotonic() - began:6.0f} s  {said[:230]}", flush=True)
            number += 1
        campaign.end()
        outcomes = ", ".join(f"{n} {what}" for what, n in campaign.outcomes.most_common())
        recorded, counted = campaign.spend
        print(
            f"{campaign.wakes} wakes in {time.monotonic() - began:.0f} s ({outcomes}); "
            f"{len(campaign.opened.rentals.history())} rentals, {campaign.late} found ended later; "
            f"of the others {recorded:.2f} USD by the records, {counted:.2f} USD by the markets; "
            f"{len(campaign.violations)} violations"
        )
        return len(campaign.violations)


if __name__ == "__main__":
    logging.getLogger("torpor.plain").setLevel(logging.CRITICAL)
    sys.exit(main())
