"""The worker of an installation: it runs each flow run of a deployment as a process."""

from __future__ import annotations

import socket
import sys
import time
from typing import Final

from deployments.installation import Installation
from deployments.processes import end, last_words, launch, running
from deployments.server import LOGIN_VARIABLE, Server, environment
from torpor.control.processes import is_alive
from torpor.shared.errors import TorporError

POOL: Final = "torpor"
READY_S: Final = 300.0
"""3 to 10 s, measured."""
STOP_S: Final = 20.0
"""A flow run that is cancelled first cancels the agent's work."""
_LOOK_S: Final = 2
"""How often the worker asks for runs. Prefect's ten seconds are long after a click on Run."""
_POLL_S: Final = 0.2
_STARTED: Final = b"started!"


def start(installation: Installation, server: Server) -> bool:
    """Start a worker for the pool unless one runs; True if it was started."""
    env = environment(installation, server) | {
        "PREFECT_WORKER_QUERY_SECONDS": str(_LOOK_S),
        "TMPDIR": str(installation.temporary),  # Prefect leaves a folder in it for each worker
    }
    spoken = ("PREFECT_API_URL", LOGIN_VARIABLE)
    if running(installation, "worker", having={name: env[name] for name in spoken if name in env}):
        return False
    stop(installation)
    installation.temporary.mkdir(mode=0o700, exist_ok=True)
    argv = [sys.executable, "-m", "prefect", "worker", "start", "--pool", POOL]
    argv += ["--type", "process", "--name", f"torpor-{socket.gethostname()}"]
    argv += ["--no-create-pool-if-not-found", "--install-policy", "never"]
    process = launch(installation, "worker", argv, env)
    log = installation.log("worker")
    deadline = time.monotonic() + READY_S
    while _STARTED not in log.read_bytes():
        if not is_alive(process) or time.monotonic() > deadline:
            stop(installation)
            raise TorporError(
                f"the worker for {server.api_url} did not start within {READY_S:.0f} s; the last "
                f"of {log}:\n{last_words(log)}"
            )
        time.sleep(_POLL_S)
    return True


def stop(installation: Installation) -> bool:
    """End the worker and its flow runs; False if none ran."""
    return end(installation, "worker", polite_s=STOP_S) > 0
