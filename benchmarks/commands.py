"""What a command costs beside its work: `ssh NAME true`, `torpor status`, an import.

    python -m benchmarks.commands NAME [--config FILE] [--runs 5] [--keep NAME]

Asks the installation that is up (`torpor up`), where the workspace NAME is awake, after
`torpor ssh --setup`. The logins share a connection, so that what is left is the check before each.
Prints JSON with the seconds and CPU seconds of each command, n = RUNS.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any, Final

from benchmarks.kept import summed_up, write_result
from torpor.control.measure.host import host_facts

PYTHON: Final = (sys.executable, "-P")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("workspace")
    parser.add_argument("--config", default="", help="OpenSSH's file, if not ~/.ssh/config")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--keep", default="", help="name of the JSON under results/")
    options = parser.parse_args()
    result = measure(commands(options.workspace, options.config), options.runs)
    print(json.dumps(result, indent=1))
    if options.keep:
        print(f"kept as {write_result(options.keep, result)}")


def commands(workspace: str, config: str = "") -> dict[str, list[str]]:
    """The commands, by what they are called in the result."""
    return {
        "ssh": ["ssh", *(["-F", config] if config else []), workspace, "true"],
        "status": [*PYTHON, "-m", "torpor_cli", "status"],
        "from blocks import Workspace": [*PYTHON, "-c", "from blocks import Workspace"],
    }


def measure(asked: Mapping[str, Sequence[str]], runs: int) -> dict[str, Any]:
    """Seconds of each command by the clock and of the CPU, after one run that is not counted."""
    found = {}
    for name, argv in asked.items():
        rounds = [_seconds(argv) for _ in range(1 + runs)][1:]
        found[name] = {
            "wall_s": summed_up([wall for wall, _ in rounds]),
            "cpu_s": summed_up([cpu for _, cpu in rounds]),
        }
    return {"host": host_facts(), "commands": found}


def _seconds(argv: Sequence[str]) -> tuple[float, float]:
    before, began = os.times(), time.perf_counter()
    subprocess.run(argv, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, check=True)
    wall, after = time.perf_counter() - began, os.times()
    user = after.children_user - before.children_user
    return wall, user + after.children_system - before.children_system


if __name__ == "__main__":
    main()
