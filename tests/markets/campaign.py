"""The campaign of rentals: wakes over the fake markets with faults and kills, hibernations
between them, then reconcile.

    python -m tests.markets.campaign --wakes 500
    python -m tests.markets.campaign --wakes 60 --seed 99024

Each flow runs in a process of its own. Hours pass between two flows, for the markets and for the
flows alike: what a machine costs does not depend on this host's speed.
"""

from __future__ import annotations

import logging
import os
import re
import signal
import sys
import time
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
from tests.campaign.command import Command, Found, Given
from tests.fixtures.kill_points import Child, Say, Told
from tests.fixtures.trees import Tree, differences, facts, let_settle
from tests.markets.boot import unfit
from tests.markets.disturbance import Plan, calm, disturbed
from tests.markets.every import NAMES
from tests.markets.kills import killing_at_request
from tests.markets.market import Rented
from tests.markets.world import READY_S, MarketWorld, market_world, real_time
from torpor.control.reports import HibernateReport, WakeReport
from torpor.control.store.clock import StoreClock

DEAF_S: Final = 3.0
HOUR_S: Final = 3600.0
ROUNDS_TO_RECONCILE: Final = 20
SPEND_SLACK: Final = 0.01
LATE_S: Final = 300.0  # hours pass between two flows


@dataclass
class Campaign(MarketWorld):
    """The workspace is woken, used and hibernated again and again."""

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
        assert told.result, told
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
            if told.result:
                self._see_gone(str(plan))
            elif plan.is_calm:
                self.violations.add(f"an undisturbed hibernate failed: {told}")
            self._settle_mine(f"hibernate [{plan}] {told}")
            ended = self.mine is None
            self.stored = [self.truth] if ended else [*self.stored, self.truth]
            if not ended:
                return "; ".join(said)
        self.wakes += 1
        plan = calm(self.rng) if self.rng.random() < 0.15 else disturbed(self.rng, of_wake=True)
        told = self._flow(plan, lambda opened: wake.fn(opened.spec.name))
        said.append(f"wake [{plan}] {told}")
        self.outcomes[str(told).partition(":")[0]] += 1
        self._settle_mine(f"wake [{plan}] {told}")
        if told.result:
            self._see_woken(str(plan))
            self._work()
        else:
            if self.mine is not None:  # it was killed after it had handed it over
                self._see_woken(str(plan))
            if not self._ended_by_name(told) and plan.is_calm:
                self.violations.add(f"an undisturbed wake failed: {told}")
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
            if not told.result:
                self.violations.add(f"an undisturbed wake failed: {told}")
            else:
                self._see_woken("undisturbed")
        for _ in range(3):
            self._pass()
            told = self._flow(
                calm(self.rng), lambda opened: reconcile.fn(opened.spec.name, abandoned=True)
            )
            if not told.result:
                self.violations.add(f"an undisturbed reconcile failed: {told}")
        for name, machine in self._alive():
            if machine is not self.mine:
                self.violations.add(f"machine {machine.id} at {name} is alive after reconcile")
        left = [r for r in self.opened.rentals.open() if r.state != "handed over"]
        for rental in left:
            self.violations.add(f"rental {rental.label.rental} is {rental.state} after reconcile")
        self._see_spend()

    def _ended_by_name(self, told: Told) -> bool:
        """Do what the error of a wake says, if a killed run left a machine that never answers: only
        the user may say that it holds nothing."""
        found = re.match(r"MachineUnreachable: machine (\S+) at .* name it in `end` of", str(told))
        if found is None:
            return False
        ended = self._flow(
            calm(self.rng), lambda opened: reconcile.fn(opened.spec.name, end=[found[1]])
        )
        if not ended.result:
            self.violations.add(f"machine {found[1]} never answers and was not ended: {ended}")
        return True

    def end(self) -> None:
        """Hibernate at last; nothing alive, nothing left over."""
        self.reconcile()
        told = self._flow(calm(self.rng), lambda opened: hibernate.fn(opened.spec.name))
        if not told.result:
            self.violations.add(f"the last hibernate failed: {told}")
        self.mine = None
        for name in NAMES:
            for left in self.provider(name).residue():
                # A start script or key that could not be deleted costs nothing: the next create
                # of its owner deletes it a day later (tests/control/providers/test_verda.py).
                if left.price_usd_h != 0:
                    self.violations.add(f"{left.kind} {left.id} at {name} is left at the end")
        self.see_nothing_left(self._alive())
        for machine in self.foreign:
            if not machine.alive:
                self.violations.add(f"the foreign machine {machine.id} was ended")
        self._see_spend()

    # -- what must hold

    def _settle_mine(self, after: str) -> None:
        """Which machine is the user's now; never two, and none of ours is gone."""
        over = [r for r in self.opened.rentals.open() if r.state == "handed over"]
        alive = {(name, m.id): m for name, m in self._alive()}
        by_market = {self.provider(name).identity: name for name in NAMES}
        live = [(by_market[rental.provider], str(rental.machine)) for rental in over]
        held = [alive[at] for at in live if at in alive]
        if len(held) > 1:
            self.violations.add(f"{len(held)} machines are handed over after {after}")
        was = self.mine
        if was is not None and not was.alive and "hibernate" not in after:
            self.violations.add(f"machine {was.id} was ended though it was handed over: {after}")
        self.mine = held[0] if held else None
        if was is not None and was.alive and self.mine is not was:
            self.violations.add(f"machine {was.id} is alive and not handed over any more: {after}")

    def _see_gone(self, plan: str) -> None:
        for name, machine in self._alive():
            if machine is self.mine:
                self.violations.add(f"{machine.id} at {name} lives after a hibernate ({plan})")

    def _see_woken(self, plan: str) -> None:
        if self.mine is None:
            self.violations.add(f"a wake completed and no machine is handed over ({plan})")
            return
        now = facts(self._workspace(self.mine))
        if now not in self.stored:
            found = differences(self.stored[-1], now)
            self.violations.add(f"the woken workspace differs ({plan}): {found[:3]}")
        self.truth = now

    def _see_spend(self) -> None:
        """What the records say was spent, and what the markets count.

        A run that was killed right after the end of its machine left the record to a later run,
        and only its market knows when it took a machine back: there the end must lie between the
        last sight and the proof.
        """
        now_unix = self.clock.now_unix
        markets = [self.markets.fakes[name].market for name in NAMES]
        machines = {machine.id: machine for market in markets for machine in market.rented}
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
                    self.violations.add(f"machine {machine.id} was seen after its end")
                continue
            recorded += (proven - rental.created_unix) / HOUR_S * rental.price_usd_h
            counted += (ended - machine.created_unix) / HOUR_S * machine.usd_h
        for machine in machines.values():
            if machine not in self.foreign:
                self.violations.add(f"no rental has a record of machine {machine.id}")
        self.spend = (recorded, counted)
        if abs(recorded - counted) > SPEND_SLACK * counted:
            self.violations.add(
                f"the records say {recorded:.2f} USD, the markets {counted:.2f} USD"
            )

    # -- one flow

    def _flow(self, plan: Plan, work: Callable[[OpenWorkspace], Any]) -> Told:
        fakes = [self.markets.fakes[name] for name in NAMES]
        for name, fault in plan.faults:
            self.markets.fakes[name].faults.arm(fault)
        for name in NAMES:
            self.markets.fakes[name].market.next_hidden_looks = plan.hidden_looks
            self._boot(name, deaf=name == plan.deaf)
        with killing_at_request(fakes, plan.at_request) as aim:
            child = Child(lambda say: self._run(say, plan, work))
            aim(child)
            told = child.told()
        for fake in fakes:
            fake.faults.clear()
            for machine in fake.market.rented:
                machine.hidden_looks = 0
        if told.trace:
            self.violations.add(told.trace)
        return told

    def _run(self, say: Say, plan: Plan, work: Callable[[OpenWorkspace], Any]) -> str:
        """In the flow's own process; returns the snapshot, where there is one."""
        ahead_s, hear, steps = self.clock.ahead_s, StoreClock.hear, 0
        time.time = lambda: real_time() + ahead_s

        def heard(clock: StoreClock, date: str, asked: float, answered: float) -> None:
            """The hours have passed at the store, too."""
            hear(clock, date, asked - ahead_s, answered - ahead_s)

        StoreClock.hear = heard  # type: ignore[method-assign]

        def before(label: str) -> None:
            nonlocal steps
            steps += 1
            if steps == plan.at_step:
                os.kill(os.getpid(), signal.SIGKILL)

        ready_s = {plan.deaf: DEAF_S}
        known = {name: self.provider(name, ready_s.get(name, READY_S)) for name in NAMES}
        opened = self.renting(known, plan.named)
        want = msgspec.structs.replace(opened.spec.want, rank=plan.rank, spot=plan.spot)
        opened = replace(opened, spec=msgspec.structs.replace(opened.spec, want=want))
        with PlainRunner(opened, wait_factor=0.1, before=before):
            report = work(opened)
        ours = isinstance(report, WakeReport | HibernateReport)
        return report.snapshot if ours else "no snapshot"

    def _boot(self, name: str, *, deaf: bool) -> None:
        fake, boot = self.markets.fakes[name], self.markets.machines.boot
        usual = partial(boot, kind=fake.body)
        fake.market.boot = (lambda _: boot(["sleep", "1000000"])) if deaf else usual

    # -- the world

    def _alive(self) -> Iterator[tuple[str, Rented]]:
        return ((name, m) for name, m in self.alive(NAMES) if m not in self.foreign)

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
        name = next(name for name, alive in self._alive() if alive is machine)
        if not self.markets.fakes[name].rents_by_hand or not self.stored:
            return ""
        self.markets.fakes[name].market.end(machine)
        self.mine = None
        return f"{name} took {machine.id} back"

    def _pass(self) -> None:
        self.clock.advance(HOUR_S * self.rng.uniform(5, 40))


def _carry_out(seed: int, wakes: int, given: Given) -> Found:
    began, number = time.monotonic(), 0
    with market_world(Campaign, seed, page=2) as campaign:
        campaign.begin()
        while campaign.wakes < wakes:
            said = campaign.round(number)
            print(f"{campaign.wakes:4} {time.monotonic() - began:6.0f} s  {said[:230]}", flush=True)
            number += 1
        campaign.end()
        outcomes = ", ".join(f"{n} {what}" for what, n in campaign.outcomes.most_common())
        recorded, counted = campaign.spend
        rentals = len(campaign.opened.rentals.history())
        summary = (
            f"{campaign.wakes} wakes ({outcomes}); {rentals} rentals, {campaign.late} found ended "
            f"later; of the others {recorded:.2f} USD by the records, {counted:.2f} USD by the "
            "markets"
        )
        return Found(summary, campaign.violations, dict(campaign.outcomes))


COMMAND: Final = Command(
    "tests.markets.campaign", "wakes", 500, _carry_out, unfit=unfit, known={99024: 60}
)

if __name__ == "__main__":
    logging.getLogger("torpor.plain").setLevel(logging.CRITICAL)
    sys.exit(COMMAND.main())
