"""Whether the server's own services work: without its scheduler, no schedule ever runs, and nothing
in the UI shows it."""

from __future__ import annotations

import time
from typing import Final

from deployments.api import Api
from deployments.server import Server
from torpor.shared.errors import TorporError

SCHEDULED_S: Final = 60.0
"""The scheduler looks for changed deployments every 5 s."""
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
            api.ask("DELETE", f"flows/{flow}")  # with its deployment and runs


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
