"""Mixed flows, one after the other, for a while: nothing may grow."""

from __future__ import annotations

import statistics
import time
from typing import Any, Final

from tests.campaign.command import Violations
from tests.fixtures.deployed import Deployed
from tests.fixtures.own_installation import Alone
from tests.load.meter import ROLES, Meter

DEMO: Final = {"workspace": "demo"}
ROUND: Final[tuple[tuple[str, dict[str, Any]], ...]] = (
    ("job", {**DEMO, "command": "echo $TORPOR_JOB >> jobs"}),
    ("wake", DEMO),
    ("backup", DEMO),
    ("watch/watch-dry-run", {}),
    ("hibernate", DEMO),
    ("wake", DEMO),
)
"""Of the workspace `demo`, which `make up` gives its first machine. `watch` has its schedule."""
JUDGED: Final = 8
"""Rounds from which on growth is judged: first, caches fill."""
MORE_MIB: Final = 30.0
"""Not of the store, which keeps an index of its objects in memory."""
MORE_FILES: Final = 10.0


def soak(alone: Alone, minutes: float, violations: Violations) -> dict[str, Any]:
    """``memory``, in MiB, and ``files``: of each process of the installation, round by round."""
    deployed, ends = Deployed(alone.server.api_url), time.monotonic() + 60 * minutes
    rounds: list[dict[str, dict[str, float]]] = []
    runs = 0
    meter = Meter(alone.installation)
    while time.monotonic() < ends or not rounds:
        for name, given in ROUND:
            run = deployed.end(deployed.start(name, given))
            runs += 1
            if run["state_type"] != "COMPLETED":
                said = f"{run['state_type']}: {run['state']['message']}"
                violations.add(f"{name}, run {run['name']}, is {said}")
        meter.look()
        now = {
            role: max((one for one in meter.now if one.of == role), key=lambda one: one.rss_mib)
            for role in ROLES
        }
        rounds.append(
            {
                "memory": {role: round(used.rss_mib, 1) for role, used in now.items()},
                "files": {role: used.files for role, used in now.items()},
            }
        )
        print(f"     round {len(rounds)}: {rounds[-1]}", flush=True)
    wanted = {"flow_runs": {"state": {"type": {"any_": ["RUNNING", "PENDING", "CANCELLING"]}}}}
    for run in deployed.ask("flow_runs/filter", wanted):
        deployed.end(run["id"])  # fails where it is left so
    figures: dict[str, Any] = {"runs": runs, "rounds": len(rounds)}
    for what, unit, most in (("memory", "MiB", MORE_MIB), ("files", "handles", MORE_FILES)):
        for role in ROLES:
            before, after = _quarters([seen[what][role] for seen in rounds])
            figures[f"{what} of the {role}, second / last quarter, {unit}"] = [before, after]
            indexes = (what, role) == ("memory", "store")
            if len(rounds) >= JUDGED and after > before + most and not indexes:
                violations.add(f"{what} of the {role} grew from {before:.0f} to {after:.0f} {unit}")
    return {"rounds": rounds, "figures": figures}


def _quarters(values: list[float]) -> tuple[float, float]:
    """The medians of the second and the last quarter."""
    quarter = max(1, len(values) // 4)
    second = values[quarter : 2 * quarter] or values
    return statistics.median(second), statistics.median(values[-quarter:])
