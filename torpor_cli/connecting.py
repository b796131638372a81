"""Commands that have this host's command line talk to a Prefect server elsewhere, and that undo it.

Only the server's address and login are kept, in the state folder, where only this user can read
them. Blocks, schedules and workers stay where the server is.
"""

from __future__ import annotations

import getpass
import json
import os
import sys
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import urlsplit

from deployments.installation import code_version, write_whole
from deployments.terminal import Waiting, say
from torpor.control.own_server import (
    API_URL,
    CONNECTED_FOLDER,
    CONNECTION_FILE,
    LOGIN_VARIABLE,
    PROFILE,
    USUAL_PORTS,
    choose_server,
    connection,
    is_this_host,
    own_server,
    plain_address,
    recorded_port,
    state_folder,
)
from torpor.control.providers.removal import remove_tree
from torpor.control.supervision import living
from torpor.shared.errors import InvalidInput, TorporError
from torpor.shared.values import IdleChoice
from torpor_cli.server import CERTIFICATES, UNAUTHORIZED, ask, connected

if TYPE_CHECKING:
    import httpx

_OURS: Final = "hibernate/hibernate"
"""A deployment that exists on every server on which `torpor up` ran."""
_WATCH: Final = "watch/watch"
_HERE: Final = 14200
"""The port of this host in examples of `ssh -L`: 4200 is already the usual port of `torpor up`."""


def connect(address: str, *, idle: IdleChoice | None = None) -> None:
    """Make every command on this host use the Prefect server of a torpor on another host.

    torpor connect https://torpor.example.org

    It asks for the server's login, the whole line `user:password`, or reads it from
    PREFECT_API_AUTH_STRING where PREFECT_API_URL is this address; a login is never an option. It
    checks that the server answers, takes the login, and is of a version that this one can talk to.
    `torpor disconnect` goes back.

    Args:
        address: The server's address, as the browser has it.
        idle: What becomes of idle machines there: watch hibernates them, reports them, or is off.
    """
    api_url, folder = _api_url(address), state_folder()
    _see_that_it_is_elsewhere(api_url, folder)
    before = connection(folder, needed=False)  # a damaged connection file is replaced
    with Waiting(f"asking {api_url}"):
        asks = _asks_for_login(api_url)
    login = _login(api_url) if asks else ""
    with Waiting(f"asking {api_url}"):
        prefect = _version(api_url, login)
        there, here = _version_there(api_url, login), code_version()
        watched = idle is not None or _is_watched(api_url, login)
    kept = {"api_url": api_url, "login": login}
    write_whole(folder / CONNECTION_FILE, f"{json.dumps(kept)}\n")
    say(f"connected   {api_url}, Prefect {prefect}")
    if not asks:
        say("            it asks for no login: whoever reaches it can use every key in its blocks")
    say(f"            {folder / CONNECTION_FILE} has its address and login, for you alone")
    if before is not None and before.api_url != api_url:
        say(f"            not {before.api_url}, as before")
    if (own := own_server(folder)) is not None:
        say(f"            not {own.api_url}, this host's own: its schedules go on where it runs")
    if (choice := choose_server()) is not None and choice.taken.source != "connection":
        named = f"{choice.taken.named_by} names {choice.taken.api_url}, which comes first"
        say(f"torpor: warning: {named}: unset that variable", sys.stderr)
    if there != here:
        say(
            f"torpor: warning: torpor is {there} at {api_url} and {here} here, and a newer one may "
            "keep what an older one does not read: install the same version here and there",
            sys.stderr,
        )
    if idle is not None:
        _choose(idle)
    elif not watched:
        say(
            f"torpor: warning: watch is off at {api_url}, so nobody looks after machines: an idle "
            "one costs money, budgets stop nothing, and no job continues by itself. `torpor "
            f"connect {address} --idle hibernate`, or report, switches it on",
            sys.stderr,
        )
    say("next        torpor status")
    say("back        torpor disconnect")


