"""Mixed flows, one after the other, for a while: nothing may grow."""

from __future__ import annotations

import statistics
import time
from typing import Any, Final

from tests.campaign.command import Violations
from tests.fixtures.deployed import Deployed
from tests.fixtures.own_installation import Alone
from tests.load.meter import ROLES, metered

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
MORE_FILES: Final = 10.0


def soak(alone: Alone, minutes: float, violations: Violations) -> dict[str, Any]:
    """``memory_mib`` and ``files``: of each process of the installation, round by round."""
    deployed, ends = Deployed(alone.server.api_url), time.monotonic() + 60 * minutes
    rounds: list[dict[str, dict[str, float]]] = []
    runs = 0
    with metered(alone.installation) as meter:
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
                    "memory_mib": {role: round(used.rss_mib, 1) for role, used in now.items()},
                    "files": {role: used.files for role, used in now.items()},
                }
            )
            print(f"     round {len(rounds)}: {rounds[-1]}", flush=True)
    wanted = {"flow_runs": {"state": {"type": {"any_": ["RUNNING", "PENDING", "CANCELLING"]}}}}
    for run in deployed.ask("flow_runs/filter", wanted):
        violations.add(f"run {run['name']} is left {run['state_type']}")
    growth = {
        f"{what} of the {role}": _growth([one[what][role] for one in rounds])
        for what in ("memory_mib", "files")
        for role in ROLES
    }
    if len(rounds) >= JUDGED:
        for what, more in growth.items():
            if more > (MORE_MIB if what.startswith("memory") else MORE_FILES):
                violations.add(f"{what} grew by {more:.0f} in {minutes:.0f} minutes")
    return {"rounds": rounds, "figures": {"runs": runs, **growth}}


def _growth(values: list[float]) -> float:
    """From the second quarter of the rounds to the last."""
    quarter = max(1, len(values) // 4)
    return statistics.median(values[-quarter:]) - statistics.median(
        values[quarter : 2 * quarter] or values
    )
