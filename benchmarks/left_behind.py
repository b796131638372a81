"""What the look for losses costs: by itself, and how much longer a snapshot takes beside it.

    python -m benchmarks.left_behind [--outside 200000] [--inside 20000] [--times 7] [--keep NAME]

``outside`` files lie beside the workspace on a local machine. Snapshots of an unchanged workspace,
which are the shortest there are, are taken in turns with and without the look.
"""

from __future__ import annotations

import argparse
import json
import secrets
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from benchmarks.kept import write_result
from benchmarks.machine import BenchMachine
from torpor.control.measure.host import host_facts
from torpor.control.store.embedded import EmbeddedStore
from torpor.machine.tree.left_behind import Where

_IN_A_FOLDER = 500


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--outside", type=int, default=200_000)
    parser.add_argument("--inside", type=int, default=20_000)
    parser.add_argument("--times", type=int, default=7)
    parser.add_argument("--folder", type=Path, default=Path("/dev/shm"))
    parser.add_argument("--keep", default="", help="name of the JSON under results/")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="torpor-left-", dir=options.folder) as scratch:
        keys = ("ak" + secrets.token_hex(8), secrets.token_hex(20))
        with (
            EmbeddedStore.start(Path(scratch) / "store", *keys, "torpor") as store,
            BenchMachine(Path(scratch) / "machine", store) as machine,
        ):
            figures = measure(machine, options.outside, options.inside, options.times)
    result = {"benchmark": "left_behind", "host": host_facts(), **figures}
    print(json.dumps(result, indent=1, sort_keys=True))
    if options.keep:
        print(f"kept as {write_result(options.keep, result)}")


def measure(machine: BenchMachine, outside: int, inside: int, times: int) -> dict[str, Any]:
    """Both, on a machine whose workspace is still empty."""
    _fill(machine.workspace, inside)
    _fill(machine.home / "data", outside)
    machine.snapshot()
    alone, seen = [], {}
    for _ in range(times):
        started = time.monotonic()
        seen = _look(machine.home, machine.workspace)
        alone.append(time.monotonic() - started)
    without, beside = [], []
    for _ in range(times):  # in turns: the host is never as idle twice
        without.append(machine.snapshot().wall_s)
        beside.append(machine.snapshot(ends=True).wall_s)
    return {
        "outside_files": outside,
        "inside_files": inside,
        "seen_files": seen["total"]["files"],
        "complete": seen["complete"],
        "look_s": _spread(alone),
        "unchanged_snapshot_s": _spread(without),
        "unchanged_snapshot_with_look_s": _spread(beside),
        "longer_by_s": statistics.median(beside) - statistics.median(without),
    }


def _fill(folder: Path, files: int) -> None:
    for number in range(files):
        place = folder / f"d{number // _IN_A_FOLDER:04}"
        if number % _IN_A_FOLDER == 0:
            place.mkdir(parents=True)
        (place / f"file-{number:06}").write_bytes(b"x" * (number % 100 + 1))


def _look(top: Path, workspace: Path) -> Any:
    """As the agent starts it."""
    where = Where(str(top), since_ns=0, disks_since_ns=0, skipped=[str(workspace)], recorded=[])
    argv = [sys.executable, "-m", "torpor.machine.tree.left_behind"]
    done = subprocess.run(argv, input=msgspec.json.encode(where), capture_output=True, check=True)
    return msgspec.json.decode(done.stdout)


def _spread(seconds: Sequence[float]) -> dict[str, float]:
    return {
        "n": len(seconds),
        "least": min(seconds),
        "median": statistics.median(seconds),
        "most": max(seconds),
    }


if __name__ == "__main__":
    main()
