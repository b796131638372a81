"""The campaign of jobs: training that is interrupted at random moments over the fake markets.

    python -m tests.jobs.campaign --strikes 200 --seed 1

Each strike kills the run that drives the job, the agent, its SSH connection, sshd, the supervisor
or the machine, stops the machine at its market, or disturbs a market. Exits with 1 on any
violation: the final state must equal that of an uninterrupted run, no machine may be left, and no
save may be lost.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import os
import random
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
from pathlib import Path
from typing import Any, Final
from unittest.mock import patch

import msgspec
import psutil

from flows import create, hibernate, job, reconcile
from flows.procedures.job import attempt, driver, stopped
from tasks.plain_runner import PlainRunner
from tasks.workspace import OpenWorkspace
from tests import independent_reader as reader
from tests.fixtures.machines import new_key_pair
from tests.fixtures.short_agent import SOON_ABANDONED, copy_agent, installing
from tests.fixtures.trees import let_settle
from tests.fixtures.waiting import PATIENCE_S
from tests.fixtures.world import BUCKET, own_store
from tests.jobs import training
from tests.markets.boot import BootedMachine, Machines, unfit
from tests.markets.campaign import AheadClock
from tests.markets.every import DEMO, FAKES, Markets, opened_markets
from tests.markets.faults import Fault, Kind
from tests.markets.market import Rented
from torpor.control.jobs import driven, policy, records
from torpor.control.jobs.records import Job
from torpor.control.providers.seam import Provider
from torpor.control.remote.ssh import Identity
from torpor.control.store.s3 import S3Store
from torpor.control.store.snapshots import snapshot_ids
from torpor.shared.errors import JobFailed, StoreMissing, TorporError
from torpor.shared.format.keys import workspace_key
from torpor.shared.format.names import manifest_key
from torpor.shared.values import MIB, ObjectKey, SnapshotId, Want, WorkspaceSpec

MARKETS: Final = tuple(name for name, fake in FAKES.items() if fake.rents_by_hand)
"""Those that can end a machine by themselves."""
STEPS: Final = 200
STEP_S: Final = 0.1
SAVE_S: Final = 4.0
SETTLING_S: Final = 2.0
_STORE_KEY: Final = secrets.token_bytes(32)
_FAULTS: Final[tuple[Kind, ...]] = ("lost", "too many", "unavailable", "error body", "not json")
_STRIKES: Final = {
    "driver": 6, "agent": 4, "connection": 4, "sshd": 2, "supervisor": 3, "machine": 5, "market": 4,
    "stop": 3,
}  # fmt: skip


_STOPPING: Final = ("gcp", "vast")
"""They stop a machine that they take, and keep its disk."""


@contextlib.contextmanager
def hurried() -> Iterator[None]:
    """The waits of a job in seconds that a campaign can afford."""
    with contextlib.ExitStack() as stack:
        for module, name, value in (
            (records, "LOST_S", 3.0),
            (driven, "STOP_S", 0.2),
            (driven, "DRIVEN_S", 0.5),
            (attempt, "LOOK_S", 0.3),
            (attempt, "WATCH_S", 1.0),
            (attempt, "SAVE_AGAIN_S", 2.0),
            (driver, "AGAIN_S", 0.5),
            (driver, "SURE_S", 1.5),
            (driver, "UNPROVEN_S", 5.0),
            (driver, "TURN_S", 0.5),
            (stopped, "LOOK_S", 0.5),
            (stopped, "RESTART_S", 5.0),
            (stopped, "GONE_S", 2.0),
            (policy, "WAITS_S", (1.0,)),
        ):
            stack.enter_context(patch.object(module, name, value))
        yield


@dataclass
class Campaign:
    """One workspace; one job after the other."""

    markets: Markets
    opened: OpenWorkspace
    connect: Callable[[], S3Store]
    rng: random.Random
    folder: Path
    violations: list[str] = field(default_factory=list)
    struck: Counter[str] = field(default_factory=Counter)
    jobs: int = 0
    saves: int = 0
    lost_s: float = 0.0
    _child: int = 0
    _told: Path | None = None

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
            if not self._child:
                self._start(command)
                wait_until = time.monotonic() + self.rng.uniform(0.5, 4.0)
            report = self._ended()
            if report is not None:
                break
            known.look()
            if self._child and left and time.monotonic() >= wait_until and known.job is not None:
                left -= self._strike()
                wait_until = time.monotonic() + self.rng.uniform(0.3, 3.0)
            time.sleep(0.1)
        else:
            self._kill()
            self._violate(f"job {self.jobs} did not end within {PATIENCE_S:.0f} s: {known.job}")
            return
        self._judge(report, goal)
        self._see_saves(report)

    def end(self) -> None:
        """Nothing is left anywhere, once the markets answer again."""
        for fake in self.markets.fakes.values():
            fake.faults.clear()
        with self._plain(self.opened):
            for _ in range(2):
                time.sleep(SETTLING_S)
                reconcile.fn(self.opened.spec.name, abandoned=True)
        for name in MARKETS:
            for machine in self.markets.fakes[name].market.alive():
                self._violate(f"machine {machine.id} at {name} is alive at the end")
        for rental in self.opened.rentals.open():
            self._violate(f"rental {rental.label.rental} is {rental.state} at the end")

    # -- the run that drives the job

    def _start(self, command: list[str]) -> None:
        """Begin a job, or go on with the one that has not ended."""
        left = self.opened.jobs.open()
        named = {"job": left[0].id} if left else {}
        self._told = self.folder / f"told-{secrets.token_hex(4)}"
        self._child = os.fork()
        if self._child:
            return
        code = 1
        try:
            told: dict[str, Any]
            try:
                mine = replace(self.opened, store=self.connect())  # connections are the parent's
                with (
                    hurried(),
                    patch.object(policy, "MOST_LOSSES", 1000),  # a limit has tests of its own
                    self._plain(mine),
                ):
                    report = job.fn(
                        self.opened.spec.name,
                        command,
                        save_minutes=SAVE_S / 60,
                        spot="allowed",
                        **named,
                    )
                told = {"state": report.job.state, "job": report.job.id}
            except JobFailed as error:
                told = {"state": str(error), "job": self.opened.jobs.ended(1)[0].id}
            except TorporError as error:
                told = {"error": f"{type(error).__name__}: {error}"}
            except Exception:  # noqa: BLE001 - an error that is not ours is a finding
                told = {"traceback": traceback.format_exc()}
            fresh = self._told.with_suffix(".new")
            fresh.write_text(json.dumps(told))
            fresh.rename(self._told)
            code = 0
        finally:
            os._exit(code)

    def _ended(self) -> dict[str, Any] | None:
        """What the run told if the job has ended; forgets a run that ended otherwise."""
        if not self._child or os.waitpid(self._child, os.WNOHANG) == (0, 0):
            return None
        self._child = 0
        if self._told is None or not self._told.exists():
            self._violate("a run that drives a job died by itself")
            return None
        told: dict[str, Any] = json.loads(self._told.read_text())
        if "state" in told:
            return told
        if "traceback" in told:
            self._violate(told["traceback"])
        else:
            if not told["error"].startswith("WorkspaceBusy"):  # the killed run is not yet gone
                print(f"     {told['error'][:300]}", flush=True)
            self._end_by_name(told["error"])
            time.sleep(0.5)
        return None

    def _end_by_name(self, error: str) -> None:
        """Do what the error says if a killed wake left a machine that never answers."""
        for name in MARKETS:
            for machine in self.markets.fakes[name].market.alive():
                if f"machine {machine.id} " in error and "name it in `end` of reconcile" in error:
                    with self._plain(self.opened):
                        reconcile.fn(self.opened.spec.name, end=[str(machine.id)])

    def _kill(self) -> None:
        if self._child:
            os.kill(self._child, signal.SIGKILL)
            os.waitpid(self._child, 0)
            self._child = 0

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
            self._kill()
            return True
        if what == "market":
            fake = self.markets.fakes[self.rng.choice(MARKETS)]
            fake.faults.arm(Fault(self.rng.choice(_FAULTS), "any", self.rng.randrange(1, 4)))
            return True
        machines = [
            (name, one) for name in MARKETS for one in self.markets.fakes[name].market.alive()
        ]
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

    def _judge(self, told: dict[str, Any], goal: int) -> None:
        if told["state"] != "succeeded":
            self._violate(f"job {told['job']} is {told['state']}")
            return
        ended = self.opened.jobs.of(told["job"])
        assert ended is not None and ended.newest is not None
        self.saves += ended.saves
        self.lost_s += sum(one.lost_s for one in ended.attempts)
        state = self.state_in(ended.newest)
        if state != training.uninterrupted(goal):
            self._violate(f"job {ended.id} ended with {state}")
        ends = Counter(one.end for one in ended.attempts)
        print(
            f"job {self.jobs}: {len(ended.attempts)} attempts ({dict(ends)}), {ended.saves} saves, "
            f"{sum(one.lost_s for one in ended.attempts):.1f} s of work lost",
            flush=True,
        )
        for name in MARKETS:
            for one in self.markets.fakes[name].market.alive():
                if isinstance(one.body, BootedMachine) and self._was_handed_over(one):
                    self._violate(f"machine {one.id} at {name} is alive after job {ended.id}")

    def _see_saves(self, told: dict[str, Any]) -> None:
        """Of an ended job's recorded saves only the last snapshot is left."""
        ended = self.opened.jobs.of(told["job"])
        assert ended is not None
        left = set(snapshot_ids(self.opened.store, DEMO)) & set(ended.kept_saves)
        if left - {ended.final}:
            self._violate(f"saves of job {ended.id} are left: {sorted(left)}")

    def _was_handed_over(self, machine: Rented) -> bool:
        open_now = {str(one.machine): one.state for one in self.opened.rentals.open()}
        return open_now.get(str(machine.id)) == "handed over"

    def state_in(self, snapshot: SnapshotId) -> dict[str, Any]:
        """What the training had reached in a snapshot, by a reader that is not torpor's."""
        store, keys = self.opened.store, reader.Keys(_STORE_KEY, DEMO)
        blob = store.get(manifest_key(DEMO, snapshot), max_bytes=64 * MIB)
        manifest = reader.read_manifest(blob, keys, DEMO, snapshot)
        target = Path(tempfile.mkdtemp(dir=self.folder))

        def get(name: str, first: int, count: int | None) -> bytes:
            whole = store.get(ObjectKey(name), max_bytes=256 * MIB)
            return whole[first:] if count is None else whole[first : first + count]

        try:
            reader.restore(manifest, get, keys, [os.fsencode(target)])
            file = target / "state.json"
            return json.loads(file.read_text()) if file.exists() else training.start()
        finally:
            shutil.rmtree(target)

    # -- the world

    def _plain(self, opened: OpenWorkspace) -> PlainRunner:
        known = {name: self._provider(name) for name in MARKETS}
        return PlainRunner(
            replace(opened, providers=tuple(known.values()), others=lambda: tuple(known.values())),
            wait_factor=0.1,
        )

    def _provider(self, name: str) -> Provider:
        provider = self.markets.provider(name, timeout_s=2.0)
        provider.__dict__["abilities"] = msgspec.structs.replace(
            provider.abilities, settling_s=SETTLING_S, ready_s=30.0
        )
        return provider

    def _body(self) -> BootedMachine:
        (body,) = [one.body for name in MARKETS for one in self.markets.fakes[name].market.alive()]
        assert isinstance(body, BootedMachine)
        return body

    def _violate(self, what: str) -> None:
        self.violations.append(what)
        print(f"     VIOLATION: {what}", flush=True)


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
                self._campaign._violate(f"save {self.job.newest}, the newest, was deleted")
            return  # a newer one is there since
        self._newest = self.job.newest
        if reached < self._reached:
            self._campaign._violate(
                f"save {self._newest} holds step {reached}, an earlier one {self._reached}"
            )
        self._reached = reached


