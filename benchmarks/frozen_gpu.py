"""A process that holds memory of a GPU is frozen, and goes on in a new namespace, twice.

    python -m benchmarks.frozen_gpu [--gib 0.5,4] [--runs 5] [--keep NAME]

Exit 1 where it does not go on, or its GPU holds something else. Prints JSON; --keep keeps it under
benchmarks/results. Times are seconds: the median, the least and the most.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, Final

from benchmarks.kept import write_result
from torpor.control.measure.host import host_facts
from torpor.control.remote.criu import criu_bundle
from torpor.machine.checkpoint.canary import run_canary
from torpor.machine.checkpoint.cuda import driver
from torpor.machine.checkpoint.tree import freeze, program, thaw, why_not
from torpor.machine.supervisor.processes import adopt_orphans

LIMIT_S: Final = 120.0
_HOLDS: Final = """
import hashlib, itertools, os, sys, time
import cupy, numpy
some = cupy.asarray(numpy.frombuffer(os.urandom(1 << 20), dtype=numpy.uint8))
held = cupy.tile(some, int(float(sys.argv[1]) * 1024))
for number in itertools.count():
    with open("said.new", "w") as said:
        said.write(f"{number} {hashlib.sha256(held.get()).hexdigest()}")
    os.rename("said.new", "said")
    while not os.path.exists(f"ask{number + 1}"):
        time.sleep(0.02)
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gib", default="0.5,4", help="memory of the GPU")
    parser.add_argument("--runs", type=int, default=5, help="of each size")
    parser.add_argument("--keep", default="", help="name of the JSON under results/")
    options = parser.parse_args()
    adopt_orphans()  # a restored tree is none of its restorer's children
    with tempfile.TemporaryDirectory(prefix="torpor-gpu-") as folder:
        place = Path(folder)
        shutil.unpack_archive(criu_bundle().archive, place / "criu")
        result: dict[str, Any] = {
            "host": host_facts(),
            "driver": driver() or "none",
            "why_not": why_not(),
            "canary": run_canary(program(place / "criu"), place)._asdict(),
        }
        for gib in options.gib.split(","):
            runs = [_hold(place, float(gib)) for _ in range(options.runs)]
            result[f"{gib} GiB"] = {"runs": len(runs), **_summary(runs)}
    print(json.dumps(result, indent=1, sort_keys=True))
    if options.keep:
        write_result(options.keep, result)


def _summary(runs: list[dict[str, float]]) -> dict[str, list[float]]:
    columns = {name: [run[name] for run in runs] for name in runs[0]}
    return {
        name: [round(pick(column), 3) for pick in (statistics.median, min, max)]
        for name, column in columns.items()
    }


def _hold(place: Path, gib: float) -> dict[str, float]:
    for left in [*place.glob("ask*"), *place.glob("said*")]:
        left.unlink()
    images, first = place / "images", None
    with (place / "errors").open("wb") as errors:
        began_s = time.monotonic()
        process = subprocess.Popen(
            [sys.executable, "-c", _HOLDS, str(gib)],
            cwd=place,
            start_new_session=True,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=errors,
        )
    held = _ask(place, 0)
    seen = {"started_s": time.monotonic() - began_s}
    root = process.pid
    try:
        for number, name in ((1, ""), (2, "_again")):
            began_s = time.monotonic()
            seen[f"images{name}_bytes"] = freeze(place / "criu", root, first, images, LIMIT_S)
            seen[f"frozen{name}_s"] = time.monotonic() - began_s
            os.kill(first or root, signal.SIGKILL)
            os.waitpid(first or root, 0)
            began_s = time.monotonic()
            namespace, root = thaw(place / "criu", images)
            namespace.keep()
            first = namespace.first
            seen[f"thawed{name}_s"] = time.monotonic() - began_s
            shutil.rmtree(images)
            if _ask(place, number) != held:
                raise SystemExit("the GPU holds something else")
    finally:
        os.kill(first or root, signal.SIGKILL)
        os.waitpid(first or root, 0)
    print(f"{gib} GiB: {seen}", file=sys.stderr)
    return seen


def _ask(place: Path, number: int) -> str:
    """What the process says of its GPU's memory; SystemExit where it says nothing."""
    (place / f"ask{number}").touch()
    ends_s = time.monotonic() + LIMIT_S
    while time.monotonic() < ends_s:
        text = (place / "said").read_text() if (place / "said").exists() else ""
        at, _, what = text.partition(" ")
        if at == str(number) and what:
            return what
        time.sleep(0.01)
    raise SystemExit(f"the process is silent: {(place / 'errors').read_text()[-2000:]}")


if __name__ == "__main__":
    main()
