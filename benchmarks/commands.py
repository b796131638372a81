"""What a person waits for at a command: `torpor up`, `torpor status`, `ssh NAME true`, an import.

    python -m benchmarks.commands [--runs 20] [--workspaces 20] [--keep NAME]

In an empty home, so that an installation of yours stays as it is: `up` starts one that was up
before and is stopped, and `status` shows WORKSPACES, of which one is awake. The logins by ssh share
a connection, so that what is left is the check before each. Prints JSON with the seconds and CPU
seconds of each command, n = RUNS, with the 95th percentile; --keep keeps it under
benchmarks/results.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from benchmarks.flow_costs import with_p95
from benchmarks.kept import write_result
from benchmarks.own_home import DEMO, TORPOR, own_home, run
from torpor.control.measure.host import host_facts

_COPIES: Final = """
import sys
from blocks import Workspace
demo = Workspace.load("demo")
for number in range(int(sys.argv[1])):
    demo.model_copy(update={"name": f"demo-{number}"}).save(f"demo-{number}")
"""


@dataclass(frozen=True)
class Command:
    """``before``: what is run before each, and not measured."""

    argv: Sequence[str]
    before: Sequence[str] = ()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--workspaces", type=int, default=20)
    parser.add_argument("--keep", default="", help="name of the JSON under results/")
    options = parser.parse_args()
    result = measure(options.runs, options.workspaces)
    print(json.dumps(result, indent=1))
    if options.keep:
        print(f"kept as {write_result(options.keep, result)}")


def measure(runs: int, workspaces: int) -> dict[str, Any]:
    """Seconds of each command by the clock and of the CPU, in a home of its own."""
    with own_home() as home:
        run([sys.executable, "-P", "-c", _COPIES, str(workspaces - 1)], home.python())
        found = figures(_commands(home.folder), home.env, runs)
    return {
        "benchmark": "commands",
        "host": host_facts(),
        "workspaces": workspaces,
        "commands": found,
    }


def figures(
    commands: Mapping[str, Command], env: Mapping[str, str], runs: int
) -> dict[str, dict[str, Any]]:
    """Each command's seconds, after one run that is not counted. Raises CalledProcessError for one
    that fails."""
    found = {}
    for name, command in commands.items():
        rounds = [_seconds(command, env) for _ in range(1 + runs)][1:]
        found[name] = {
            "wall_s": with_p95([wall for wall, _ in rounds]),
            "cpu_s": with_p95([cpu for _, cpu in rounds]),
        }
    return found


def _commands(home: Path) -> dict[str, Command]:
    return {
        "up": Command([*TORPOR, "up"], [*TORPOR, "down"]),
        "status": Command([*TORPOR, "status"]),
        "ssh": Command(["ssh", "-F", str(home / ".ssh" / "config"), DEMO, "true"]),
        "import": Command([sys.executable, "-P", "-c", "from blocks import Workspace"]),
    }


def _seconds(command: Command, env: Mapping[str, str]) -> tuple[float, float]:
    if command.before:
        run(command.before, env)
    before, began = os.times(), time.perf_counter()
    run(command.argv, env)
    wall, after = time.perf_counter() - began, os.times()
    user = after.children_user - before.children_user
    return wall, user + after.children_system - before.children_system


if __name__ == "__main__":
    main()
