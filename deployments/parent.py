"""Start the supervisor of an installation, ask it for something, wait for it, and end it: what
``up`` and ``down`` do with the one parent of server, store and workers."""

from __future__ import annotations

import contextlib
import hashlib
import math
import os
import signal
import sys
import time
from importlib import metadata
from pathlib import Path
from typing import Final

from deployments import server, worker
from deployments.installation import CHECKOUT, Installation
from deployments.processes import begin, flow_runs, printed_since
from deployments.server import Server
from torpor.control.own_server import API_URL
from torpor.control.processes import end_processes, identify, is_alive
from torpor.control.supervision import (
    LOCK,
    children_of,
    last_parent,
    living_parent,
    read_supervision,
)
from torpor.shared.errors import TorporError

WORK: Final = signal.SIGUSR1
LEAVE: Final = signal.SIGUSR2
GONE_S: Final = 90.0
"""How long the supervisor may take to end all: its workers get 20 s, its server 15 s."""
SILENT_S: Final = 60.0
"""How long a server that runs may say nothing to `make up`: a busy or suspended host."""
LOOK_S: Final = 1.0
_POLL_S: Final = 0.2
_USERS: Final = (server.LOGIN_VARIABLE, "PREFECT_API_KEY")
"""What of the environment says who we are at a server of the user's own."""


def made_of(installation: Installation, used: Server) -> str:
    """A digest of what the children are started with: where it changes, after an upgrade or with
    another login, they must be started again."""
    words = [used.api_url, used.login, str(CHECKOUT), sys.prefix, metadata.version("prefect")]
    words += [os.environ.get(name, "") for name in _USERS if not used.own]
    if used.own:
        words += [f"{key}={it}" for key, it in server.demanded(installation, used).items()]
    words += [file.read_text() for file in sorted(Path(__file__).parent.glob("*.py"))]
    return hashlib.sha256("\0".join(words).encode()).hexdigest()


def start(installation: Installation, used: Server) -> bool:
    """See that a supervisor serves ``used``: one that started its children as they are to be now,
    and whose server answers. True if it was started, in place of another. Flow runs go on."""
    parent = living_parent(installation.folder)
    same = parent is not None and parent.made_of == made_of(installation, used)
    if same and (not used.own or _answers_in_time(installation, used)):
        return False
    leave(installation)
    env = server.environment(installation, used)
    argv = [sys.executable, "-m", "deployments.supervisor"]
    if used.own:
        argv += ["--port", used.ui_url.rpartition(":")[2]]
        del env[API_URL]  # or it would be a server of the user's
    log = installation.log(LOCK)
    said_bytes = log.stat().st_size if log.exists() else 0
    process = identify(begin(installation, LOCK, argv, env, apart=True).pid)
    deadline = time.monotonic() + server.READY_S + GONE_S
    while not _began(installation, used):
        if process is None or not is_alive(process) or time.monotonic() > deadline:
            leave(installation)
            said = printed_since(said_bytes, log).decode(errors="replace").strip()
            raise TorporError(f"the supervisor has ended; {log} says:\n{said}")
        time.sleep(_POLL_S)
    return True


def _began(installation: Installation, used: Server) -> bool:
    there = living_parent(installation.folder)
    if there is None or there.api_url != used.api_url:
        return False
    return not used.own or server.ROLE in children_of(installation.folder)


def _answers_in_time(installation: Installation, used: Server) -> bool:
    """Whether the server answers: one that is halted, or starts, gets time."""
    began = time.monotonic()
    while living_parent(installation.folder) is not None:
        if server.answers(used):
            return True
        seen = read_supervision(installation.folder)
        runs = server.ROLE in children_of(installation.folder)
        if seen is not None and server.ROLE in seen.troubles:
            return False  # the supervisor would wait before its next try
        if time.monotonic() > began + (SILENT_S if runs else server.READY_S):
            return False
        time.sleep(_POLL_S)
    return False


def work(installation: Installation) -> None:
    """Let the supervisor start the workers, and wait for them. TorporError where one does not
    start."""
    seen = read_supervision(installation.folder)
    before = seen.troubles if seen else {}
    _ask(installation.folder, WORK)
    while not children_of(installation.folder).keys() >= {*worker.ROLES}:
        seen = read_supervision(installation.folder)
        if living_parent(installation.folder) is None:
            raise TorporError(f"the supervisor has ended: see {installation.log(LOCK)}")
        for role in worker.ROLES:
            why = seen.troubles.get(role) if seen else None
            if why and why != before.get(role):
                raise TorporError(f"the {role} {'; '.join(why)}")
        time.sleep(_POLL_S)


def works(installation: Installation) -> bool:
    """Whether a worker runs; flow runs outlive a killed one."""
    return not children_of(installation.folder).keys().isdisjoint(worker.ROLES)


def lives(installation: Installation) -> bool:
    return living_parent(installation.folder) is not None


def wait(installation: Installation) -> bool:
    """Wait until no supervisor lives; whether it was ended on purpose. `make up` replaces it while
    it holds the installation's lock."""
    while True:
        while lives(installation):
            time.sleep(LOOK_S)
        with installation.locked(wait_s=math.inf):
            if not lives(installation):
                return last_parent(installation.folder) is None


def leave(installation: Installation) -> None:
    """End the supervisor and its children, but no flow run."""
    _ask_to_end(installation.folder, LEAVE)


def end_on_purpose(installation: Installation) -> list[str]:
    """End the supervisor, its children and all flow runs, so that nothing starts them again until
    `make up`; returns the roles of those that ran."""
    ran = [*children_of(installation.folder)]
    _ask_to_end(installation.folder, signal.SIGTERM)
    end_processes(lambda: flow_runs(installation, *worker.ROLES), polite_s=worker.STOP_S)
    with contextlib.suppress(FileNotFoundError):
        os.truncate(installation.folder / LOCK, 0)
    return ran


def _ask_to_end(folder: Path, how: signal.Signals) -> None:
    parent = living_parent(folder)
    if parent is None:
        return
    process, deadline = identify(parent.pid), time.monotonic() + GONE_S
    _ask(folder, how)
    while process is not None and is_alive(process):
        if time.monotonic() > deadline:
            _ask(folder, signal.SIGKILL)  # it is halted; its children end with it
        time.sleep(_POLL_S)


def _ask(folder: Path, what: signal.Signals) -> None:
    """Send the signal to the supervisor that lives, and to no process that has its pid after it."""
    parent = living_parent(folder)
    if parent is None:
        return
    with contextlib.suppress(ProcessLookupError):
        process = os.pidfd_open(parent.pid)
        try:
            if living_parent(folder) == parent:
                signal.pidfd_send_signal(process, what)
        finally:
            os.close(process)
