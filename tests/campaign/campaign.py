"""Many runs of hibernate and wake, each with one kill, each judged."""

from __future__ import annotations

import os
import random
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from tests.campaign.command import Violations
from tests.campaign.controls import Control, Controls
from tests.campaign.judge import MAPPED, Judge
from tests.campaign.strike import Strike, carry_out, choose
from tests.fixtures.kill_points import Told
from tests.fixtures.mapper import Mapper
from tests.fixtures.trees import fill, mutate
from tests.fixtures.waiting import PATIENCE_S
from tests.fixtures.world import OwnStore, World, make_world, own_store
from torpor.control.providers.local.folder import MARK
from torpor.shared.values import Machine

_TRIES: Final = 3
_MISSES: Final = 20


@dataclass
class Run:
    """One run and what came of it."""

    number: int
    flow: str
    engine: str  # plain or prefect
    victim: str = ""
    when: str = ""
    phase: str = ""
    outcome: str = ""
    next_run: str = ""
    seconds: float = 0.0
    violations: Violations = field(default_factory=Violations)


class Campaign:
    """One world, its control sides and its judge. Even runs hibernate, odd ones wake."""

    def __init__(
        self, world: World, store: OwnStore, controls: Controls, seed: int, by_prefect: bool
    ) -> None:
        self._world = world
        self._store = store
        self._controls = controls
        self._seed = seed
        self._by_prefect = by_prefect
        self._kept = False
        self._judge = Judge(world)
        self._usual_s: dict[str, float] = {}

    def begin(self) -> None:
        """Make the workspace, and measure undisturbed runs."""
        machine = self._world.rent()
        fill(self._world.workspace(machine.id), random.Random(self._seed))
        (self._world.workspace(machine.id) / MAPPED).write_bytes(bytes(3_000_000))
        for flow in ("hibernate", "wake"):
            self._prepare(flow, random.Random(f"{self._seed}:usual"))
            began = time.monotonic()
            self._must(flow)
            self._usual_s[flow] = time.monotonic() - began
        assert not self._judge.snapshots()
        assert not self._judge.awake()

    def run(self, number: int) -> Run:
        """Run ``number``: the same seed and number make the same choices again."""
        rng = random.Random(f"{self._seed}:{number}")
        flow = "wake" if number % 2 else "hibernate"
        began = time.monotonic()
        run = Run(number, flow, "prefect" if self._by_prefect else "plain")
        before = self._prepare(flow, rng)
        for _ in range(_MISSES):
            strike = choose(rng, flow, self._usual_s[flow])
            if self._struck(run, strike, rng, before):
                break
            if run.violations:
                break
            before = self._prepare(flow, rng)
        else:
            run.violations.add("no strike ever fell: the campaign itself is broken")
        self._judge_run(run, before)
        run.seconds = time.monotonic() - began
        print(
            f"{run.number:4} {run.engine:7} {run.flow:9} {run.victim:12} in {run.phase:8} "
            f"({run.when}): {run.outcome.partition(chr(10))[0][:100]}; next: {run.next_run}; "
            f"{run.seconds:.1f} s",
            flush=True,
        )
        return run

    def end(self) -> list[str]:
        """Every snapshot that was ever listed still restores."""
        return self._judge.snapshots(again=True)

    def _prepare(self, flow: str, rng: random.Random) -> Machine | None:
        """Bring the world into the state that ``flow`` begins in; the machine, where there is
        one."""
        machines = self._world.machines()
        if flow == "hibernate":
            if not machines:
                self._must("wake")
                machines = self._world.machines()
            mutate(self._world.workspace(machines[0].id), rng)
            self._judge.see(machines[0])
            return machines[0]
        if machines:
            self._must("hibernate")
        return None

    def _must(self, flow: str) -> None:
        outcome = str(self._undisturbed(flow))
        assert outcome == "completed", f"{flow}, undisturbed, was not killed: {outcome}"

    def _struck(
        self, run: Run, strike: Strike, rng: random.Random, machine: Machine | None
    ) -> bool:
        """Whether the strike fell before the flow had ended."""
        self._world.proxy.clear()
        options: dict[str, Any] = {}
        if run.flow == "hibernate" and rng.random() < 0.2:
            options["destroy"] = False
        self._kept = "destroy" in options
        program = None
        if strike.victim == "mmap" and machine is not None:
            file = self._world.workspace(machine.id) / MAPPED
            program = Mapper(file, {**os.environ, MARK: machine.id})
            program.begin()

        def end_program() -> None:
            if program is not None:
                self._judge.last_store = program.end()

        skewed = strike.victim == "skewed clock"
        control = self._controls.start(run.flow, options, self._by_prefect, skewed=skewed)
        phase = carry_out(
            strike, control, self._world, self._store, end_program if program else None
        )
        if not _within(PATIENCE_S, control):
            run.violations.add(f"{run.flow} did not end within {PATIENCE_S:.0f} s")
            control.kill()
        self._world.proxy.clear()
        outcome = control.told()
        if phase is None:
            if str(outcome) != "completed":
                run.violations.add(f"an undisturbed {run.flow} came to {outcome}")
            return False
        run.victim, run.when, run.phase = strike.victim, strike.when, phase
        run.outcome = str(outcome)
        if outcome.trace:
            run.violations.add(f"an error outside the tree: {outcome.trace}")
        return True

    def _judge_run(self, run: Run, before: Machine | None) -> None:
        found = [*self._judge.snapshots()]
        if before is not None:
            found += self._judge.destruction(before, allowed=not self._kept)
        elif run.outcome not in ("killed", "completed") and self._world.machines():
            found.append(f"a failed wake left {self._world.machines()}")
        run.next_run = self._next(run)
        found += self._judge.snapshots()
        if run.flow == "hibernate":
            if self._world.machines():
                found.append(f"the next hibernate left {self._world.machines()}")
            found += self._judge.asleep(self._judge.states[-1])
        else:
            found += self._judge.awake()
        for violation in [*found, *self._judge.leaks()]:
            run.violations.add(violation)

    def _next(self, run: Run) -> str:
        """The next, undisturbed run completes; or its error says that there is nothing to do."""
        if run.outcome == "completed" and not self._kept:
            return "not needed"
        said = []
        for _ in range(_TRIES):
            outcome = self._undisturbed(run.flow)
            said.append(str(outcome))
            if said[-1] == "completed":
                return "completed" if len(said) == 1 else f"try {len(said)}"
            if _is_done(run.flow, outcome):
                return "had been done"
            if outcome.error != "WorkspaceBusy":  # it says: wait and try again
                break
        run.violations.add(f"the next {run.flow} did not complete: {'; '.join(said)}")
        return "failed"

    def _undisturbed(self, flow: str) -> Told:
        control = self._controls.start(flow, {}, self._by_prefect)
        if not _within(PATIENCE_S, control):
            control.kill()
        return control.told()


@contextmanager
def open_campaign(seed: int, *, sealed: bool, by_prefect: bool) -> Iterator[Campaign]:
    """A store, a world and the control sides of a campaign; nothing of them is left behind."""
    with (
        tempfile.TemporaryDirectory(prefix="campaign-") as folder,
        own_store(Path(folder) / "store") as store,
        make_world(store.server, sealed=sealed, parts=6) as world,
    ):
        store.proxies += [world.proxy, world.quiet]
        controls = Controls(Path(folder), world)
        with controls.prefect(Path(folder) / "prefect") if by_prefect else nullcontext():
            campaign = Campaign(world, store, controls, seed, by_prefect)
            campaign.begin()
            yield campaign


def _is_done(flow: str, outcome: Told) -> bool:
    """Whether an error says that there is nothing to do."""
    done = {"hibernate": "is on no machine", "wake": "is already on machine"}
    said_so = outcome.error in ("InvalidInput", "WorkspaceAwake")
    return said_so and done[flow] in outcome.message


def _within(seconds: float, control: Control) -> bool:
    end = time.monotonic() + seconds
    while not control.ended():
        if time.monotonic() > end:
            return False
        time.sleep(0.01)
    return True
