"""The Prefect server of an installation: on loopback, with a login and a home of its own. It is a
child of the supervisor (deployments/supervisor.py)."""

from __future__ import annotations

import base64
import http.client
import os
import subprocess
import sys
import urllib.error
import urllib.request
from dataclasses import dataclass, field
from typing import Final

from deployments import block_key, database
from deployments.installation import CHECKOUT, Installation, cache_folder
from deployments.processes import begin
from torpor.control.own_server import (
    FOLDER_VARIABLE,
    HOST,
    LOGIN_VARIABLE,
    Candidate,
    ServerChoice,
    api_url,
    choice_of,
    choose_server,
    connection,
    recorded_port,
    without_proxy,
)
from torpor.control.ports import free_ports, holder, is_free
from torpor.control.supervision import living
from torpor.shared.errors import InvalidInput

ROLE: Final = "server"
USUAL_PORT: Final = 4200
READY_S: Final = 300.0
"""Seconds that a server may take until it answers: 6 to 19 s were measured, and 60 s on a small
busy machine."""
STOP_S: Final = 15.0
_IN_USE: Final = (b"address already in use", b"is already in use")
"""Output of uvicorn and Prefect when the port is taken. uvicorn may live on for minutes after
that."""
_DEMANDED: Final = "PREFECT_SERVER_API_AUTH_STRING"
SETTINGS: Final = {
    # Leases of concurrency slots that are kept in memory are lost with the server, and the slots
    # with them: a deployment that allows one run at a time would never run again.
    "PREFECT_SERVER_CONCURRENCY_LEASE_STORAGE": (
        "prefect.server.concurrency.lease_storage.filesystem"
    ),
    # A run of `watch` is 390 KB of events and 47 KB of everything else. Prefect keeps the latter
    # for ever, the former for a week: 2.2 GB with the schedule that is offered.
    "PREFECT_SERVER_SERVICES_DB_VACUUM_ENABLED": "events,flow_runs",
    "PREFECT_SERVER_SERVICES_DB_VACUUM_RETENTION_PERIOD": str(14 * 86_400),
    "PREFECT_SERVER_EVENTS_RETENTION_PERIOD": "P1D",
}
"""Settings of torpor's own server and of the chart's, beyond Prefect's defaults."""
LEASES: Final = {"PREFECT_SERVER_CONCURRENCY_LEASE_STORAGE": "deployments.leases"}
"""Settings of torpor's own server alone: the chart's server has no packages of torpor."""


@dataclass(frozen=True)
class Server:
    """Where a Prefect server answers. ``own``: it belongs to the installation, not to the user, and
    asks for ``login``, which is `user:password`. ``named_by``: what names the user's server."""

    api_url: str
    own: bool
    login: str = field(default="", repr=False)
    named_by: str = field(default="PREFECT_API_URL", compare=False)

    @property
    def ui_url(self) -> str:
        return self.api_url.removesuffix("/api")

    @property
    def port(self) -> int:
        """The port of torpor's own server."""
        return int(self.ui_url.rpartition(":")[2])


def server_of(installation: Installation, port: int | None = None) -> Server:
    """The server to use: the one that the environment names, otherwise our own."""
    if given := users_own(installation):
        if port is not None:
            raise InvalidInput(
                f"{given.named_by} says that {given.api_url} is used, so no server is started on "
                f"port {port}: leave out the port, or unset {_variable(given)}"
            )
        return Server(given.api_url, own=False, named_by=given.named_by)
    chosen = port or recorded_port(installation.folder) or _choose_port()
    return Server(api_url(chosen), True, installation.login())


def choice_for(installation: Installation, used: Server) -> ServerChoice | None:
    """The choice of ``used``, in words where another server could have been meant: before the first
    start, Prefect's profile may name one."""
    choice = choose_server(installation.folder, connected=False)
    if choice is None or not used.own:
        return choice
    own = Candidate(used.api_url, "installation", f"of {installation.folder}")
    return choice_of([own, *(one for one in (choice.taken, *choice.others) if not _is_own(one))])


def see_that_none_is_connected(installation: Installation) -> None:
    """InvalidInput where `torpor connect` chose a server elsewhere: what would be started here is
    not what commands use then."""
    if elsewhere := connection(installation.folder):
        raise InvalidInput(
            f"this host is connected to {elsewhere.api_url}, and every command uses that server: "
            "`torpor disconnect` first, to start one here"
        )


def users_own(installation: Installation) -> Candidate | None:
    """The server that the environment names, unless that is our own."""
    choice = choose_server(installation.folder, connected=False)
    if choice is None or choice.taken.source != "environment":
        return None
    # The port is known before the login where `make up` was killed at its first start.
    ours = choice.taken.api_url == api_url(recorded_port(installation.folder))
    return None if ours else choice.taken


