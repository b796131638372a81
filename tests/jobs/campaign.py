"""The campaign of jobs: training that is interrupted at random moments over the fake markets.

    python -m tests.jobs.campaign --strikes 200 --seed 1

Each strike kills the run that drives the job, the agent, its SSH connection, sshd, the supervisor,
the autosave process, the machine's own save or the machine, stops the machine at its market, or
disturbs a market. The final state must equal that of an uninterrupted run, no machine may be left,
and no save may be lost.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final
from unittest.mock import patch

import psutil

from flows import create, hibernate, job, reconcile
from tasks.plain_runner import PlainRunner
from tasks.workspace import OpenWorkspace
from tests.campaign.command import Command, Found, Given
from tests.fixtures.driver import hurried
from tests.fixtures.kill_points import Child, Say, Told
from tests.fixtures.trees import let_settle
from tests.fixtures.waiting import PATIENCE_S
from tests.jobs import training
from tests.jobs.saved_state import state_in
from tests.markets.boot import BootedMachine, unfit
from tests.markets.every import DEMO, FAKES
from tests.markets.faults import Fault, Kind
from tests.markets.market import Rented
from tests.markets.world import SETTLING_S, MarketWorld, market_world
from torpor.control.jobs import policy
from torpor.control.jobs.records import Job
from torpor.control.rental import sweep
from torpor.control.store.manifests import snapshot_ids
from torpor.shared.errors import JobFailed, StoreMissing
from torpor.shared.values import MIB, SnapshotId

MARKETS: Final = tuple(name for name, fake in FAKES.items() if fake.rents_by_hand)
"""Those that can end a machine by themselves."""
STEPS: Final = 200
STEP_S: Final = 0.1
SAVE_S: Final = 4.0
_FAULTS: Final[tuple[Kind, ...]] = ("lost", "too many", "unavailable", "error body", "not json")
_STRIKES: Final = {
    "driver": 6, "agent": 4, "connection": 4, "sshd": 2, "supervisor": 3, "machine": 5, "market": 4,
    "stop": 3, "autosave": 3, "save": 2,
}  # fmt: skip


_STOPPING: Final = ("gcp", "vast")
"""They stop a machine that they take, and keep its disk."""


@dataclass
class Campaign(MarketWorld):
    """One job after the other."""

    struck: Counter[str] = field(default_factory=Counter)
    jobs: int = 0
    saves: int = 0
    lost_s: float = 0.0
    _child: Child | None = None

    # -- the story

    def begin(self) -> None:
        """Store a workspace with the training program."""
        with self._plain(self.opened):
            create.fn(self.opened.spec.name)
            place = self._body().root / "root/workspace"
            place.mkdir(parents=True, exist_ok=True)
            (place / "training.py").write_text(Path(training.__file__).read_text())
            (place / "weights.bin").write_bytes(os.urandom(2 * MIB))
            let_settle()
            hibernate.fn(self.opened.spec.name)

    def job(self, strikes: int) -> None:
        """One job from its beginning to its end, struck up to ``strikes`` times."""
        self.jobs += 1
        goal = self.jobs * STEPS
        command = ["python3", "training.py", str(goal), str(STEP_S)]
        known, until = Watcher(self), time.monotonic() + PATIENCE_S
        left, wait_until = strikes, 0.0
        while time.monotonic() < until:
            if self._child is None:
                self._start(command)
                wait_until = time.monotonic() + self.rng.uniform(0.5, 4.0)
            ended = self._ended_job()
            if ended is not None:
                break
            known.look()
            if self._child and left and time.monotonic() >= wait_until and known.job is not None:
                left -= self._strike()
                wait_until = time.monotonic() + self.rng.uniform(0.3, 3.0)
            time.sleep(0.1)
        else:
            self.kill()
            self.violations.add(f"job {self.jobs} did not end in {PATIENCE_S:.0f} s: {known.job}")
            return
        self._judge(ended, goal)

    def end(self) -> None:
        """Nothing is left anywhere, once the markets answer again, and once a request of a run that
        was killed before it sent one is old."""
        for fake in self.markets.fakes.values():
            fake.faults.clear()
        with self._plain(self.opened), patch.object(sweep, "ASKED_S", 0.0):
            for _ in range(2):
                time.sleep(SETTLING_S)
                reconcile.fn(self.opened.spec.name, abandoned=True)
        self.see_nothing_left(self.alive(MARKETS))

    # -- the run that drives the job

    def _start(self, command: list[str]) -> None:
        """Begin a job, or go on with the one that has not ended."""
        left = self.opened.jobs.open()
        named = {"job": left[0].id} if left else {}

        def work(say: Say) -> str:
            mine = replace(self.opened, store=self.connect())  # connections are the parent's
            many = patch.object(policy, "MOST_LOSSES", 1000)  # a limit has tests of its own
            options: dict[str, Any] = {"save_minutes": SAVE_S / 60, "spot": "allowed", **named}
            with hurried(), many, self._plain(mine):
                try:
                    begins = [] if named else command  # a job that is there keeps its command
                    return job.fn(self.opened.spec.name, begins, **options).job.id
                except JobFailed:
                    return self.opened.jobs.ended(1)[0].id

        self._child = Child(work)

    def _ended_job(self) -> Job | None:
        """The job if it has ended; forgets a run that ended otherwise."""
        if self._child is None or not self._child.ended():
            return None
        told, self._child = self._child.told(), None
        if told.result:
            ended = self.opened.jobs.of(told.result)
            assert ended is not None
            return ended
        if told.killed or told.trace:
            self.violations.add(told.trace or "a run that drives a job died by itself")
            return None
        if told.error != "WorkspaceBusy":  # the killed run is not yet gone
            print(f"     {str(told)[:300]}", flush=True)
        self._end_by_name(told)
        time.sleep(0.5)
        return None

    def _end_by_name(self, told: Told) -> None:
        """Do what the error says if a killed wake left a machine that never answers."""
        for _, machine in self.alive(MARKETS):
            named = f"machine {machine.id} " in told.message
            if named and "name it in `end` of reconcile" in told.message:
                with self._plain(self.opened):
                    reconcile.fn(self.opened.spec.name, end=[str(machine.id)])

    def kill(self) -> None:
        """Kill the run that drives the job."""
        if self._child is not None:
            self._child.kill()
            self._child.told()
            self._child = None

    # -- strikes

    def _strike(self) -> int:
        """One strike; 0 if there was nothing to hit."""
        what = self.rng.choices([*_STRIKES], [*_STRIKES.values()])[0]
        if not self._hit(what):
            return 0
        self.struck[what] += 1
        return 1

    def _hit(self, what: str) -> bool:
        if what == "driver":
            self.kill()
            return True
        if what == "market":
            fake = self.markets.fakes[self.rng.choice(MARKETS)]
            fake.faults.arm(Fault(self.rng.choice(_FAULTS), "any", self.rng.randrange(1, 4)))
            return True
        machines = [*self.alive(MARKETS)]
        if not machines:
            return False
        name, machine = self.rng.choice(machines)
        if what == "stop":
            if name not in _STOPPING or machine.stopped or not self._was_handed_over(machine):
                return False
            self.markets.fakes[name].market.take(machine)
            return True
        if what == "machine":
            self.markets.fakes[name].market.end(machine)
            return True
        return _kill_on(machine, what)

    # -- what must hold

    def _judge(self, ended: Job, goal: int) -> None:
        if ended.state != "succeeded":
            self.violations.add(f"job {ended.id} is {ended.state}")
            return
        assert ended.newest is not None
        self.saves += ended.saves
        lost_s = sum(attempt.lost_s for attempt in ended.attempts)
        self.lost_s += lost_s
        state = self.state_in(ended.newest)
        if state != training.uninterrupted(goal):
            self.violations.add(f"job {ended.id} ended with {state}")
        ends = Counter(attempt.end for attempt in ended.attempts)
        print(
            f"job {self.jobs}: {len(ended.attempts)} attempts ({dict(ends)}), {ended.saves} saves, "
            f"{lost_s:.1f} s of work lost",
            flush=True,
        )
        for name, machine in self.alive(MARKETS):
            if isinstance(machine.body, BootedMachine) and self._was_handed_over(machine):
                self.violations.add(f"machine {machine.id} at {name} is alive after job {ended.id}")
        left = set(snapshot_ids(self.opened.store, DEMO)) & set(ended.kept_saves)
        if ended.final is not None and len(left | {ended.final}) > ended.keep_saves:
            self.violations.add(f"saves of job {ended.id} are left: {sorted(left)}")

    def _was_handed_over(self, machine: Rented) -> bool:
        open_now = {str(rental.machine): rental.state for rental in self.opened.rentals.open()}
        return open_now.get(str(machine.id)) == "handed over"

    def state_in(self, snapshot: SnapshotId) -> dict[str, Any]:
        """What the training had reached in a snapshot."""
        return state_in(self.opened.store, self.store_key, DEMO, snapshot)

    # -- the world

    def _plain(self, opened: OpenWorkspace) -> PlainRunner:
        renting = self.renting({name: self.provider(name) for name in MARKETS}, MARKETS)
        return PlainRunner(replace(renting, store=opened.store), wait_factor=0.1)

    def _body(self) -> BootedMachine:
        ((_, machine),) = self.alive(MARKETS)
        assert isinstance(machine.body, BootedMachine)
        return machine.body


class Watcher:
    """Sees each save in the record: none may go back, and each must be whole."""

    def __init__(self, campaign: Campaign) -> None:
        self._campaign = campaign
        self._newest: SnapshotId | None = None
        self._reached = 0
        self.job: Job | None = None

    def look(self) -> None:
        found = self._campaign.opened.jobs.open()
        self.job = found[0] if found else None
        if self.job is None or self.job.newest is None or self.job.newest == self._newest:
            return
        try:
            reached = self._campaign.state_in(self.job.newest)["n"]
        except StoreMissing:
            now = self._campaign.opened.jobs.of(self.job.id)
            if now is None or now.newest == self.job.newest:
                self._campaign.violations.add(f"save {self.job.newest}, the newest, was deleted")
            return  # a newer one is there since
        self._newest = self.job.newest
        if reached < self._reached:
            self._campaign.violations.add(
                f"save {self._newest} holds step {reached}, an earlier one {self._reached}"
            )
        self._reached = reached


def _kill_on(machine: Rented, what: str) -> bool:
    """Kill the agent, its connection, all of sshd but its listener, the supervisor, the autosave
    process or its save there."""
    if not isinstance(machine.body, BootedMachine) or not machine.body.running:
        return False
    marks: dict[str, Callable[[list[str]], bool]] = {
        "agent": lambda words: "daemon" in words,
        "supervisor": lambda words: "supervise" in words,
        "autosave": lambda words: "autosave" in words,
        "save": lambda words: "rescue" in words,
        "connection": lambda words: any(word.startswith("attach") for word in words),
        "sshd": lambda words: bool(words) and words[0].startswith("sshd:"),
    }
    hit = False
    with contextlib.suppress(psutil.Error, OSError, ValueError, IndexError):
        first = psutil.Process(machine.body.first())
        for process in first.children(recursive=True):
            with contextlib.suppress(psutil.Error):
                words = process.cmdline()
                listener = "[listener]" in " ".join(words)
                if marks[what](words) and not listener:
                    process.kill()
                    hit = True
    return hit


def _carry_out(seed: int, strikes: int, given: Given) -> Found:
    with market_world(Campaign, seed) as campaign:
        try:
            campaign.begin()
            while campaign.struck.total() < strikes and not campaign.violations:
                campaign.job(min(given.each, strikes - campaign.struck.total()))
            campaign.end()
        finally:
            campaign.kill()
        struck = ", ".join(f"{count} {what}" for what, count in campaign.struck.most_common())
        summary = (
            f"{campaign.jobs} jobs, {campaign.struck.total()} strikes ({struck}): {campaign.saves} "
            f"saves, {campaign.lost_s:.0f} s of work lost and done again"
        )
        return Found(summary, campaign.violations, dict(campaign.struck))


def _options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--each", type=int, default=20, help="strikes at one job")


COMMAND: Final = Command("tests.jobs.campaign", "strikes", 200, _carry_out, _options, unfit)

if __name__ == "__main__":
    logging.getLogger("torpor.plain").setLevel(logging.CRITICAL)
    sys.exit(COMMAND.main())
