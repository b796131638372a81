"""What a flow takes beside its work: all but the scan, the store, the restore and the check.

    python -m benchmarks.overhead [--runs 20] [--keep NAME]

A small workspace hibernates and wakes again and again at the local provider, with a Prefect server
and a bucket of its own. Prints JSON with the seconds of each phase, n = RUNS; --keep keeps it
under benchmarks/results.
"""

from __future__ import annotations

import argparse
import json
import math
import secrets
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, cast

from benchmarks.content import make_below
from benchmarks.kept import summed_up, write_result
from deployments.demo import clear_up, environment
from deployments.demo_story import BUCKET, NAME, home_of, save_blocks
from deployments.installation import CHECKOUT, Installation
from deployments.processes import mark
from torpor.control.measure.host import host_facts
from torpor.control.reports import HibernateReport, WakeReport
from torpor.control.store.embedded import EmbeddedStore
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
    installation = Installation(Path(tempfile.mkdtemp(prefix="torpor-overhead-")))
    try:
        scratch = installation.folder / "tmp"
        scratch.mkdir()
        told = subprocess.run(
            [
                *(sys.executable, "-m", "benchmarks.overhead", "--runs", str(runs)),
                *("--inside", str(installation.folder)),
            ],
            cwd=CHECKOUT,
            env=environment(installation, scratch, verbose=False) | mark(installation, "demo"),
            stdout=subprocess.PIPE,
            check=True,
        )
    finally:
        clear_up(installation)
    rounds: dict[str, list[dict[str, float]]] = json.loads(told.stdout.splitlines()[-1])
    return {
        "benchmark": "overhead",
        "host": host_facts(),
        "workspace_bytes": WORKSPACE_BYTES,
        "flows": {name: _summed_up(name, seconds) for name, seconds in rounds.items()},
        "rounds": rounds,
    }


def _summed_up(flow: str, rounds: list[dict[str, float]]) -> dict[str, Any]:
    beside = sorted(
        seconds["all"] - sum(seconds.get(phase, 0.0) for phase in WORK[flow]) for seconds in rounds
    )
    p95 = beside[math.ceil(0.95 * len(beside)) - 1]
    phases = {phase for seconds in rounds for phase in seconds}
    return {
        "overhead_s": {**summed_up(beside), "p95": p95},
        "phases": {
            phase: summed_up([seconds.get(phase, 0.0) for seconds in rounds])
            for phase in sorted(phases)
        },
    }


def _rounds(installation: Installation, runs: int) -> dict[str, list[dict[str, float]]]:
    from flows import create, hibernate, wake  # Prefect reads this process's environment

    access, secret = f"bench-{secrets.token_hex(4)}", secrets.token_urlsafe(24)
    rounds: dict[str, list[dict[str, float]]] = {"hibernate": [], "wake": []}
    with EmbeddedStore.start(installation.store, access, secret, BUCKET) as store:
        save_blocks(installation, store)
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
