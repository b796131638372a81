"""Runs whose process is gone: a kill or a crash leaves them Running, and Prefect never looks again.

Such a run counts for the limit of its deployment: after a crash, the dead run of `watch` would keep
all later ones from starting. Only runs of the installation's own pools are judged. Its server
listens on loopback and only its own workers may serve these pools: they run here.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping
from datetime import datetime
from typing import Any, Final

import psutil

from deployments.api import Api
from deployments.processes import RUN_MARK
from deployments.server import Server
from deployments.worker import POOLS
from torpor.control.processes import all_processes, is_running

STUCK_S: Final = 600.0
"""Seconds after which a run that a worker has taken, and that has no process, is stuck: a worker
starts the process within seconds."""
STARTS_S: Final = 60.0
"""Seconds that may lie between a run's state and the start of its process. The clock may have been
set in between."""
_OPEN: Final = ("PENDING", "RUNNING", "CANCELLING")


def end_lost_runs(server: Server, *, workers: bool) -> list[str]:
    """Record the end of runs whose process is gone; a sentence for each. A run that a worker took
    and never started waits in its queue again: at once if no worker runs (``workers``), else after
    STUCK_S. Raises TorporError; does nothing at the user's own server, which may have workers on
    other hosts."""
    if not server.own:
        return []
    said = []
    with Api(server) as api:
        open_runs = _open_runs(api)
        processes = all_processes()
        alive = {
            word.removeprefix(RUN_MARK).decode()
            for words in processes.values()
            for word in words
            if word.startswith(RUN_MARK)
        }
        for run in open_runs:
            if run["id"] in alive or _may_be_hidden(run, processes):
                continue
            seen = run["state_type"]
            if seen == "PENDING" and workers and _since_s(run) < STUCK_S:
                continue
            # The run may have ended since the list was read: its process records the end before it
            # exits.
            now = api.ask("GET", f"flow_runs/{run['id']}")
            if now["state_type"] != seen or now["state"]["timestamp"] != run["state"]["timestamp"]:
                continue
            wanted, words = _ended(run)
            answer = api.ask("POST", f"flow_runs/{run['id']}/set_state", {"state": wanted})
            if answer["status"] != "ACCEPT":
                words = f"is not ended: {_WHY}; the server at {server.api_url} answered "
                words += f"{answer['status']}: {answer['details'].get('reason')}"
            said.append(f"run {run['name']} {words}")
    return said


def _open_runs(api: Api) -> list[dict[str, Any]]:
    return api.all(
        "flow_runs/filter",
        {
            "flow_runs": {"state": {"type": {"any_": [*_OPEN]}}},
            "work_pools": {"name": {"any_": [pool.name for pool in POOLS]}},
            "sort": "EXPECTED_START_TIME_ASC",
        },
    )


def _ended(run: dict[str, Any]) -> tuple[dict[str, Any], str]:
    if run["state_type"] == "PENDING":
        again = {"scheduled_time": run["expected_start_time"]}
        return {"type": "SCHEDULED", "name": "Scheduled", "state_details": again}, (
            "waits again: its worker ended before it started"
        )
    if run["state_type"] == "CANCELLING":
        return {"type": "CANCELLED", "name": "Cancelled", "message": _WHY}, "is cancelled: " + _WHY
    return {"type": "CRASHED", "name": "Crashed", "message": _WHY}, "crashed: " + _WHY


_WHY: Final = "its process on this host is gone, without a word of its end (a kill, or a reboot)"


def _may_be_hidden(run: dict[str, Any], processes: Mapping[psutil.Process, set[bytes]]) -> bool:
    """Whether the run's process may belong to another account, whose environment cannot be read. A
    process that started later merely has the run's pid."""
    for process, words in processes.items():
        if str(process.pid) == run["infrastructure_pid"] and not words and is_running(process):
            with contextlib.suppress(psutil.NoSuchProcess):
                return time.time() - process.create_time() > _since_s(run) - STARTS_S
    return False


def _since_s(run: dict[str, Any]) -> float:
    since = datetime.fromisoformat(run["state"]["timestamp"].replace("Z", "+00:00"))
    return time.time() - since.timestamp()
