"""Checks that schedules run: that the server makes their runs, and that a living worker takes them.
The UI shows neither failure."""

from __future__ import annotations

import time
from typing import Final

from deployments.api import Api
from deployments.installation import CHECKOUT
from deployments.server import Server
from deployments.worker import POOLS
from tasks.runs import TAG
from torpor.shared.errors import TorporError

SCHEDULED_S: Final = 60.0
"""Seconds to wait for the run of a new schedule. The scheduler looks for changed deployments every
5 s."""
SERVED_S: Final = 90.0
"""Seconds to wait for a worker's sign of life. A worker sends one every 30 s, also to a pool that
was made again."""
_POLL_S: Final = 0.5
NAME: Final = "torpor-checks-the-scheduler"


def check_scheduler(server: Server) -> None:
    """TorporError unless the server makes a run of a new schedule within SCHEDULED_S."""
    with Api(server) as api:
        flow = api.ask("POST", "flows/", {"name": NAME})["id"]
        try:
            if not _is_scheduled(api, flow):
                raise TorporError(
                    f"the Prefect server at {server.api_url} runs no schedules: it made no run of "
                    f"a new schedule within {SCHEDULED_S:.0f} s, so no backup, watch or deadline "
                    "will ever run by itself. Look for `scheduler` in its log, and see that its "
                    "packages are those of constraints.txt"
                )
        finally:
            api.ask("DELETE", f"flows/{flow}")  # deleted with its deployment and runs


def check_served(server: Server) -> list[str]:
    """TorporError unless each deployment of torpor's points at a work pool, and a living worker
    serves the pools of torpor's. Returns a sentence for each pool or queue that its user has
    paused, and for each pool of its user's that no worker serves."""
    with Api(server) as api:
        ours = [pool.name for pool in POOLS]
        deadline = time.monotonic() + SERVED_S
        while silent := [name for name in ours if not _has_worker(api, name)]:
            if time.monotonic() > deadline:
                raise TorporError(
                    f"no worker serves the work pool {', '.join(silent)} at {server.api_url}: "
                    f"none said within {SERVED_S:.0f} s that it lives. See worker.log"
                )
            time.sleep(_POLL_S)
        said, pointed = list[str](), dict[tuple[str, str], str]()
        for one in api.all("deployments/filter", {"deployments": {"tags": {"all_": [TAG]}}}):
            if one["work_pool_name"] is None:
                if str(CHECKOUT) not in str(one["pull_steps"]):
                    continue  # a user's deployment, served by a program
                said.append(
                    f"the deployment {one['name']} at {server.api_url} has no work pool, so its "
                    "runs never start: choose one in the UI, or delete it and run `torpor up`"
                )
                continue
            pointed[one["work_pool_name"], one["work_queue_name"]] = one["name"]
        for (pool, queue), name in pointed.items():
            path = f"work_pools/{pool}"
            if pool not in ours and not _has_worker(api, pool):
                said.append(f"no worker serves the work pool {pool} of the deployment {name}")
            elif api.ask("GET", path)["is_paused"]:
                said.append(f"the work pool {pool} is paused: nothing in it starts")
            elif api.ask("GET", f"{path}/queues/{queue}")["is_paused"]:
                said.append(f"the work queue {queue} of {pool} is paused: nothing in it starts")
        return said


def _has_worker(api: Api, pool: str) -> bool:
    found = api.ask("POST", f"work_pools/{pool}/workers/filter", {})
    return any(one["status"] == "ONLINE" for one in found)


def _is_scheduled(api: Api, flow: str) -> bool:
    hourly = {"schedule": {"interval": 3600}, "active": True}
    wanted = {"name": NAME, "flow_id": flow, "schedules": [hourly]}
    deployment = api.ask("POST", "deployments/", wanted)["id"]
    deadline = time.monotonic() + SCHEDULED_S
    while time.monotonic() < deadline:
        if api.ask("POST", "flow_runs/filter", {"deployments": {"id": {"any_": [deployment]}}}):
            return True
        time.sleep(_POLL_S)
    return False
