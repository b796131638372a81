"""The command line of every campaign: how much of it, a seed, and a file for its report."""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

Given = argparse.Namespace


class Violations(list[str]):
    """What must never be, as it was found."""

    def add(self, what: str) -> None:
        self.append(what)
        print(f"     VIOLATION: {what}", flush=True)


@dataclass
class Found:
    """What came of the runs of one seed. ``summary``: what was done. ``repeat``: the options that
    repeat what went wrong, where not all of it must be repeated."""

    summary: str
    violations: list[str]
    report: Any = None
    repeat: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Command:
    """``python -m MODULE --COUNT 500 [--seed 1] [--report FILE]``. Exits with 1 on any violation,
    and with 2 where the host is ``unfit`` for it, which says why."""

    module: str
    count: str
    usual: int
    carry_out: Callable[[int, int, Given], Found]
    """For a seed and how much of it."""
    options: Callable[[argparse.ArgumentParser], None] = lambda parser: None
    unfit: Callable[[], str] = lambda: ""
    known: Mapping[int, int] = field(default_factory=dict)
    """Seeds that have found a fault, and after how much at the latest: repeated first where no seed
    is given and there is enough to do."""

    def main(self, argv: list[str] | None = None) -> int:
        given = self._parser().parse_args(argv)
        if why := self.unfit():
            print(why, file=sys.stderr)
            return 2
        began, all_found, reports = time.monotonic(), 0, []
        planned = self.plan(given.count, given.seed)
        for seed, count in planned:
            print(f"{self.module}: {count} {self.count}, seed {seed}", flush=True)
            begun = time.monotonic()
            found = self.carry_out(seed, count, given)
            seconds, wrong = time.monotonic() - begun, found.violations
            print(f"{found.summary} in {seconds:.0f} s; {len(wrong)} violations")
            for violation in wrong:  # another process may have said it where it was found
                print(f"     VIOLATION: {violation}")
            if wrong:
                for options in found.repeat or [f"--{self.count} {count}"]:
                    print(f"to repeat: python -m {self.module} --seed {seed} {options}")
            reports.append({"seed": seed, "seconds": seconds, "violations": wrong})
            reports[-1]["report"] = found.report
            all_found += len(wrong)
        if len(planned) > 1:
            seconds = time.monotonic() - began
            print(f"in all {given.count} {self.count} in {seconds:.0f} s; {all_found} violations")
        if given.report:
            given.report.write_text(json.dumps(reports, indent=1) + "\n")
        return 1 if all_found else 0

    def plan(self, count: int, seed: int | None) -> list[tuple[int, int]]:
        """The seeds of a campaign, and how much of each."""
        if seed is not None:
            return [(seed, count)]
        known = list(self.known.items()) if count > sum(self.known.values()) else []
        fresh = random.SystemRandom().randrange(1 << 32)
        return [*known, (fresh, count - sum(much for _, much in known))]

    def _parser(self) -> argparse.ArgumentParser:
        parser = argparse.ArgumentParser(prog=f"python -m {self.module}")
        parser.add_argument(f"--{self.count}", dest="count", type=int, default=self.usual)
        parser.add_argument("--seed", type=int, help="this one alone; a random one if not given")
        parser.add_argument("--report", type=Path, help="a file for what happened, as JSON")
        self.options(parser)
        return parser
