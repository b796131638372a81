"""Which Prefect server is meant: the one that the environment names, the one that `torpor connect`
chose, this user's installation, or the one of Prefect's active profile. One function decides for
every command, every flow and every `ssh`, which runs it without site-packages
(torpor_cli/login_check.py)."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final, Literal, NamedTuple

FOLDER_VARIABLE: Final = "TORPOR_STATE"
"""Names the folder of the installation to everything that it starts."""
HOST: Final = "127.0.0.1"
PORT_FILE: Final = "server.port"
LOGIN_FILE: Final = "login"
CONNECTION_FILE: Final = "connection"
"""What `torpor connect` leaves in the folder: a server elsewhere, and its login."""
CONNECTED_FOLDER: Final = "connected"
"""Prefect's own files while the server of `torpor connect` is meant."""
API_URL: Final = "PREFECT_API_URL"
PROFILE: Final = "PREFECT_PROFILE"
LOGIN_VARIABLE: Final = "PREFECT_API_AUTH_STRING"
USUAL_PORTS: Final = {"http": 80, "https": 443}

_USERS_OWN: Final = {
    LOGIN_VARIABLE: "",
    "PREFECT_API_KEY": "",
    "PREFECT_CLIENT_CUSTOM_HEADERS": "{}",
    "PREFECT_API_TLS_INSECURE_SKIP_VERIFY": "false",
}
"""What the user's settings for other servers must not have at the one of `torpor connect`. Set, as
a variable alone counts more than a prefect.toml, a pyproject.toml or an .env of the folder."""

_announced: set[str] = set()


def state_folder() -> Path:
    """The folder of this user's installation: $TORPOR_STATE, otherwise torpor's folder in
    $XDG_STATE_HOME or ~/.local/state."""
    named = os.environ.get(FOLDER_VARIABLE)
    state = os.environ.get("XDG_STATE_HOME") or "~/.local/state"
    return Path(named or f"{state}/torpor").expanduser().resolve()


class OwnServer(NamedTuple):
    """The API's address, and its login as ``user:password``."""

    api_url: str
    login: str


class Candidate(NamedTuple):
    """A server that may be meant, and who names it. ``login``: of an installation and of a
    connection; Prefect's own settings hold the others."""

    api_url: str
    source: Literal["environment", "connection", "installation", "profile"]
    named_by: str
    login: str = ""


class ServerChoice(NamedTuple):
    """The server that is meant, and the others that could have been."""

    taken: Candidate
    others: tuple[Candidate, ...] = ()

    @property
    def words(self) -> str:
        """Which server was taken, and why; empty where no other could have been meant."""
        if not self.others:
            return ""
        others = " and ".join(f"{one.api_url} ({one.named_by})" for one in self.others)
        return (
            f"the Prefect server is {self.taken.api_url} ({self.taken.named_by}), and not "
            f"{others}: {_WHY[self.taken.source]}"
        )


_WHY: Final = {
    "environment": "the environment comes first",
    "connection": "`torpor connect` chose it, and `torpor disconnect` goes back",
    "installation": "this installation comes before Prefect's profile; PREFECT_API_URL comes first",
    "profile": "nothing else names one",
}


def api_url(port: int | None) -> str:
    """The address of the server's API at that port of this host."""
    return f"http://{HOST}:{port}/api"


def recorded_port(folder: Path) -> int | None:
    """The port of the installation's server; None before its first start."""
    try:
        return int((folder / PORT_FILE).read_text())
    except (OSError, ValueError):
        return None


def is_this_host(host: str) -> bool:
    """Whether an address of this host, such as localhost, 127.0.0.1 or ::1, is meant. No name is
    looked up."""
    import socket  # `ssh` waits for each import
    from ipaddress import IPv6Address, ip_address

    host = host.lower().rstrip(".")
    if host == "localhost" or host.endswith(".localhost"):
        return True
    try:
        address = ip_address(host)
    except ValueError:
        try:
            address = ip_address(socket.inet_aton(host))  # 127.1 is 127.0.0.1
        except OSError:
            return False
    if isinstance(address, IPv6Address):
        address = address.ipv4_mapped or address
    return address.is_loopback or address.is_unspecified


def without_proxy(host: str) -> dict[str, str]:
    """The variables with which this process reaches that host itself, whatever proxy its
    environment names. The small ones come first where both are set, and `*` stands alone."""
    names = ("no_proxy", "NO_PROXY")
    kept = {one.strip() for name in names for one in os.environ.get(name, "").split(",")} - {""}
    listed = "*" if "*" in kept else ",".join(sorted({host, *kept}))
    return dict.fromkeys(names, listed)


def own_server(folder: Path | None = None) -> OwnServer | None:
    """The server of this user's installation, running or not; None where there is none."""
    folder = folder or state_folder()
    port = recorded_port(folder)
    try:
        login = (folder / LOGIN_FILE).read_text().strip()
    except OSError:
        return None
    return OwnServer(api_url(port), login) if port and login else None


def connection(folder: Path | None = None, *, needed: bool = True) -> OwnServer | None:
    """The server elsewhere that `torpor connect` chose; None where it chose none. A damaged file is
    InvalidInput, as no other server is taken in its place, and none where it is not ``needed``."""
    file = (folder or state_folder()) / CONNECTION_FILE
    try:
        kept = json.loads(file.read_text())
        return OwnServer(str(kept["api_url"]), str(kept["login"]))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, LookupError, TypeError) as error:
        if not needed:
            return None
        from torpor.shared.errors import InvalidInput  # `ssh` waits for each import

        raise InvalidInput(
            f"{file}, which names the server of `torpor connect`, cannot be read ({error}): run "
            "`torpor disconnect`, and connect again"
        ) from None


