"""The order of a benchmark of deploys: which strategy brings up a server soonest, and where."""

from __future__ import annotations

import time
from dataclasses import replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Final, NamedTuple

from blocks import PROVIDERS, Workspace
from blocks.reference import load
from flows.deploy import deploy_stack
from flows.procedures.deploy.deployment import DeployTrial
from flows.procedures.scratch_machine import held_and_cleared
from tasks.deploy import forget_base, open_stack
from tasks.phases import measured_phases, phase, seconds_by_phase
from tasks.runner import runner
from tasks.workspace import OpenWorkspace, StoredWorkspace
from tasks.workspace_blocks import open_workspace, probe_store
from torpor.control.deploy import stack as of_deploys
from torpor.control.deploy.report import DeployReport
from torpor.control.deploy.stack import StrategyName, strategy_named
from torpor.control.measure.deploys import (
    COLD,
    FROM_RENTAL,
    FROM_SSH,
    advise_deploys,
    deploys_page,
)
from torpor.control.measure.figures import Figure
from torpor.control.measure.host import host_facts
from torpor.control.measure.results import default_folder, write_results
from torpor.control.measure.rounds import Rounds
from torpor.control.measure.scratch import scratch_name
from torpor.control.providers.provider import Provider
from torpor.control.reports import BenchmarkReport
from torpor.shared.errors import InvalidInput, TorporError

_MOST_FAILED: Final = 2
"""After this many failed starts in a row, a way (stack, strategy, provider) is not measured any
more."""


def measure_deploys(
    workspace: Workspace | str,
    stacks: list[str],
    strategies: list[StrategyName],
    providers: list[str],
    snapshot: str,
    rounds: int,
    minutes: float,
    folder: str,
) -> BenchmarkReport:
    """Measure the deploys of these stacks by each strategy at each provider, or at those of the
    workspace. Each start rents a machine, deploys, and destroys the machine."""
    began, started = time.monotonic(), datetime.now(timezone.utc)
    opened = open_workspace(workspace)
    probe_store(opened)
    named: list[Provider] = [load(name, PROVIDERS, of="the benchmark").open() for name in providers]
    starts = Starts(opened, snapshot)
    starts.plan(stacks, strategies, named or [*opened.providers])
    name = opened.spec.name
    limit = Rounds(rounds, began + 60 * minutes)
    with held_and_cleared(opened.under(scratch_name(name)), name, runner().run):
        for _ in limit:
            for way in starts.ways:
                with phase(f"{way.stack.name}, {way.strategy}, {way.provider.identity}"):
                    starts.measure(way)
    if limit.done < rounds:
        starts.note(f"the time limit was reached after {limit.done} of {rounds} rounds")
    figures = starts.figures()
    said = advise_deploys(figures)
    facts = host_facts() | {"workspace": name, "snapshot": snapshot, "rounds": limit.done}
    kept = Path(folder).expanduser() if folder else default_folder()
    into = kept / f"{started:%Y%m%dT%H%M%SZ}-deploy-{name}"
    write_results(into, figures, said, {"host": facts, "notes": starts.notes})
    runner().page(
        key=f"benchmark-deploy-{name}",
        markdown=deploys_page(figures, said, facts, starts.notes),
        description=f"Deploys of workspace {name}. Table and JSON: {into}",
    )
    return BenchmarkReport(
        workspace=name,
        folder=str(into),
        figures=len(figures),
        advice={one.about: f"{one.choice}: {one.because}" for one in said},
        notes=starts.notes,
        seconds=seconds_by_phase(),
    )


class Way(NamedTuple):
    """One stack by one strategy at one provider."""

    stack: of_deploys.Stack
    strategy: StrategyName
    provider: Provider

    @property
    def names(self) -> tuple[str, str, str]:
        return self.stack.name, self.strategy, self.provider.identity