def _is_own(one: Candidate) -> bool:
    return one.source == "installation"


def _variable(given: Candidate) -> str:
    return given.named_by.partition("=")[0]


def environment(installation: Installation, server: Server) -> dict[str, str]:
    """The environment of the server and of processes that talk to it."""
    # torpor's own server gets none of the user's Prefect settings: neither keys nor a database.
    env = {k: v for k, v in os.environ.items() if not (server.own and k.startswith("PREFECT_"))}
    # Flow runs import blocks, tasks and torpor from this checkout, whatever is installed.
    env["PYTHONPATH"] = os.pathsep.join(
        part for part in (str(CHECKOUT), os.environ.get("PYTHONPATH")) if part
    )
    env["PREFECT_API_URL"] = server.api_url
    env[FOLDER_VARIABLE] = str(installation.folder)
    if server.own:
        env |= {
            LOGIN_VARIABLE: server.login,
            "XDG_CACHE_HOME": str(cache_folder(installation.folder / "cache")),
            "PREFECT_HOME": str(installation.prefect_home),
            "PREFECT_PROFILES_PATH": str(installation.prefect_home / "profiles.toml"),
            "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
            "DO_NOT_TRACK": "1",
            # Prefect's default is inside Prefect's package, which may belong to another account.
            "PREFECT_UI_STATIC_DIRECTORY": str(installation.prefect_home / "ui"),
            "PREFECT_SERVER_UI_API_URL": server.api_url,
            # Prefect's default is any origin, so that a page in the user's browser could read the
            # blocks.
            "PREFECT_SERVER_CORS_ALLOWED_ORIGINS": server.ui_url,
            **without_proxy(HOST),
        }
    return env


def check(installation: Installation, server: Server) -> None:
    """TorporError where begin_server() could not start the server. Ends nothing."""
    if not server.own:
        if not answers(server):
            raise InvalidInput(
                f"{server.named_by} names {server.api_url} and no Prefect server answers there: "
                f"start it, or unset {server.named_by.partition('=')[0]} to let torpor start one"
            )
        return
    postgres = database.chosen(installation)
    if living(installation.folder) is None:
        _see_that_the_port_is_free(server)
    block_key.block_key(installation)
    if postgres:
        database.check(installation, postgres)


def begin_server(installation: Installation, server: Server) -> subprocess.Popen[bytes]:
    """Start our own server as a child of this process. InvalidInput where its port is taken."""
    _see_that_the_port_is_free(server)
    installation.prefect_home.mkdir(mode=0o700, parents=True, exist_ok=True)
    argv = [sys.executable, "-m", "deployments.prefect_server", "server", "start", "--host", HOST]
    argv += ["--port", str(server.port)]
    postgres = database.chosen(installation)
    env = environment(installation, server) | {
        _DEMANDED: server.login,
        block_key.VARIABLE: block_key.block_key(installation),
        **SETTINGS,
        **LEASES,
        **(database.settings(postgres) if postgres else {}),
    }
    return begin(installation, ROLE, argv, env)


def serves(server: Server, said: bytes) -> bool:
    """Whether the server that has printed ``said`` answers. InvalidInput where another program has
    taken its port first."""
    if any(word in said for word in _IN_USE):
        raise InvalidInput(_taken(server.port))
    return answers(server)


def _see_that_the_port_is_free(server: Server) -> None:
    if not is_free(server.port):
        raise InvalidInput(_taken(server.port))


def answers(server: Server) -> bool:
    """Whether a healthy Prefect server answers; our own must also accept our login."""
    # A proxy that the environment names is for the user's server, never for loopback.
    proxies = urllib.request.ProxyHandler({} if server.own else None)
    opener = urllib.request.build_opener(proxies)
    asked = "health"  # asking for the health needs no login
    if server.own:
        asked = "admin/version"
        login = base64.b64encode(server.login.encode()).decode()
        opener.addheaders = [("Authorization", f"Basic {login}")]
    try:
        with opener.open(f"{server.api_url}/{asked}", timeout=5) as got:
            return bool(got.status == 200)
    except (OSError, urllib.error.URLError, http.client.HTTPException):
        return False


def _choose_port() -> int:
    return USUAL_PORT if is_free(USUAL_PORT) else free_ports(1)[0]


def _taken(port: int) -> str:
    """The error that a port is taken: by whom, and what to do."""
    return (
        f"port {port} on {HOST} is taken by {holder(port)}: end it, or choose another port, such "
        f"as `torpor up --port {free_ports(1)[0]}`"
    )
