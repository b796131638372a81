"""What the sampler costs its machine: share of a core and memory.

python -m benchmarks.sampler [--seconds 60]

It reads the GPUs of this host. For GPUs of a mock, put its libnvidia-ml.so.1 into LD_LIBRARY_PATH.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, Final

import psutil

from benchmarks.kept import write_result
from torpor.control.measure.host import host_facts
from torpor.machine.agent.home import enter_home
from torpor.machine.sampler.process import dismiss, ensure_sampler
from torpor.machine.sampler.ring import RING, read
from torpor.shared.values import MIB

BOUND_PERCENT: Final = 1.0  # of a core
BOUND_MIB: Final = 50.0
_START_S: Final = 5.0  # loading its modules is paid once, and is not in the share


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--keep", default="", help="name of the JSON under results/")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="torpor-sampler-") as folder:
        figures = measure(Path(folder) / "home", options.seconds)
    for name, value in figures.items():
        print(f"{name:28}{value:>16,.2f}")
    if options.keep:
        result = {"benchmark": "sampler", "host": host_facts(), **figures}
        print(f"kept as {write_result(options.keep, result)}")
    fits = figures["cpu_percent"] < BOUND_PERCENT and figures["resident_mib"] < BOUND_MIB
    return 0 if fits else 1


def measure(home: Path, seconds: float, start_s: float = _START_S) -> dict[str, Any]:
    """Run a sampler for so long, ``start_s`` after its first sample."""
    home = enter_home(home)
    argv = [sys.executable, "-m", "torpor.machine.agent", "sample", "--home", str(home)]
    process = ensure_sampler(home, "source", argv, "agent.log")
    if process is None:
        raise RuntimeError(f"a sampler runs in {home} already")
    try:
        seen = psutil.Process(process.pid)
        while not read(home / RING):
            if process.poll() is not None:
                raise RuntimeError(f"the sampler has ended: see {home / 'agent.log'}")
            time.sleep(0.1)
        time.sleep(start_s)
        before, began = seen.cpu_times(), time.monotonic()
        time.sleep(seconds)
        after, passed_s = seen.cpu_times(), time.monotonic() - began
        used_s = after.user + after.system - before.user - before.system
        samples = read(home / RING)
        return {
            "seconds": passed_s,
            "cpu_percent": 100 * max(0.0, used_s) / passed_s,
            "start_cpu_s": before.user + before.system,
            "resident_mib": seen.memory_info().rss / MIB,
            "samples": len(samples),
            "gpus": samples[-1].gpus if samples else 0,
        }
    finally:
        dismiss(home)
        process.wait()


if __name__ == "__main__":
    sys.exit(main())
