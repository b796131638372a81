"""Start the supervisor of an installation, and end it: what ``up`` and ``down`` do with the one
parent of server, store and workers. Nobody changes one that runs."""

from __future__ import annotations

import hashlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterable
from contextlib import suppress
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Final, NamedTuple

from deployments import processes, server, unit, worker
from deployments.installation import CHECKOUT, Installation, code_version
from deployments.processes import begin, flow_runs, last_words, running
from deployments.server import Server
from deployments.terminal import Waiting
from torpor.control.own_server import API_URL, LOGIN_VARIABLE
from torpor.control.processes import end_processes
from torpor.control.supervision import (
    LOCK,
    STORE,
    Supervision,
    children_of,
    is_held,
    living,
    trouble_of,
)
from torpor.shared.errors import InvalidInput, TorporError

DOWN: Final = "down"
"""The name of the lock that `down` holds while it asks the supervisor to end. It tells the
supervisor to end the flow runs, too, and everybody else to start no supervisor."""
GONE_S: Final = 90.0
"""Seconds that the supervisor may take to end everything: its workers get 20 s, its server 15 s."""
RUNS: Final = "runs"
"""The role of flow runs in the result of end()."""
KILLED_S: Final = 10.0
RESTART_S: Final = unit.MOST_PAUSE_S + 15.0
"""Seconds within which systemd starts a supervisor again."""
_POLL_S: Final = 0.2
_USERS: Final = (LOGIN_VARIABLE, "PREFECT_API_KEY")
"""Environment variables with the login at a server of the user's own."""


class Ended(NamedTuple):
    """The roles of the processes that end() has ended. ``note``: what a person has to do."""

    roles: list[str]
    note: str = ""


@cache
def version_here() -> str:
    """The version of this code: a supervisor that began before a `git pull` has another one."""
    return f"{code_version()} with Prefect {metadata.version('prefect')} in {CHECKOUT}"


def described(used: Server) -> Supervision:
    """The record of a supervisor that this process would be."""
    words = [used.login] if used.own else [os.environ.get(name, "") for name in _USERS]
    login = hashlib.sha256("\0".join(words).encode()).hexdigest()
    return Supervision(os.getpid(), used.api_url, used.own, version_here(), login)


def see_that_nothing_else_runs(installation: Installation, used: Server) -> None:
    """InvalidInput where the installation is up with another server, port, login or version: its
    flow runs report there."""
    there, wanted = living(installation.folder), described(used)
    if there is None:
        if running(installation, LOCK, server.ROLE):
            raise InvalidInput(
                f"torpor is up in {installation.folder}, by an earlier version or by an `up` that "
                "was killed: run `torpor down` first, then `torpor up`"
            )
        return
    if there.api_url != wanted.api_url:
        other = ""
    elif there.version != wanted.version:
        other = f" in version {there.version}, and this is {wanted.version}"
    elif there.login != wanted.login:
        other = " with another login"
    else:
        return
    at = there.api_url.removesuffix("/api")
    raise InvalidInput(f"torpor is up at {at}{other}: run `torpor down` first, then `torpor up`")


def start(installation: Installation, used: Server) -> subprocess.Popen[bytes] | None:
    """Wait for a supervisor whose server answers, and start one where none lives. Returns the
    process of a supervisor that this call started, and ends that process again if its server does
    not answer. The caller need not keep a returned process: it goes on by itself."""
    log = installation.log(LOCK)
    process: subprocess.Popen[bytes] | None = None
    if not is_held(installation.folder / LOCK):
        argv, env = [sys.executable, "-m", unit.SUPERVISOR], server.environment(installation, used)
        if used.own:
            argv += ["--port", str(used.port)]
            del env[API_URL]  # with it, the supervisor would use a server of the user's
        process = begin(installation, LOCK, argv, env, apart=True)
    deadline = time.monotonic() + server.READY_S
    try:
        while not _serves(installation, used, process):
            if process is None:
                see_that_it_lives(installation)
            elif process.poll() == unit.REFUSED and is_held(installation.folder / LOCK):
                process = None  # another process was faster, such as systemd's at boot
            elif process.poll() is not None:
                why = f"the supervisor has ended; the last of {log}:\n{last_words(log)}"
                raise TorporError(why)  # noqa: TRY301
            if time.monotonic() > deadline:
                why = trouble_of(installation.folder, server.ROLE) or f"see {log}"
                why = f"{used.api_url} does not answer after {server.READY_S:.0f} s: {why}"
                raise TorporError(why)  # noqa: TRY301 - both end what was started
            time.sleep(_POLL_S)
    except BaseException:
        stop(process)
        raise
    if process is not None:
        process.returncode = 0  # the process goes on; this silences Popen's warning
    return process


