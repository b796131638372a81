"""``python -m tests.campaign --runs 200 --seed 1``: the kill campaign. Exit 1 on any violation."""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict
from functools import partial
from multiprocessing import get_context
from typing import NamedTuple

from tests.campaign.campaign import Run, open_campaign
from tests.campaign.command import Command, Found, Given


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


def _carry_out(seed: int, count: int, given: Given) -> Found:
    shares = share_out(given.first, count, given.jobs, given.flows)
    # Each share forks its runs: a fork among threads would inherit the locks that others hold.
    with ProcessPoolExecutor(len(shares), get_context("fork")) as pool:
        done = list(pool.map(partial(_carry_out_share, seed, given), shares))
    runs = sorted((run for share, _ in done for run in share), key=lambda run: run.number)
    late = [f"at the end: {violation}" for _, found in done for violation in found]
    for flow in ("hibernate", "wake"):
        _tell_flow(flow, [run for run in runs if run.flow == flow])
    sealed = " --sealed" if given.sealed else ""
    repeat = [
        f"--first {run.number} --runs 1 --jobs 1 --flows "
        f"{'all' if run.engine == 'prefect' else 'none'}{sealed}"
        for run in runs
        if run.violations
    ]
    prefect = sum(run.engine == "prefect" for run in runs)
    violations = [violation for run in runs for violation in run.violations] + late
    summary = f"\n{len(runs)} runs ({prefect} by Prefect)"
    return Found(summary, violations, [asdict(run) for run in runs], repeat)


def _carry_out_share(seed: int, given: Given, share: Share) -> tuple[list[Run], list[str]]:
    runs: list[Run] = []
    with open_campaign(seed, sealed=given.sealed, by_prefect=share.by_prefect) as campaign:
        for number in share.numbers:
            runs.append(campaign.run(number))
            if runs[-1].violations and not given.go_on:
                break
        return runs, campaign.end()


def _options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--first", type=int, default=0, help="the number of the first run")
    parser.add_argument(
        "--flows",
        choices=("none", "some", "all"),
        default="some",
        help="which runs are run by Prefect, against one server: none, a quarter, or all",
    )
    parser.add_argument("--jobs", type=int, default=4, help="worlds at the same time")
    parser.add_argument("--sealed", action="store_true", help="with an encryption key")
    parser.add_argument("--go-on", action="store_true", help="do not stop at a violation")


def _tell_flow(flow: str, runs: list[Run]) -> None:
    phases = sorted({run.phase for run in runs})
    counts = Counter((run.victim, run.phase) for run in runs)
    print(f"\n{flow}: kills by victim and phase")
    print(f"  {'':12}" + "".join(f"{phase:>9}" for phase in phases) + "      all")
    for victim in sorted({run.victim for run in runs}):
        row = [counts[victim, phase] for phase in phases]
        print(f"  {victim:12}" + "".join(f"{n:9}" for n in row) + f"{sum(row):9}")
    ended = Counter(run.outcome.partition(":")[0] for run in runs)
    for name, found in (("ended", ended), ("next run", Counter(run.next_run for run in runs))):
        print(f"  {name}: " + ", ".join(f"{n} {what}" for what, n in found.most_common()))


COMMAND = Command("tests.campaign", "runs", 200, _carry_out, _options)

if __name__ == "__main__":
    sys.exit(COMMAND.main())
