"""Where the Prefect server of this user's installation answers, as its files say."""

from __future__ import annotations

from pathlib import Path
from typing import Final, NamedTuple

from torpor.control.supervision import state_folder

HOST: Final = "127.0.0.1"
PORT_FILE: Final = "server.port"
LOGIN_FILE: Final = "login"


class OwnServer(NamedTuple):
    """The API's address, and its login as ``user:password``."""

    api_url: str
    login: str


def api_url(port: int | None) -> str:
    """The address of the server's API at that port of this host."""
    return f"http://{HOST}:{port}/api"


def recorded_port(folder: Path) -> int | None:
    """The port of the installation's server; None before its first start."""
    try:
        return int((folder / PORT_FILE).read_text())
    except (OSError, ValueError):
        return None


def own_server() -> OwnServer | None:
    """The server of this user's installation, running or not; None where there is none."""
    folder = state_folder()
    port = recorded_port(folder)
    try:
        login = (folder / LOGIN_FILE).read_text().strip()
    except OSError:
        return None
    return OwnServer(api_url(port), login) if port and login else None