def choose_server(
    folder: Path | None = None, *, set_in: str = "", connected: bool = True
) -> ServerChoice | None:
    """The server that is meant: the first that PREFECT_API_URL, PREFECT_PROFILE, `torpor connect`,
    this installation or Prefect's active profile names. None where none of them names one.
    ``set_in``: an address that Prefect's other settings hold, such as a prefect.toml; it comes
    after the installation. ``connected``: off for what starts this host's own server, which
    `torpor connect` does not concern."""
    folder = folder or state_folder()
    own, profile = own_server(folder), _profile()
    given = plain_address(os.environ.get(API_URL, ""))
    # A process whose environment names its server, such as a worker's, needs no such file.
    elsewhere = connection(folder, needed=not given) if connected else None
    candidates = []
    if given:
        candidates.append(Candidate(given, "environment", API_URL))
    if profile is not None and profile.source == "environment":
        candidates.append(profile)
    if elsewhere is not None:
        named_by = "of `torpor connect`"
        candidates.append(Candidate(elsewhere.api_url, "connection", named_by, elsewhere.login))
    if own is not None:
        candidates.append(Candidate(own.api_url, "installation", f"of {folder}", own.login))
    if set_in and not given and (profile is None or plain_address(set_in) != profile.api_url):
        candidates.append(Candidate(plain_address(set_in), "profile", "Prefect's settings"))
    if profile is not None and profile.source == "profile":
        candidates.append(profile)
    return choice_of(candidates)


def choice_of(candidates: Sequence[Candidate]) -> ServerChoice | None:
    """The first of them. Where that is an address of Prefect's settings, it is the installation or
    the server of `torpor connect` that has this address, with its login."""
    if not candidates:
        return None
    taken = first = candidates[0]
    if first.source != "connection":  # else another server would get the installation's password
        same = {one.source: one for one in candidates if one.api_url == first.api_url}
        taken = same.get("installation") or same.get("connection") or first
    return ServerChoice(taken, tuple(one for one in candidates if one.api_url != first.api_url))


def set_apart() -> None:
    """Have Prefect in this process, and in those that it starts, take nothing of its user's
    profiles and settings to the server of `torpor connect`: they hold keys of other servers."""
    home = state_folder() / CONNECTED_FOLDER
    os.environ.pop(PROFILE, None)
    os.environ["PREFECT_HOME"] = str(home)
    os.environ["PREFECT_PROFILES_PATH"] = str(home / "profiles.toml")  # there is none
    os.environ.update(_USERS_OWN)


def announce(choice: ServerChoice) -> None:
    """Say once which server was taken, where another could have been meant. Processes that an
    installation started say nothing: whoever started them has said it."""
    from torpor.control.processes import STARTED_BY  # which needs psutil

    if choice.words and choice.words not in _announced and STARTED_BY not in os.environ:
        _announced.add(choice.words)
        print(f"torpor: {choice.words}", file=sys.stderr, flush=True)


def _profile() -> Candidate | None:
    """What the profile that Prefect would use names, without importing Prefect."""
    file = Path(
        os.environ.get("PREFECT_PROFILES_PATH")
        or f"{os.environ.get('PREFECT_HOME') or '~/.prefect'}/profiles.toml"
    ).expanduser()
    if not file.exists():
        return None
    import tomllib  # 10 ms, and `ssh` waits for it

    try:
        content = tomllib.loads(file.read_text())
    except (OSError, ValueError):  # none, or one that Prefect leaves out too
        return None
    asked = os.environ.get(PROFILE)
    name = asked or content.get("active")
    profiles = content.get("profiles")
    profile = profiles.get(name) if isinstance(profiles, dict) and isinstance(name, str) else None
    given = profile.get(API_URL) if isinstance(profile, dict) else None
    if not given or not isinstance(given, str):
        return None
    if asked:
        return Candidate(plain_address(given), "environment", f"{PROFILE}={asked}")
    return Candidate(plain_address(given), "profile", f"the active profile {name} of {file}")


def plain_address(url: str) -> str:
    """A server's address as it is kept and compared: in small letters, without the usual port, and
    with one name for this host."""
    scheme, mark, rest = url.rstrip("/").partition("://")
    at, slash, path = rest.partition("/")
    scheme = scheme.lower()
    if "@" not in at:  # a password keeps its letters
        at = at.lower().removesuffix(f":{USUAL_PORTS.get(scheme)}")
    host, colon, port = at.partition(":")
    return f"{scheme}{mark}{HOST if host == 'localhost' else host}{colon}{port}{slash}{path}"


def how_to_start(set_in: str = "") -> str:
    """The command, in words, that starts torpor and makes its deployments at the server that is
    meant: `torpor up` would start another one here where that server is elsewhere. ``set_in`` as
    for choose_server()."""
    choice = choose_server(set_in=set_in)
    if choice is not None and choice.taken.source == "connection":
        return f"`torpor up`, or `docker compose up`, on the host of {choice.taken.api_url}"
    if choice is not None and choice.taken.source == "profile":
        return f"`{API_URL}={choice.taken.api_url} torpor up`"
    return "`torpor up`"


def how_to_hibernate() -> str:
    """The command, in words, with which watch hibernates idle machines at the server that is
    meant."""
    choice = choose_server()
    if choice is not None and choice.taken.source == "connection":
        return f"`torpor connect {choice.taken.api_url.removesuffix('/api')} --idle hibernate`"
    return "`torpor up --idle hibernate`"
