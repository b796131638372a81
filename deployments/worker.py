"""The workers of an installation, one for each pool: each runs every flow run as a process."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from deployments.installation import Installation
from deployments.processes import begin
from deployments.server import Server, environment
from tasks.runs import FLOW_POOL, JOB_POOL, JOB_QUEUES


@dataclass(frozen=True)
class Pool:
    """A work pool, and the role of the process that works on it. ``limit``: the most runs at once,
    until the user sets another limit. ``queues``: by priority, highest first."""

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
        limit=8,  # a run here is a process of 0.2 GB, besides the machine that it rents
        queues=JOB_QUEUES,
    ),
)
WATCH_COMMAND: Final = "setsid python3 -m prefect.engine"
RUN_COMMAND: Final = f"env PREFECT_CLIENT_MAX_RETRIES=9 {WATCH_COMMAND}"
"""The command that a worker runs for each flow run, with the Python that comes first in its PATH:
its own.

Prefect waits 2, 4, 8 ... seconds between requests, a fifth more or less. A flow run asks a server
that is away for 14 to 20 minutes with 9 retries: it outlives a supervisor that was killed. The
worker itself asks for a minute, as it would else sleep for minutes after the server is back.

So does a run of `watch`, by a command of its deployment's own: one that slept for minutes would
hold the only slot, and the runs that its schedule makes meanwhile would be cancelled.
"""
ROLES: Final = tuple(pool.role for pool in POOLS)
READY_S: Final = 300.0
"""Seconds that a worker may take until it asks for runs; 3 to 10 s were measured."""
STOP_S: Final = 20.0
"""Seconds that a worker gets to end. A flow run that is cancelled first cancels the agent's
work."""
_QUERY_S: Final = 2
"""Seconds between two requests of the worker for runs. Prefect's default of ten seconds is long
after a click on Run."""
_STARTED: Final = b"started!"


def begin_worker(installation: Installation, server: Server, pool: Pool) -> subprocess.Popen[bytes]:
    """Start the pool's worker as a child of this process. Flow runs that outlived an earlier worker
    go on."""
    env = environment(installation, server) | {
        "PREFECT_WORKER_QUERY_SECONDS": str(_QUERY_S),
        # With this status the server says that its database is away, and runs ask again, as they do
        # when the server itself is away.
        "PREFECT_CLIENT_RETRY_EXTRA_CODES": "500",
        "PREFECT_LOGGING_HANDLERS_CONSOLE_CLASS": "deployments.run_console.RunConsole",
        "TMPDIR": str(installation.temporary),  # Prefect leaves a folder in it for each worker
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', os.defpath)}",
    }
    installation.temporary.mkdir(mode=0o700, exist_ok=True)
    argv = [sys.executable, "-m", "prefect", "worker", "start", "--pool", pool.name]
    argv += ["--type", "process", "--name", f"{pool.name}-{socket.gethostname()}"]
    argv += ["--no-create-pool-if-not-found", "--install-policy", "never"]
    return begin(installation, pool.role, argv, env)


def works(said: bytes) -> bool:
    """Whether the worker that has printed ``said`` asks for runs."""
    return _STARTED in said