def _kill_on(machine: Rented, what: str) -> bool:
    """Kill the agent, its connection, all of sshd but its listener, or the supervisor there."""
    if not isinstance(machine.body, BootedMachine) or not machine.body.running:
        return False
    marks: dict[str, Callable[[list[str]], bool]] = {
        "agent": lambda words: "daemon" in words,
        "supervisor": lambda words: "supervise" in words,
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


@contextlib.contextmanager
def open_campaign(seed: int) -> Iterator[Campaign]:
    folder = Path(tempfile.mkdtemp(prefix="torpor-market-"))
    keys = new_key_pair()
    clock = AheadClock()  # of this host
    with own_store(folder / "store") as store:
        (folder / "machines").mkdir()
        machines = Machines(folder / "machines")
        agent = copy_agent(folder / "agent", SOON_ABANDONED)
        with opened_markets(machines) as markets, installing(agent):
            for fake in markets.fakes.values():
                fake.market.clock = clock

            def connect() -> S3Store:
                return S3Store.connect(store.server.settings(BUCKET, "kept"))

            opened = OpenWorkspace(
                spec=WorkspaceSpec(
                    DEMO, ["~/workspace"], want=Want(gpu="H100", disk_gib=20), parts=2
                ),
                store=connect(),
                providers=(),
                identity=Identity(keys.private),
                owner="tests",
                key=workspace_key(_STORE_KEY, DEMO),
            )
            campaign = Campaign(markets, opened, connect, random.Random(seed), folder)
            try:
                yield campaign
            finally:
                campaign._kill()
                machines.end()
    shutil.rmtree(folder, ignore_errors=True)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.jobs.campaign")
    parser.add_argument("--strikes", type=int, default=200)
    parser.add_argument("--each", type=int, default=20, help="strikes at one job")
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(1 << 32))
    given = parser.parse_args(argv)
    if why := unfit():
        print(why, file=sys.stderr)
        return 2
    print(f"campaign of jobs: {given.strikes} strikes, seed {given.seed}", flush=True)
    began = time.monotonic()
    with open_campaign(given.seed) as campaign:
        campaign.begin()
        while campaign.struck.total() < given.strikes and not campaign.violations:
            campaign.job(min(given.each, given.strikes - campaign.struck.total()))
        campaign.end()
        strikes = ", ".join(f"{count} {what}" for what, count in campaign.struck.most_common())
        print(
            f"{campaign.jobs} jobs, {campaign.struck.total()} strikes ({strikes}) in "
            f"{time.monotonic() - began:.0f} s: {campaign.saves} saves, {campaign.lost_s:.0f} s of "
            f"work lost and done again; {len(campaign.violations)} violations"
        )
        return 1 if campaign.violations else 0


if __name__ == "__main__":
    logging.getLogger("torpor.plain").setLevel(logging.CRITICAL)
    sys.exit(main())