class Starts:
    """The starts of each way, and their times. ``notes`` say what was not measured, and why."""

    def __init__(self, opened: OpenWorkspace, snapshot: str) -> None:
        self.ways: list[Way] = []
        self.notes: list[str] = []
        self._opened = opened
        self._snapshot = snapshot
        self._reports: dict[tuple[str, str, str], list[DeployReport]] = {}  # stack, kind, provider
        self._failed: dict[tuple[str, str, str], int] = {}
        self._count = 0

    def plan(
        self, stacks: list[str], strategies: list[StrategyName], providers: list[Provider]
    ) -> None:
        """InvalidInput where none of the strategies fits any of the stacks."""
        faults = []
        for stack in (open_stack(name) for name in dict.fromkeys(stacks)):
            for strategy in dict.fromkeys(strategies):
                try:
                    how = strategy_named(strategy)
                    stack.check(how)
                    stack.image_for(how)
                except InvalidInput as error:
                    faults.append(str(error))
                    self.note(f"not measured: {error}")
                    continue
                self.ways += [Way(stack, strategy, provider) for provider in providers]
        if not self.ways:
            raise InvalidInput("; ".join(faults) or "name at least one stack and one strategy")

    def measure(self, way: Way) -> None:
        """Start the way once; with the strategy `stored` twice: the second start uses what the
        first has stored."""
        if self._failed.get(way.names, 0) >= _MOST_FAILED:
            return
        self._count += 1
        trial = DeployTrial(f"{runner().run}-{self._count}")
        opened = replace(self._opened, providers=(way.provider,))
        kinds = (f"{way.strategy}, {COLD}", f"{way.strategy}, warm")
        keeps = strategy_named(way.strategy).keeps
        try:
            for kind in kinds if keeps else (way.strategy,):
                with measured_phases():
                    report = deploy_stack(
                        opened, way.stack, way.strategy, self._snapshot, trial=trial
                    )
                if kind == kinds[1] and not report.environment.startswith("restored"):
                    self.note(f"no warm start of {way.stack.name}: {report.environment}")
                    return
                place = (way.stack.name, kind, way.provider.identity)
                self._reports.setdefault(place, []).append(report)
            self._failed[way.names] = 0
        except TorporError as error:
            self._failed[way.names] = self._failed.get(way.names, 0) + 1
            where = f"{way.stack.name} by {way.strategy} at {way.provider.identity}"
            self.note(f"a start of {where} failed: {error}")
        finally:
            for base in trial.bases.values():
                self._forget(base)

    def _forget(self, base: StoredWorkspace) -> None:
        try:
            forget_base(base)
        except TorporError as error:  # what was measured before the error still counts
            self.note(
                f"the measured environment {base.spec.name} may still be in the store: {error}. "
                "The next benchmark of this workspace deletes it"
            )

    def figures(self) -> list[Figure]:
        """InvalidInput where no start went well."""
        found: list[Figure] = []
        for (stack, kind, place), reports in self._reports.items():
            named = [one.seconds | one.within for one in reports]
            rental = tuple(one.from_rental_s or 0.0 for one in reports)
            figures = {FROM_RENTAL: rental, FROM_SSH: tuple(one.from_ssh_s for one in reports)}
            for name in dict.fromkeys(name for one in named for name in one):
                figures[name] = tuple(one.get(name, 0.0) for one in named)
            found += [
                Figure("deploy", stack, "s", values, phase=phase, data=kind, measured_from=place)
                for phase, values in figures.items()
            ]  # fmt: skip
            cost = tuple(
                one.price_usd_h * seconds / 3600
                for one, seconds in zip(reports, rental, strict=True)
            )
            found.append(
                Figure("deploy", stack, "$", cost, phase=FROM_RENTAL, data=kind,
                       measured_from=place)
            )  # fmt: skip
        if not found:
            raise InvalidInput("no start went well: " + "; ".join(self.notes)[:2000])
        return found

    def note(self, text: str) -> None:
        runner().log.warning(text)
        self.notes.append(text)
