"""Which Prefect server blocks and flows use: torpor/control/own_server.py decides."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

import prefect.context
from prefect.settings import Settings, get_current_settings

from torpor.control.own_server import (
    API_URL,
    LOGIN_VARIABLE,
    Candidate,
    announce,
    choose_server,
    is_this_host,
    set_apart,
    without_proxy,
)
from torpor.shared.errors import InvalidInput

_SETTINGS: Final = (".env", "prefect.toml", "pyproject.toml")
"""The files in the current folder from which Prefect reads settings. Prefect would add the headers
that these files name to those of the environment variable, so the variable is set to nothing
(`set_apart`)."""


def connect() -> None:
    """Use the server that is meant, and say which where another could have been. Where nothing
    names one, Prefect decides."""
    choice = choose_server(set_in=get_current_settings().api.url or "")
    if choice is None:
        return
    announce(choice)
    taken = choice.taken
    _keep_from_proxies(taken)
    if taken.source not in ("installation", "connection"):
        return  # Prefect's settings name the server, with its login
    if taken.source == "connection":
        set_apart()
    elif os.environ.get(API_URL) == taken.api_url and LOGIN_VARIABLE in os.environ:
        return
    os.environ[API_URL] = taken.api_url
    os.environ[LOGIN_VARIABLE] = taken.login  # empty for a server elsewhere that asks for no login
    prefect.context.refresh_global_settings_context()
    if taken.source == "connection" and get_current_settings().client.custom_headers:
        files = ", ".join(str(file) for name in _SETTINGS if (file := Path.cwd() / name).exists())
        raise InvalidInput(
            f"{files} sets headers of Prefect's client (custom_headers), which may hold a key of "
            f"another server, and Prefect would send them to {taken.api_url}, which `torpor "
            "connect` chose: run this in another folder, or delete them there"
        )


def _keep_from_proxies(taken: Candidate) -> None:
    """Keep unencrypted requests away from proxies, which would see the login and what blocks
    hold."""
    host = urlsplit(taken.api_url).hostname or ""
    if is_this_host(host):
        os.environ.update(without_proxy(host))


def prefect_settings() -> Settings:
    """Prefect's settings, after the choice of the server."""
    return get_current_settings()


def connected_server() -> str:
    """The server in use where `torpor connect` chose it; empty where another one is used."""
    choice = choose_server(set_in=get_current_settings().api.url or "")
    connected = choice is not None and choice.taken.source == "connection"
    return choice.taken.api_url if choice is not None and connected else ""


def see_that_it_is_of_this_host(what: str) -> None:
    """InvalidInput where `torpor connect` chose a server: ``what`` the block names is on the host
    of that server, and this host has another one under the same address or path, or none."""
    if server := connected_server():
        raise InvalidInput(
            f"{what} is on the host of the server {server}, which `torpor connect` "
            "chose, and this command runs on another host: add --detach, where the command has it, "
            "so that the worker there does it; or run it on that host; or give the workspace a "
            "bucket and a market, which both hosts reach (`torpor init`, `torpor edit`)"
        )


def server_in_use() -> str:
    """The server that is asked, for messages."""
    return get_current_settings().api.url or (
        "a temporary server, because neither PREFECT_API_URL nor an installation names one"
    )
