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
import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from benchmarks.kept import summed_up, write_result
from torpor.control.measure.host import host_facts
from torpor.control.ports import free_ports

TORPOR: Final = (sys.executable, "-P", "-m", "torpor_cli")
DEMO: Final = "demo"
"""The workspace that `torpor up` makes, on a machine that is up."""
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
    with tempfile.TemporaryDirectory(prefix="torpor-") as folder:
        home = Path(folder).resolve()
        env = _environment(home)
        try:
            _run([*TORPOR, "up", "--port", str(free_ports(1)[0]), "--idle", "off"], env)
            _run([*TORPOR, "ssh", "--setup"], env)
            _run([sys.executable, "-P", "-c", _COPIES, str(workspaces - 1)], _python(env, home))
            found = figures(_commands(home), env, runs)
        finally:
            _run([*TORPOR, "down", "--machines"], env)
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
            "wall_s": _with_p95([wall for wall, _ in rounds]),
            "cpu_s": _with_p95([cpu for _, cpu in rounds]),
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
        _run(command.before, env)
    before, began = os.times(), time.perf_counter()
    _run(command.argv, env)
    wall, after = time.perf_counter() - began, os.times()
    user = after.children_user - before.children_user
    return wall, user + after.children_system - before.children_system


def _run(argv: Sequence[str], env: Mapping[str, str]) -> None:
    subprocess.run(argv, env=env, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, check=True)


def _environment(home: Path) -> dict[str, str]:
    ours = ("PREFECT_", "TORPOR_", "XDG_")
    own = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
    return own | {"HOME": str(home)}


def _python(env: Mapping[str, str], home: Path) -> dict[str, str]:
    """As `torpor up` says for Python."""
    state = home / ".local" / "state" / "torpor"
    port, login = ((state / name).read_text().strip() for name in ("server.port", "login"))
    return {
        **env,
        "PREFECT_API_URL": f"http://127.0.0.1:{port}/api",
        "PREFECT_API_AUTH_STRING": login,
    }


def _with_p95(values: Sequence[float]) -> dict[str, float]:
    return {**summed_up(values), "p95": sorted(values)[math.ceil(0.95 * len(values)) - 1]}


if __name__ == "__main__":
    main()