def disconnect() -> None:
    """Undo `torpor connect`: commands use this host's own server again, where it has one."""
    folder = state_folder()
    file = folder / CONNECTION_FILE
    with suppress(OSError):  # the file of a `connect` that was killed, which holds the login
        file.with_name(f"{file.name}.new").unlink()
    if not file.exists():
        raise InvalidInput(f"this host is not connected: there is no {file}")
    try:
        remove_tree(folder / CONNECTED_FOLDER)
        file.unlink()
    except OSError as error:
        where = error.filename or folder
        raise TorporError(f"{where} cannot be deleted: {error.strerror}") from None
    own = own_server(folder)
    now = f"commands use {own.api_url}, this host's own" if own else "no server is known here now"
    say(f"disconnected: {now}. Nothing has changed on the server")


def _api_url(address: str) -> str:
    """The address of the API of the server at this address. InvalidInput where the login would be
    seen on the way, or is part of the address."""
    try:
        parts = urlsplit(address)
        host, port = parts.hostname, parts.port
    except ValueError as error:
        raise InvalidInput(f"the address cannot be read: {error}") from None
    if parts.username is not None or parts.password is not None:
        raise InvalidInput(
            "the address has a login in it, which every process of this host can read, and your "
            "shell's history: leave it out; torpor asks for it. Change that password"
        )
    if parts.scheme not in ("http", "https") or not host or parts.query or parts.fragment:
        raise InvalidInput(
            f"{address} is no address of a server: write it as https://torpor.example.org, or with "
            "a port, as https://torpor.example.org:8443"
        )
    if parts.scheme == "http" and not is_this_host(host):
        raise InvalidInput(
            f"{address} is not encrypted: the login, and the keys that blocks hold, could be read "
            "on the way. Put HTTPS in front of the server (docs/guide/where-it-runs.md), or use "
            f"`ssh -N -L {_HERE}:127.0.0.1:{port or 4200} {host}` and connect to "
            f"http://127.0.0.1:{_HERE}"
        )
    path = parts.path.rstrip("/")
    return plain_address(f"{parts.scheme}://{parts.netloc}{path.removesuffix('/api')}/api")


def _see_that_it_is_elsewhere(api_url: str, folder: Path) -> None:
    """InvalidInput for the address of this host's own server: where `ssh -L` listens at that port,
    one address would be two servers, and each would get the other one's password. InvalidInput too
    for the server that this host's workers serve: their runs use this host's store and machines."""
    parts = urlsplit(api_url)
    port = parts.port or USUAL_PORTS[parts.scheme]
    if port == recorded_port(folder) and is_this_host(parts.hostname or ""):
        other = _HERE if port != _HERE else _HERE + 1
        raise InvalidInput(
            f"{api_url} is the address of this host's own server, which commands use without "
            "`torpor connect`. For a server elsewhere, have `ssh` listen at another port: `ssh -N "
            f"-L {other}:127.0.0.1:4200 you@vps`, then `torpor connect http://127.0.0.1:{other}`"
        )
    there = living(folder)
    if there is not None and there.api_url == api_url:
        raise InvalidInput(
            f"the workers of this host serve {api_url}: use it without `torpor connect`, by "
            f"{API_URL}={api_url}"
        )


def _login(api_url: str) -> str:
    """From the environment or the terminal, never from an argument. The environment's login stays
    here unless the environment names its server too: it may be another one's."""
    of_it = plain_address(os.environ.get(API_URL, "")) == api_url
    login = os.environ.get(LOGIN_VARIABLE, "").strip() if of_it else ""
    if not login:
        if not sys.stdin.isatty():
            raise InvalidInput(
                f"{api_url} asks for a login, and nobody is at the terminal: set {API_URL} to that "
                f"address, without which {LOGIN_VARIABLE} may be the login of another server, and "
                f"{LOGIN_VARIABLE} to the line user:password"
            )
        login = getpass.getpass(f"Login of {api_url}, as user:password: ").strip()
    user, colon, password = login.partition(":")
    if not (user and colon and password):
        raise InvalidInput(
            "a login is the whole line user:password. Where `torpor up` runs, it is in "
            "~/.local/state/torpor/login"
        )
    return login


