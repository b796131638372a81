"""The workers of an installation, one for each pool: each runs every flow run as a process."""

from __future__ import annotations

import os
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from deployments.installation import Installation
from deployments.processes import end, kill, last_words, launch, started_process
from deployments.server import LOGIN_VARIABLE, Server, environment
from tasks.runs import FLOW_POOL, JOB_POOL
from torpor.control.processes import ProcessRecord, is_alive
from torpor.shared.errors import TorporError


@dataclass(frozen=True)
class Pool:
    """A work pool, and the role of the process that works on it. ``limit``: the most runs at once,
    until the user sets another. ``queues``: the first goes first."""

    name: str
    role: str
    description: str
    limit: int | None = None
    queues: tuple[str, ...] = ()


POOLS: Final = (
    Pool(FLOW_POOL, "worker", "torpor's flows, as processes"),
    Pool(
        JOB_POOL,
        "job-worker",
        "Jobs, as processes; the limit is how many run at once. Each queue may have one too.",
        limit=8,  # a run is a process of 0.2 GB here, besides the machine that it rents
        queues=("critical", "high", "normal", "low"),
    ),
)
RUN_COMMAND: Final = "setsid python3 -m prefect.engine"
"""What a worker runs for each flow run, with the Python that comes first in its PATH: its own."""
ROLES: Final = tuple(pool.role for pool in POOLS)
READY_S: Final = 300.0
"""3 to 10 s, measured."""
STOP_S: Final = 20.0
"""A flow run that is cancelled first cancels the agent's work."""
_LOOK_S: Final = 2
"""How often the worker asks for runs. Prefect's ten seconds are long after a click on Run."""
_POLL_S: Final = 0.2
_STARTED: Final = b"started!"


def start(installation: Installation, server: Server, pools: Sequence[Pool] = POOLS) -> bool:
    """Start a worker for each of these pools that has none; True if one was started. Flow runs that
    outlived their worker go on, whatever happens."""
    env = environment(installation, server) | {
        "PREFECT_WORKER_QUERY_SECONDS": str(_LOOK_S),
        # So a server says that its database is away. Runs ask again for a minute, as where it says
        # 503 or is away itself.
        "PREFECT_CLIENT_RETRY_EXTRA_CODES": "500",
        "PREFECT_LOGGING_HANDLERS_CONSOLE_CLASS": "deployments.run_console.RunConsole",
        "TMPDIR": str(installation.temporary),  # Prefect leaves a folder in it for each worker
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', os.defpath)}",
    }
    spoken = ("PREFECT_API_URL", LOGIN_VARIABLE)
    having = {name: env[name] for name in spoken if name in env}
    installation.temporary.mkdir(mode=0o700, exist_ok=True)
    started = {}
    for pool in pools:
        if started_process(installation, pool.role, having):
            continue
        while other := started_process(installation, pool.role):  # of another server, or login
            kill(other)
        log = installation.log(pool.role)
        said_bytes = log.stat().st_size if log.exists() else 0
        started[pool.role] = said_bytes, _launch(installation, pool, env)
    deadline = time.monotonic() + READY_S
    for role, (said_bytes, process) in started.items():
        log = installation.log(role)
        while _STARTED not in log.read_bytes()[said_bytes:]:
            if not is_alive(process) or time.monotonic() > deadline:
                kill(process)
                raise TorporError(
                    f"the {role} for {server.api_url} did not start within {READY_S:.0f} s; the "
                    f"last of {log}:\n{last_words(log)}"
                )
            time.sleep(_POLL_S)
    return bool(started)


def kill_others(installation: Installation, api_url: str) -> None:
    """Kill the workers of other servers; their flow runs go on."""
    for pool in POOLS:
        ours = started_process(installation, pool.role, {"PREFECT_API_URL": api_url})
        while (other := started_process(installation, pool.role)) and other != ours:
            kill(other)


def works(installation: Installation) -> bool:
    """Whether a worker runs; flow runs outlive a killed one."""
    return any(started_process(installation, pool.role) for pool in POOLS)


def _launch(installation: Installation, pool: Pool, env: Mapping[str, str]) -> ProcessRecord:
    argv = [sys.executable, "-m", "prefect", "worker", "start", "--pool", pool.name]
    argv += ["--type", "process", "--name", f"{pool.name}-{socket.gethostname()}"]
    argv += ["--no-create-pool-if-not-found", "--install-policy", "never"]
    return launch(installation, pool.role, argv, env)


def stop(installation: Installation) -> bool:
    """End the workers and their flow runs; False if none ran."""
    return end(installation, *ROLES, polite_s=STOP_S) > 0
