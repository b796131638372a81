"""``python -m tests.campaign --runs 200 --seed 1``: the kill campaign. Exit 1 on any violation."""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

from tests.campaign.campaign import Run, open_campaign


def main(argv: list[str] | None = None) -> int:
    given = _parser().parse_args(argv)
    seed = given.seed if given.seed is not None else random.SystemRandom().randrange(1 << 32)
    print(f"kill campaign: {given.runs} runs, seed {seed}", flush=True)
    began = time.monotonic()
    shares = share_out(given.first, given.runs, given.jobs, given.flows)
    with ThreadPoolExecutor(len(shares)) as pool:
        done = list(pool.map(lambda share: _carry_out(share, seed, given), shares))
    runs = sorted((run for found, _ in done for run in found), key=lambda run: run.number)
    late = [violation for _, found in done for violation in found]
    _tell_all(runs, late, time.monotonic() - began)
    bad = [run for run in runs if run.violations]
    if given.report:
        given.report.write_text(json.dumps(_report(seed, runs, late), indent=1) + "\n")
    for run in bad:
        flows = "all" if run.engine == "prefect" else "none"
        sealed = " --sealed" if given.sealed else ""
        print(
            f"to repeat: python -m tests.campaign --seed {seed} --first {run.number} --runs 1 "
            f"--jobs 1 --flows {flows}{sealed}"
        )
    return 1 if bad or late else 0


class Share(NamedTuple):
    """Runs that one world carries out, one after the other."""

    numbers: range
    by_prefect: bool


def share_out(first: int, runs: int, jobs: int, flows: str) -> list[Share]:
    """At most ``jobs`` shares; with ``some``, one of them, a quarter of the runs, is Prefect's."""
    shares = []
    end = first + runs
    if flows == "some":
        quarter = max(1, runs // 4)
        shares.append(Share(range(first, first + quarter), True))
        first, jobs = first + quarter, jobs - 1
    size = -(-(end - first) // max(1, jobs))
    shares += [
        Share(range(at, min(end, at + size)), flows == "all")
        for at in range(first, end, max(1, size))
    ]
    return shares


def _carry_out(share: Share, seed: int, given: argparse.Namespace) -> tuple[list[Run], list[str]]:
    runs: list[Run] = []
    with open_campaign(seed, sealed=given.sealed, by_prefect=share.by_prefect) as campaign:
        for number in share.numbers:
            runs.append(campaign.run(number))
            _tell(runs[-1])
            if runs[-1].violations and not given.go_on:
                break
        return runs, campaign.end()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tests.campaign", description=__doc__)
    parser.add_argument("--runs", type=int, default=200)
    parser.add_argument("--first", type=int, default=0, help="the number of the first run")
    parser.add_argument("--seed", type=int, help="choices; a random one where none is given")
    parser.add_argument(
        "--flows",
        choices=("none", "some", "all"),
        default="some",
        help="which runs are run by Prefect, against one server: none, a quarter, or all",
    )
    parser.add_argument("--jobs", type=int, default=4, help="worlds at the same time")
    parser.add_argument("--sealed", action="store_true", help="with an encryption key")
    parser.add_argument("--report", type=Path, help="a file for the runs as JSON")
    parser.add_argument("--go-on", action="store_true", help="do not stop at a violation")
    return parser


def _tell(run: Run) -> None:
    outcome = run.outcome.split("\n")[0][:100]
    print(
        f"{run.number:4} {run.engine:7} {run.flow:9} {run.victim:12} in {run.phase:8} "
        f"({run.when}): {outcome}; next: {run.next_run}; {run.seconds:.1f} s",
        flush=True,
    )
    for violation in run.violations:
        print(f"     VIOLATION: {violation}", flush=True)


def _tell_all(runs: list[Run], late: list[str], seconds: float) -> None:
    for flow in ("hibernate", "wake"):
        mine = [run for run in runs if run.flow == flow]
        phases = list(dict.fromkeys(run.phase for run in sorted(mine, key=lambda run: run.phase)))
        counts = Counter((run.victim, run.phase) for run in mine)
        print(f"\n{flow}: kills by victim and phase")
        print(f"  {'':12}" + "".join(f"{phase:>9}" for phase in phases) + "      all")
        for victim in sorted({run.victim for run in mine}):
            row = [counts[victim, phase] for phase in phases]
            print(f"  {victim:12}" + "".join(f"{n:9}" for n in row) + f"{sum(row):9}")
        for name, outcome in (("ended", _short), ("next run", lambda run: run.next_run)):
            found = Counter(map(outcome, mine))
            print(f"  {name}: " + ", ".join(f"{n} {what}" for what, n in found.most_common()))
    wrong = sum(len(run.violations) for run in runs) + len(late)
    prefect = sum(run.engine == "prefect" for run in runs)
    print(f"\n{len(runs)} runs ({prefect} by Prefect) in {seconds:.0f} s: {wrong} violations")
    for violation in late:
        print(f"VIOLATION at the end: {violation}")


def _short(run: Run) -> str:
    return ":".join(run.outcome.split(":")[:2])


def _report(seed: int, runs: list[Run], late: list[str]) -> dict[str, Any]:
    return {"seed": seed, "runs": [asdict(run) for run in runs], "at_the_end": late}


if __name__ == "__main__":
    sys.exit(main())
