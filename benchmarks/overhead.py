"""What a flow takes beside its work: all but the scan, the store, the restore and the check.

    python -m benchmarks.overhead [--runs 20] [--keep NAME]

A small workspace hibernates and wakes again and again at the local provider, with a Prefect server
and a bucket of its own. Prints JSON with the seconds of each phase, n = RUNS; --keep keeps it
under benchmarks/results.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, cast

from benchmarks.content import make_below
from benchmarks.flow_costs import in_own_installation, own_bucket, with_p95
from benchmarks.kept import summed_up, write_result
from deployments.demo_story import NAME, home_of
from deployments.installation import Installation
from torpor.control.measure.host import host_facts
from torpor.control.reports import HibernateReport, WakeReport
from torpor.shared.values import MIB

WORKSPACE_BYTES: Final = 4 * MIB
WORK: Final = {
    "hibernate": frozenset({"scan", "store", "verify", "confirm"}),
    "wake": frozenset({"restore", "check"}),
}
"""The phases whose time depends on what the workspace holds."""


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--keep", default="", help="name of the JSON under results/")
    parser.add_argument("--inside", type=Path, help=argparse.SUPPRESS)  # of the process that runs
    options = parser.parse_args()
    if options.inside:
        print(json.dumps(_rounds(Installation(options.inside), options.runs)))
        return
    result = measure(options.runs)
    print(json.dumps(result, indent=1))
    if options.keep:
        print(f"kept as {write_result(options.keep, result)}")


def measure(runs: int) -> dict[str, Any]:
    """Each flow's seconds by phase, and what it takes beside its work: its 95th percentile, too."""
    rounds: dict[str, list[dict[str, float]]] = in_own_installation("overhead", "--runs", str(runs))
    return {
        "benchmark": "overhead",
        "host": host_facts(),
        "workspace_bytes": WORKSPACE_BYTES,
        "flows": {name: _summed_up(name, seconds) for name, seconds in rounds.items()},
        "rounds": rounds,
    }


def _summed_up(flow: str, rounds: list[dict[str, float]]) -> dict[str, Any]:
    beside = [
        seconds["all"] - sum(seconds.get(phase, 0.0) for phase in WORK[flow]) for seconds in rounds
    ]
    phases = {phase for seconds in rounds for phase in seconds}
    return {
        "overhead_s": with_p95(beside),
        "phases": {
            phase: summed_up([seconds.get(phase, 0.0) for seconds in rounds])
            for phase in sorted(phases)
        },
    }


def _rounds(installation: Installation, runs: int) -> dict[str, list[dict[str, float]]]:
    from flows import create, hibernate, wake  # Prefect reads this process's environment

    rounds: dict[str, list[dict[str, float]]] = {"hibernate": [], "wake": []}
    with own_bucket(installation):
        make_below(home_of(installation, create(NAME)) / "workspace", WORKSPACE_BYTES, seed=1)
        for _ in range(runs):
            rounds["hibernate"].append(_seconds(lambda: cast("HibernateReport", hibernate(NAME))))
            rounds["wake"].append(_seconds(lambda: cast("WakeReport", wake(NAME))))
    return rounds


def _seconds(run: Callable[[], HibernateReport | WakeReport]) -> dict[str, float]:
    began_s = time.monotonic()
    phases = run().seconds
    whole = time.monotonic() - began_s
    return {**phases, "all": whole, "none": whole - sum(phases.values())}


if __name__ == "__main__":
    main()
