"""Processes of an installation that an earlier version of torpor started: before there was one
parent, they outlived whatever had started them. Ended once, by the first ``up`` or ``down`` of this
version; without such installations, this file can go."""

from __future__ import annotations

import contextlib
from functools import partial

import psutil

from deployments import server, worker
from deployments.installation import Installation
from deployments.processes import flow_runs, running
from deployments.server import Server
from torpor.control.own_server import API_URL, api_url, recorded_port
from torpor.control.processes import end_processes
from torpor.control.supervision import LOCK, living_parent


def served_by_earlier(installation: Installation) -> Server | None:
    """The server that an earlier version's processes serve; None where there are none."""
    if living_parent(installation.folder) is not None:
        return None
    found = _processes(installation, LOCK, server.ROLE, *worker.ROLES)
    if not found:
        return None
    own = api_url(recorded_port(installation.folder))
    try:
        used = found[0].environ().get(API_URL, own)
    except psutil.Error:  # it has ended meanwhile
        used = own
    return Server(used, used == own, installation.login() if used == own else "")


def end_earlier(installation: Installation) -> None:
    """End them, and no flow run: a worker that is asked to end would end its own."""
    if served_by_earlier(installation) is None:
        return
    for role, polite_s in ((LOCK, 10.0), ("register", 5.0), (server.ROLE, server.STOP_S)):
        end_processes(partial(_processes, installation, role), polite_s=polite_s)
    for process in _processes(installation, *worker.ROLES):
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    end_processes(partial(_processes, installation, *worker.ROLES), polite_s=5.0)  # or they die yet


def _processes(installation: Installation, *roles: str) -> list[psutil.Process]:
    """Those of the roles themselves, the first role's first."""
    runs = {*flow_runs(installation, *roles)}
    return [one for role in roles for one in running(installation, role) if one not in runs]