def _serves(
    installation: Installation, used: Server, process: subprocess.Popen[bytes] | None
) -> bool:
    """Whether a supervisor lives whose server answers. ``process``: the one that this process has
    started, because the record may still be of an earlier one. TorporError where our server cannot
    start."""
    there = living(installation.folder)
    if there is None or (process is not None and there.pid != process.pid):
        return False
    if process is None:
        see_that_nothing_else_runs(installation, used)
    elif why := trouble_of(installation.folder, server.ROLE):
        raise TorporError(f"the {server.ROLE} {why}")
    return not used.own or (server.ROLE in there.running and server.answers(used))


def stop(process: subprocess.Popen[bytes] | None) -> None:
    """End the supervisor that this process has started, with its children, and no flow run."""
    if process is None:
        return
    process.returncode = None
    process.terminate()
    try:
        process.wait(GONE_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def see_that_it_lives(installation: Installation) -> None:
    """TorporError where no supervisor lives."""
    if not is_held(installation.folder / LOCK):
        raise TorporError(f"the supervisor has ended: see {installation.log(LOCK)}")


def see_that_they_run(installation: Installation, roles: Iterable[str], ready_s: float) -> None:
    """Wait until these children of the supervisor do their work. TorporError says why one does
    not."""
    folder, deadline = installation.folder, time.monotonic() + ready_s
    while missing := {*roles} - children_of(folder).keys():
        see_that_it_lives(installation)
        if time.monotonic() > deadline:
            said = "; ".join(filter(None, (trouble_of(folder, role) for role in missing)))
            raise TorporError(
                f"{' and '.join(sorted(missing))} did not begin within {ready_s:.0f} s: "
                f"{said or f'see the logs in {folder}'}"
            )
        time.sleep(_POLL_S)


def end(installation: Installation) -> Ended:
    """End the supervisor, its children and all flow runs. None starts again by itself before the
    host does: systemd stops waiting to start a supervisor that was killed or could not begin."""
    ran = [*children_of(installation.folder)]
    ran += [RUNS for _ in flow_runs(installation, *worker.ROLES)[:1]]
    with installation.locked(DOWN, wait_s=KILLED_S):
        try:
            if living(installation.folder) is None:
                ran += _end_earlier(installation)
            _end_supervisor(installation)
            # runs of a supervisor that was killed, or runs that began meanwhile
            _end_flow_runs(installation)
        finally:
            why = unit.stop(installation)
        note = ""
        if why:
            with Waiting(f"waiting {RESTART_S:.0f} s: what systemd starts meanwhile is refused"):
                time.sleep(RESTART_S)
            note = (
                f"systemd could not be asked whether it starts torpor again ({why}): run "
                f"`{unit.stop_command()}` in a session of your own"
            )
    return Ended(ran, note)


def _end_earlier(installation: Installation) -> list[str]:
    """End processes that an earlier version has started, which outlive their supervisor and are
    found by their mark; or a supervisor that is just beginning. The server is the last one, as flow
    runs report to it. Returns the roles of those that ran."""
    ran = []
    for role in (LOCK, *worker.ROLES, "register", STORE, server.ROLE):
        ran += [role for _ in running(installation, role)[:1]]
        processes.end(installation, role, polite_s=worker.STOP_S)
    return ran


def _end_supervisor(installation: Installation) -> None:
    """Ask the supervisor to end, and kill one that does not react: its children end with it.
    TorporError where it cannot be asked."""
    folder, began = installation.folder, time.monotonic()
    asked = halted = False
    while is_held(folder / LOCK):
        seconds = time.monotonic() - began
        halted = asked and seconds > GONE_S
        if halted:
            _end_flow_runs(installation)  # while their server still lives, to which they report
        if halted or not asked:
            how = signal.SIGKILL if halted else signal.SIGTERM
            asked = _signal_supervisor(folder, how) or asked
        if seconds > KILLED_S + GONE_S * asked:
            raise TorporError(
                f"the supervisor that holds {folder / LOCK} does not end, or none of {folder} is a "
                "process of this host: end it on the host, or in the container, where it runs"
            )
        time.sleep(_POLL_S)


def _end_flow_runs(installation: Installation) -> None:
    end_processes(lambda: flow_runs(installation, *worker.ROLES), polite_s=worker.STOP_S)


def _signal_supervisor(folder: Path, what: signal.Signals) -> bool:
    """Send the signal to the supervisor that lives. False where the process in its record has not
    opened the supervisor's lock: it is just beginning, or is on another host."""
    there = living(folder)
    try:
        if there and _has_opened(there.pid, folder / LOCK):
            os.kill(there.pid, what)
            return True
    except OSError:  # the process has ended, or belongs to another account
        return False
    return False


def _has_opened(pid: int, file: Path) -> bool:
    """Whether the process has this very file open. Paths are not compared: in another mount
    namespace they may differ."""
    there = file.stat()
    for opened in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(FileNotFoundError):  # the file was closed just now
            if os.path.samestat(opened.stat(), there):
                return True
    return False