def _asks_for_login(api_url: str) -> bool:
    return _get(api_url, "admin/version", "").status_code in UNAUTHORIZED


def _version(api_url: str, login: str) -> str:
    """The version of Prefect on the server. InvalidInput where it refuses the login, is no Prefect
    server, or of a version that this one does not talk to."""
    answer = _get(api_url, "admin/version", login)
    if answer.status_code in UNAUTHORIZED:
        raise InvalidInput(
            f"{api_url} refuses the login ({answer.status_code}): it is the whole line "
            "user:password. Where `torpor up` runs, it is in ~/.local/state/torpor/login. Nothing "
            "was changed here"
        )
    if answer.is_redirect:
        raise InvalidInput(
            f"{api_url} leads to {answer.headers.get('location', 'another address')}: connect to "
            "that server by its own address. Nothing was changed here"
        )
    try:
        found = answer.json() if answer.is_success else None
    except ValueError:
        found = None
    if not isinstance(found, str):
        raise InvalidInput(
            f"{api_url} answers, and not as a Prefect server does ({answer.status_code} to "
            "admin/version): check the address and the path, and what stands in front of the "
            "server. Nothing was changed here"
        )
    mine = version("prefect")
    if found.split(".")[:2] != mine.split(".")[:2]:
        raise InvalidInput(
            f"{api_url} runs Prefect {found}, and torpor here {mine}: install the same version of "
            "torpor here and there (`torpor --version`). Nothing was changed here"
        )
    return found


def _version_there(api_url: str, login: str) -> str:
    """The version of torpor that made the server's deployments. InvalidInput where none has one."""
    answer = _get(api_url, f"deployments/name/{_OURS}", login)
    if not answer.is_success:
        raise InvalidInput(
            f"{api_url} is a Prefect server without torpor's deployments ({answer.status_code}): "
            "run `torpor up` on the host that is to run them, with PREFECT_API_URL where the "
            "server is not its own. Nothing was changed here"
        )
    return str(_fields(answer).get("version") or "of an unknown version")


def _is_watched(api_url: str, login: str) -> bool:
    """Whether the schedule of watch is on at the server."""
    answer = _get(api_url, f"deployments/name/{_WATCH}", login)
    watch = _fields(answer) if answer.is_success else {}
    schedules = watch.get("schedules") or []
    return not watch.get("paused", True) and any(one.get("active") for one in schedules)


def _fields(answer: httpx.Response) -> dict[str, Any]:
    """The fields of a deployment as the server has it. InvalidInput where the answer is no
    deployment."""
    try:
        found = answer.json()
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise InvalidInput(
            f"{answer.url} does not answer as a Prefect server does: check the address and the "
            "path, and what stands in front of the server. Nothing was changed here"
        )
    return found


def _choose(idle: IdleChoice) -> None:
    """Switch the schedule of watch at this server, whatever other server the variables of this
    shell name."""
    for variable in (API_URL, PROFILE):
        os.environ.pop(variable, None)
    with connected():
        from deployments import idle as choice
        from deployments.installation import Installation

        choice.choose(Installation.here(), idle)
        say(f"idle        {choice.SAYS[idle]}")


def _get(api_url: str, path: str, login: str) -> httpx.Response:
    next_step = (
        "check the address, that the server runs, and that a firewall lets this host in. Nothing "
        "was changed here"
    )
    trusted = os.environ.get(CERTIFICATES) or os.environ.get("SSL_CERT_FILE")
    return ask(api_url, path, login, next_step, trusted=trusted)
